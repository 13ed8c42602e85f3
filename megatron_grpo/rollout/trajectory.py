"""A response as it grows: policy tokens from the engine, environment tokens from tools, over pauses and weight updates.

Routes. Row i of a sample's routes holds the experts of token i as the model's input, so N tokens have N - 1 rows: the last
token has not been an input yet. When S tokens are held, rows 0 .. S-2 are held, and the next request asks for rows from S - 1 on. Its
first row is that of the boundary token: sampled (or appended) before the request, first read by it.
"""

import numpy as np

from ..batch import Sample, Status
from .engine import EngineError, Generation
from .prompts import Prompt


class Trajectory:
    """Tokens, masks, log-probs, routes and weight versions of one growing sample.

    Args:
        sample_id, group_id: as in Sample.
        prompt: what it answers.
        max_response: longest response in tokens, environment tokens included.
    """

    def __init__(self, sample_id: int, group_id: int, prompt: Prompt, max_response: int):
        self.sample_id, self.group_id, self.prompt, self.max_response = sample_id, group_id, prompt, max_response
        self.tokens: list[int] = list(prompt.tokens)
        self.mask: list[bool] = []
        self.logp: list[float] = []
        self.routes: list[np.ndarray] = []
        self.sampling_mask: list[np.ndarray] | None = None
        self.versions: list[tuple[str, int, int]] = []
        self.turns = 0
        self.status: Status | None = None       # None while it grows

    @property
    def remaining(self) -> int:
        return self.max_response - len(self.mask)

    @property
    def route_rows(self) -> int:
        return sum(len(rows) for rows in self.routes)

    def extend(self, generation: Generation, routes_wanted: bool = False) -> None:
        """Add the tokens that the engine sampled after everything held so far."""
        ids = generation.output_ids
        if not ids:
            return
        if len(ids) > self.remaining:
            raise EngineError(f"{generation.server}: request {generation.request_id} asked for at most {self.remaining} tokens "
                              f"and got {len(ids)}")
        offset, expected = len(self.mask), len(self.tokens) + len(ids) - 1 - self.route_rows
        self.tokens += ids
        self.mask += [True] * len(ids)
        self.logp += np.asarray(generation.logp, dtype=np.float32).tolist()
        self._add_versions((v, offset + a, offset + b) for v, a, b in generation.weight_versions)
        if routes_wanted:
            if generation.routes is None or len(generation.routes) not in (expected, expected + 1):
                found = "no routes" if generation.routes is None else f"{len(generation.routes)} route rows"
                raise EngineError(f"{generation.server}: request {generation.request_id} returned {found}, expected {expected} rows")
            self.routes.append(generation.routes[:expected])
        if generation.sampling_mask is not None:
            if self.sampling_mask is None:
                self.sampling_mask = [np.array([t], np.int32) for t in self.tokens[len(self.prompt.tokens):-len(ids)]]
            self.sampling_mask += generation.sampling_mask

    def append(self, tokens: list[int]) -> None:
        """Add environment tokens: no log-prob, mask 0, routes with the next request."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logp += [0.0] * len(tokens)
        if self.sampling_mask is not None:
            self.sampling_mask += [np.array([t], np.int32) for t in tokens]

    def sample(self, tokenizer) -> Sample:
        """The finished sample. Environment tokens at the end have no route rows yet: they are cut off with them."""
        prompt = self.prompt
        length = len(self.mask) - next((i for i, chosen in enumerate(reversed(self.mask)) if chosen), len(self.mask))
        tokens = self.tokens[:len(prompt.tokens) + length]
        return Sample(
            sample_id=self.sample_id, group_id=self.group_id, tokens=np.array(tokens, np.int64), prompt_length=len(prompt.tokens),
            loss_mask=np.array(self.mask[:length], bool), rollout_logp=np.array(self.logp[:length], np.float32),
            status=self.status or Status.ABORTED, routes=np.concatenate(self.routes) if self.routes else None,
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask[:length],
            weight_versions=list(self.versions), prompt=prompt.text, label=prompt.label, metadata=dict(prompt.metadata), turns=self.turns,
            response=tokenizer.decode(tokens[len(prompt.tokens):], skip_special_tokens=True))

    def _add_versions(self, spans) -> None:
        for version, start, end in spans:
            if self.versions and self.versions[-1][0] == version and self.versions[-1][2] == start:
                start = self.versions.pop()[1]
            self.versions.append((version, start, end))
