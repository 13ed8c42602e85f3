"""Every rule refuses what it should, and the full table of pairs of flags is what it is meant to be.

ALONE are flags that cannot stand alone. Of two flags that can, CLASH lists the pairs that cannot stand together; of the others,
PARTNER lists the pairs in which one makes the other legal. Every other pair is as legal as its worse half.
"""

import itertools

import pytest

from megatron_grpo import refusals
from megatron_grpo.config import GRPOConfig, KLConfig, LossConfig
from megatron_grpo.settings import ConfigError, flag
from tests.algorithm_flags import resolve

ALONE = """--gdpo-reward-keys a b|--gdpo-reward-weights 1 2|--gdpo-batch-norm none|--kl-penalty immediate|--gamma 0.9|--gamma-tool-tokens
--whiten-std population|--ratio none|--sapo-tau-pos 2|--clip-cov-ratio 0.1|--kl-cov-ratio 0.1|--dppo-ratio-max 5|--dro-beta 1
--vespo-k-pos 1|--loss-norm-length 100
--kl-loss-coef 0.1|--kl-loss-type k3|--use-unbiased-kl|--kl-gradient pathwise|--kl-input-clamp 5|--kl-output-clamp 5
--tis-mode icepop|--tis-clip 3|--tis-clip-low 0.5|--tis-batch-normalize|--opsm-delta 0.1|--renormalize-masked|--overlong-penalty-factor 0.5
--overlong-unbounded|--rollout-ahead 1|--n-samples-per-prompt 1""".replace("\n", "|").split("|")

FREE = """--advantage-estimator rloo|--advantage-estimator reinforce|--advantage-estimator reinforce_plus_plus|--advantage-estimator opo
--advantage-estimator reinforce_plus_plus_baseline|--advantage-estimator gpg|--advantage-estimator passk|--advantage-std none
--advantage-baseline leave_one_out|--advantage-eps 1e-4|--singleton-advantage reward|--kl-coef 0.1|--normalize-advantages|--advantage-clip 5
--ratio sequence|--ratio sequence_token|--ratio on_policy|--surrogate reinforce|--surrogate sapo|--surrogate gmpo|--surrogate clip_cov
--surrogate kl_cov|--surrogate dppo_tv|--surrogate dppo_kl|--surrogate dro|--surrogate vespo|--surrogate cispo|--eps-clip 0.1
--eps-clip-high 0.3|--eps-clip-c 3|--log-ratio-min -5|--log-ratio-max 5|--reducer token_mean|--reducer seq_mean_token_sum
--reducer seq_mean_token_sum_norm|--reducer prompt_mean|--reducer rollout_mean|--entropy-coef 0.01|--use-kl-loss|--use-tis
--rejection token_k3=..1|--rs-veto-threshold 1e-4|--use-opsm|--use-rollout-logprobs|--seq-logprob-error-threshold 1.1|--reward-scale 2
--reward-clip 1|--stop-properly-penalty-coef 0.5|--overlong-buffer-len 100|--overlong-filter|--num-steps-per-rollout 4
--custom-pg-loss-path a.b|--custom-pg-loss-reducer-path a.b|--custom-advantage-function-path a.b|--custom-tis-function-path a.b
--custom-reward-post-process-path a.b|--calculate-per-token-loss|--disable-grpo-std-normalization""".replace("\n", "|").split("|")

NO_GROUP = "--advantage-std none | --advantage-baseline leave_one_out | --advantage-eps 1e-4 | --singleton-advantage reward"
NO_STD = "--advantage-baseline leave_one_out | --advantage-eps 1e-4"
UNCLIPPED = "--eps-clip 0.1 | --eps-clip-high 0.3 | --eps-clip-c 3 | --custom-pg-loss-path a.b"
HAS_OWN_RATIO = "--ratio sequence | --ratio sequence_token | --ratio on_policy"
CLASH = f"""
--advantage-estimator reinforce: {NO_GROUP}
--advantage-estimator reinforce_plus_plus: {NO_GROUP}
--advantage-estimator reinforce_plus_plus_baseline: {NO_STD}
--advantage-estimator rloo: {NO_STD}
--advantage-estimator opo: {NO_STD}
--advantage-estimator gpg: {NO_STD}
--advantage-estimator passk: --advantage-baseline leave_one_out
--advantage-eps 1e-4: --advantage-std none | --disable-grpo-std-normalization
--ratio sequence: --calculate-per-token-loss
--ratio sequence_token: --calculate-per-token-loss | --surrogate reinforce | --surrogate cispo | --surrogate dppo_tv | --surrogate dppo_kl
--ratio on_policy: --eps-clip 0.1 | --eps-clip-high 0.3 | --eps-clip-c 3 | --use-rollout-logprobs | --num-steps-per-rollout 4
--surrogate reinforce: {UNCLIPPED}
--surrogate sapo: {UNCLIPPED}
--surrogate kl_cov: {UNCLIPPED}
--surrogate dro: {UNCLIPPED} | {HAS_OWN_RATIO}
--surrogate vespo: {UNCLIPPED} | {HAS_OWN_RATIO}
--surrogate gmpo: --eps-clip-c 3 | --custom-pg-loss-path a.b | --calculate-per-token-loss | {HAS_OWN_RATIO}
--surrogate cispo: --eps-clip-c 3 | --custom-pg-loss-path a.b
--surrogate dppo_tv: --eps-clip-c 3 | --custom-pg-loss-path a.b
--surrogate dppo_kl: --eps-clip-c 3 | --custom-pg-loss-path a.b
--surrogate clip_cov: --custom-pg-loss-path a.b
--use-rollout-logprobs: --use-tis | --rejection token_k3=..1 | --rs-veto-threshold 1e-4
--use-rollout-logprobs: --seq-logprob-error-threshold 1.1 | --custom-tis-function-path a.b
--custom-pg-loss-reducer-path a.b: --reducer token_mean | --reducer seq_mean_token_sum | --reducer seq_mean_token_sum_norm
--custom-pg-loss-reducer-path a.b: --reducer prompt_mean | --reducer rollout_mean
--custom-reward-post-process-path a.b: --reward-scale 2 | --reward-clip 1 | --stop-properly-penalty-coef 0.5 | --overlong-buffer-len 100
"""
PARTNER = """
--n-samples-per-prompt 1: --advantage-estimator reinforce | --advantage-estimator reinforce_plus_plus | --singleton-advantage reward
--gamma 0.9: --advantage-estimator reinforce_plus_plus
--kl-coef 0.1: --kl-penalty immediate | --kl-loss-type k3
--normalize-advantages: --whiten-std population
--surrogate reinforce: --ratio none
--surrogate sapo: --sapo-tau-pos 2
--surrogate clip_cov: --clip-cov-ratio 0.1
--surrogate kl_cov: --kl-cov-ratio 0.1
--dppo-ratio-max 5: --surrogate dppo_tv | --surrogate dppo_kl
--surrogate dro: --dro-beta 1
--surrogate vespo: --vespo-k-pos 1
--reducer seq_mean_token_sum_norm: --loss-norm-length 100
--use-kl-loss: --kl-loss-coef 0.1 | --kl-loss-type k3 | --use-unbiased-kl | --kl-gradient pathwise
--use-kl-loss: --kl-input-clamp 5 | --kl-output-clamp 5
--use-tis: --tis-mode icepop | --tis-clip 3 | --tis-clip-low 0.5 | --tis-batch-normalize
--custom-tis-function-path a.b: --tis-clip 3 | --tis-clip-low 0.5
--use-opsm: --opsm-delta 0.1
--renormalize-masked: --rejection token_k3=..1 | --rs-veto-threshold 1e-4 | --seq-logprob-error-threshold 1.1
--rollout-ahead 1: --use-tis | --rejection token_k3=..1 | --use-rollout-logprobs | --custom-tis-function-path a.b
--overlong-buffer-len 100: --overlong-penalty-factor 0.5 | --overlong-unbounded
"""

EXAMPLES = {
    "--advantage-clip 0": "--advantage-clip 0.0: give a number above 0",
    "--kl-coef -1": "--kl-coef -1.0: give 0 or more",
    "--advantage-eps nan": "--advantage-eps nan: give 0 or more",
    "--advantage-estimator reinforce_plus_plus --gamma 1.5": "--gamma 1.5: give a discount in [0, 1]",
    "--reward-scale 0": "--reward-scale 0 makes every reward 0",
    "--eps-clip-c 1": "--eps-clip-c 1.0 bounds the ratio from above where the advantage is negative: give a number above 1",
    "--surrogate clip_cov --clip-cov-ratio 2": "--clip-cov-ratio 2.0: give a share in (0, 1]",
    "--surrogate kl_cov --kl-cov-ratio 0": "--kl-cov-ratio 0.0: give a share in (0, 1]",
    "--rs-veto-threshold 3": "give one in (0, 1]",
    "--seq-logprob-error-threshold 0.9": "which is at least 1: give more",
    "--rejection seq_ratio=1": "--rejection seq_ratio=1: write LEVEL_METRIC=LOW..HIGH",
    "--advantage-estimator gdpo --gdpo-reward-keys a": "use --advantage-estimator grpo, which is the same with one reward",
    "--advantage-estimator gdpo --gdpo-reward-keys a a": "two or more different rewards",
    "--advantage-estimator gdpo --gdpo-reward-keys a b --gdpo-reward-weights 1": "differ in number",
    "--advantage-estimator gdpo --gdpo-reward-keys a b --gdpo-reward-weights 0 0": "are all 0",
    "--advantage-estimator gdpo --gdpo-reward-keys a b --gdpo-batch-norm tokens --normalize-advantages": "do the same thing twice",
    "--advantage-estimator gdpo --gdpo-reward-keys a b --reward-scale 2": "drop --reward-scale, --reward-clip and",
    "--advantage-estimator gdpo --gdpo-reward-keys a b --overlong-buffer-len 9": "add overlong to --gdpo-reward-keys",
    "--overlong-buffer-len 2000": "is more than --rollout-max-response-len 1000",
    "--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1": "count the KL twice: drop one",
    "--eps-clip 2": "the lower bound 1 - eps of a ratio cannot be negative",
    "--log-ratio-min 3": "must lie on both sides of 0",
    "--surrogate clip_cov --clip-cov-low 9": "--clip-cov-low 9.0 must be below --clip-cov-high 5.0",
    "--ratio none --surrogate cispo": "--ratio none leaves --surrogate cispo nothing to clip or weigh",
    "--use-tis --tis-clip-low 3": "--tis-clip-low 3.0 must be below --tis-clip 2.0",
    "--renormalize-masked --use-opsm": "what OPSM masks stays in the denominators",
    "--renormalize-masked --rejection token_k1=..1 --custom-tis-function-path a.b": "gives them within it: drop one of them",
    "--rollout-ahead 2 --use-opsm": "--rollout-ahead 2 trains on samples of older weights and nothing corrects for it: add --use-tis",
    "--advantage-estimator reinforce --kl-penalty return_to_go --gamma 1 --gamma-tool-tokens": "--gamma is 1",
}


@pytest.fixture
def fired(monkeypatch):
    """The rules that fire while the test runs."""
    rules, original = [], refusals.broken

    def broken(*args):
        found = original(*args)
        rules.extend(rule for rule, _ in found)
        return found

    monkeypatch.setattr(refusals, "broken", broken)
    return rules


def refused(*flags):
    try:
        resolve(" ".join(flags))
    except ConfigError as error:
        return str(error)
    return None


def table(text):
    return {frozenset((a, b)) for line in text.strip().splitlines() for a, rest in [line.split(": ", 1)] for b in rest.split(" | ")}


def test_full_table_of_pairs():
    assert [f for f in FREE if refused(f)] == [] and [f for f in ALONE if not refused(f)] == []
    clash, partner = table(CLASH), table(PARTNER)
    everything = [*ALONE, *FREE]
    assert {f for pair in clash | partner for f in pair} <= set(everything)
    wrong = []
    for a, b in itertools.combinations(everything, 2):
        if a.split()[0] == b.split()[0]:
            continue
        pair, message = frozenset((a, b)), refused(a, b)
        legal = pair in partner or (a in FREE and b in FREE and pair not in clash)
        if legal != (message is None):
            wrong.append((a, b, message))
        elif message is not None and not any(f.split()[0] in message for f in (a, b)):
            wrong.append((a, b, f"does not name the flag: {message}"))
    assert wrong == []


@pytest.mark.parametrize("words", EXAMPLES)
def test_message_says_the_fix(words):
    message = refused(words)
    assert message is not None and EXAMPLES[words] in message, message


def test_every_rule_has_an_example(fired):
    for words in [*EXAMPLES, *ALONE, *(f"{a} {b}" for a, b in map(sorted, table(CLASH)))]:
        refused(words)
    with pytest.raises(ConfigError, match="--loss-norm-length"):        # flags take it from --rollout-max-response-len
        GRPOConfig(loss=LossConfig(reducer="seq_mean_token_sum_norm"))
    silent = [rule.flags for rule in (*refusals.VALUES, *refusals.PAIRS, *refusals.UNUSED) if rule not in fired and len(rule.flags) > 1]
    assert silent == []


@pytest.mark.parametrize("rule", [r for r in refusals.VALUES if len(r.flags) == 1 and "give " in r.why], ids=lambda r: r.flags[0])
def test_bad_numbers(rule):
    name = rule.flags[0]
    for value in ("-1", "nan"):
        if name == "rejection" or (name == "loss_norm_length" and value == "nan") or (name == "overlong_buffer_len" and value == "nan"):
            continue
        assert flag(name) in (refused(f"{flag(name)}={value}") or "")


def test_all_contradictions_are_told_at_once():
    message = refused("--kl-loss-coef 0.1 --opsm-delta 0.1 --eps-clip-c 0.5")
    assert len(message.splitlines()) == 3


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(ConfigError, match="--eps-clip-c"):
        GRPOConfig(loss=LossConfig(eps_clip_c=0.5))
    with pytest.raises(ConfigError, match="--surrogate gppo: choose among ppo, cispo"):
        GRPOConfig(loss=LossConfig(surrogate="gppo"))
    with pytest.raises(ConfigError, match="--kl-loss-type full: choose among k1"):
        GRPOConfig(kl=KLConfig(use_kl_loss=True, kl_loss_type="full"))
    GRPOConfig(loss=LossConfig(ratio="sequence", reducer="token_mean"))


def test_a_reducer_beside_a_custom_one():
    """It still reduces the KL and the entropy."""
    assert "--custom-pg-loss-reducer-path replaces it" in refused("--reducer token_mean --custom-pg-loss-reducer-function-path a.b")
    for words in ("--use-kl-loss --kl-loss-coef 0.1", "--entropy-coef 0.1"):
        assert refused(f"--reducer token_mean --custom-pg-loss-reducer-path a.b {words}") is None


def test_what_is_turned_off_is_no_contradiction():
    assert refused("--no-use-kl-loss --eps-clip-c none --no-overlong-unbounded --no-tis-batch-normalize") is None
