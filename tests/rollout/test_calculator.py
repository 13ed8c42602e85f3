"""The worked example examples/calculator_tool.py, on a scripted engine and on the real server."""

import numpy as np
import pytest

from benchmarks.simulation import run_virtual
from examples.calculator_tool import MOST_CALLS, calculate
from megatron_grpo.batch import Status
from megatron_grpo.hooks import HookConfig, load_hooks
from megatron_grpo.rollout.engine import Generation, SamplingParams
from megatron_grpo.rollout.gate import Gate
from megatron_grpo.rollout.multi_turn import Conversation, converse
from megatron_grpo.rollout.prompts import Prompt
from megatron_grpo.rollout.tokenizer import make_character_tokenizer
from megatron_grpo.rollout.trajectory import Trajectory
from megatron_grpo.routing.audit import audit

from .simulated import Tokenizer, make_sampler

HOOKS = load_hooks(HookConfig(rollout_function_path="examples/calculator_tool.py:rollout"), None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_character_tokenizer(tmp_path_factory.mktemp("tokenizer"), "+-*/0123456789=[]?")


@pytest.mark.parametrize("written, value", [
    ("[1+2]", "3"), ("so 12[ 3*4-5]", "7"), ("[1][2+2]", "4"), ("[((2+3))*-4]", "-20"), ("[7//2]", "3"), ("[7//0]", "?"), ("[1+]", "?"),
    ("[2**9]", "?"), ("[1.5]", "?"), ("[True]", "?"), ("[x]", "?"), ("]", "?"), (f"[{'9*' * 40}9]", "?"), ("[" + "(" * 60 + "]", "?")])
def test_what_the_calculator_says(written, value):
    assert calculate(written) == value


class Scripted:
    """Writes one text a turn."""

    def __init__(self, tokenizer, texts):
        self.texts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.prompts = []

    async def generate(self, request):
        ids = self.texts.pop(0)[:request.params.max_new_tokens]
        self.prompts.append(list(request.input_ids))
        reason = "stop" if ids[-1] in request.params.stop_token_ids else "length"
        return Generation(request.request_id, ids, np.full(len(ids), -1, np.float32), reason)


def play(tokenizer, texts, limit=40):
    engine = Scripted(tokenizer, texts)
    trajectory = Trajectory(0, 0, Prompt(0, "12*3=", tokenizer.encode("12*3=")), limit)
    conversation = Conversation(trajectory, Gate(engine), SamplingParams(limit, stop_token_ids=(tokenizer.eos_token_id,)), tokenizer)
    run_virtual(converse(conversation, HOOKS.rollout, 10.0))
    return trajectory.sample(tokenizer), engine


def test_results_are_read_and_not_trained_on(tokenizer):
    sample, engine = play(tokenizer, ["[12*3]", "[36-1]", "36<eos>"])
    assert sample.response == "[12*3]36[36-1]3536" and sample.turns == 3 and sample.status is Status.COMPLETED
    assert sample.loss_mask.tolist() == [True] * 6 + [False] * 2 + [True] * 6 + [False] * 2 + [True] * 3
    assert [tokenizer.decode(p, skip_special_tokens=True) for p in engine.prompts] == ["12*3=", "12*3=[12*3]36", "12*3=[12*3]36[36-1]35"]


def test_calls_end_at_their_number_and_at_the_length(tokenizer):
    sample, engine = play(tokenizer, ["[1]"] * MOST_CALLS + ["1<eos>"])
    assert sample.turns == MOST_CALLS + 1 and not engine.texts
    sample, _ = play(tokenizer, ["[9*9]"], limit=6)
    assert sample.status is Status.TRUNCATED and sample.response == "[9*9]" and sample.turns == 1


def test_a_tokenizer_without_the_bracket_is_refused(tmp_path):
    with pytest.raises(ValueError, match='a tokenizer in which "]" is one token'):
        play(make_character_tokenizer(tmp_path, "0123456789=*"), ["1"])


class Brackets(Tokenizer):
    """On a random model: the token `close`, which it does write, stands for "]", and what it writes is always [17*24]."""

    eos_token_id, unk_token_id = None, 3

    def __init__(self, close):
        self.close = close

    def encode(self, text, add_special_tokens=True):
        return [self.close] if text == "]" else [10 + ord(c) % 100 for c in text]

    def decode(self, tokens, skip_special_tokens=False):
        return "[17*24]"


@pytest.mark.engine
def test_routes_of_a_tool_conversation_on_the_real_server(sglang_server):
    """Every row passes the audit and is the one that reading the whole conversation at once gives."""
    from .test_client_real import MODEL, SPEC, greedy, run

    async def scenario(client):
        options = dict(return_routes=True, rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_response_len=40, rollout_top_k=1)
        first = (await make_sampler(client, **options).rollout()).samples[0]
        sampler = make_sampler(client, hooks=HOOKS, **options)
        sampler.runner.tokenizer = Brackets(int(first.tokens[first.prompt_length + 4]))
        samples = (await sampler.rollout()).samples
        return samples, [await client.generate(greedy(f"whole{s.sample_id}", s.tokens.tolist(), 1)) for s in samples]
    samples, whole = run(scenario, sglang_server.url, model=MODEL)
    assert max(s.turns for s in samples) > 1
    for sample, read in zip(samples, whole, strict=True):
        tool = sample.tokens[sample.prompt_length:][~sample.loss_mask]
        assert tool.tolist() == ([10 + ord(c) % 100 for c in "408"] * 5)[:len(tool)]
        audit(sample.sample_id, sample.routes, SPEC, tokens=len(sample.tokens))
        assert (np.sort(sample.routes) != np.sort(read.routes[:len(sample.routes)])).any(-1).mean() < 0.01
