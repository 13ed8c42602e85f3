"""A response as it grows: policy tokens from the engine, environment tokens from tools, over pauses and weight updates.

Routes. Row i of a sample's routes holds the experts of token i as the model's input, so N tokens have N - 1 rows: the last
token has not been an input yet. When S tokens are held, rows 0 .. S-2 are held, and the next request asks for rows from S - 1 on. Its
first row is that of the boundary token: sampled (or appended) before the request, first read by it.
"""

from array import array

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
        want_routes, want_sampling_mask: each answer of the engine must bring them.
    """

    def __init__(self, sample_id: int, group_id: int, prompt: Prompt, max_response: int, want_routes: bool = False,
                 want_sampling_mask: bool = False):
        self.sample_id, self.group_id, self.prompt, self.max_response = sample_id, group_id, prompt, max_response
        self.tokens = array("q", prompt.tokens)
        self.mask = array("b")
        self.logp = array("f")
        self.routes: list[np.ndarray] | None = [] if want_routes else None
        self.sampling_mask: list[np.ndarray] | None = [] if want_sampling_mask else None
        self.versions: list[tuple[str, int, int]] = []
        self.turns = 0
        self.status: Status | None = None       # None while it grows

    @property
    def remaining(self) -> int:
        return self.max_response - len(self.mask)

    @property
    def route_rows(self) -> int:
        """Route rows held, and so the position of the first row that the next request has to bring."""
        return sum(len(rows) for rows in self.routes or ())

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.mask)

    def extend(self, generation: Generation) -> None:
        """Add the tokens that the engine sampled after everything held so far.

        Raises:
            EngineError: too many tokens, or routes or sampling masks that are missing or do not fit.
        """
        ids = generation.output_ids
        if not ids:
            return
        if len(ids) > self.remaining:
            raise EngineError(f"{generation.server}: request {generation.request_id} asked for at most {self.remaining} tokens "
                              f"and got {len(ids)}")
        rows = [] if self.routes is None else [self._new_rows(generation)]
        support = [] if self.sampling_mask is None else self._new_support(generation)
        offset = len(self.mask)
        self.tokens.extend(ids)
        self.mask.extend([1] * len(ids))
        self.logp.extend(np.asarray(generation.logp, np.float32).tolist())
        self._add_versions((v, offset + a, offset + b) for v, a, b in generation.weight_versions)
        if self.routes is not None:
            self.routes += rows
        if self.sampling_mask is not None:
            self.sampling_mask += support

    def append(self, tokens: list[int]) -> None:
        """Add environment tokens: no log-prob, mask 0, routes with the next request."""
        self.tokens.extend(tokens)
        self.mask.extend([0] * len(tokens))
        self.logp.extend([0.0] * len(tokens))
        if self.sampling_mask is not None:
            self.sampling_mask += [np.array([t], np.int32) for t in tokens]

    def sample(self, tokenizer) -> Sample:
        """The finished sample. Environment tokens at the end have no route rows yet: they are cut off with them."""
        prompt, mask = self.prompt, np.array(self.mask, bool)
        length = int(mask.nonzero()[0][-1]) + 1 if mask.any() else 0
        tokens = np.array(self.tokens[:len(prompt.tokens) + length], np.int64)
        return Sample(
            sample_id=self.sample_id, group_id=self.group_id, tokens=tokens, prompt_length=len(prompt.tokens), loss_mask=mask[:length],
            rollout_logp=np.array(self.logp[:length], np.float32), status=self.status or Status.ABORTED,
            routes=None if not self.routes else self.routes[0] if len(self.routes) == 1 else np.concatenate(self.routes),
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask[:length],
            weight_versions=list(self.versions), prompt=prompt.text, label=prompt.label, metadata=dict(prompt.metadata), turns=self.turns,
            response=tokenizer.decode(tokens[len(prompt.tokens):].tolist(), skip_special_tokens=True))

    def _new_rows(self, generation: Generation) -> np.ndarray:
        wanted = len(self.tokens) + len(generation.output_ids) - 1 - self.route_rows
        if generation.routes is None or len(generation.routes) not in (wanted, wanted + 1):     # some engines add the last token's row
            found = "no routes" if generation.routes is None else f"{len(generation.routes)} route rows"
            raise EngineError(f"{generation.server}: request {generation.request_id} returned {found}, expected {wanted} rows from "
                              f"position {self.route_rows} on")
        return generation.routes[:wanted]

    def _new_support(self, generation: Generation) -> list[np.ndarray]:
        support = generation.sampling_mask
        if support is None or len(support) != len(generation.output_ids):
            found = "no sampling mask" if support is None else f"sampling masks of {len(support)} tokens"
            raise EngineError(f"{generation.server}: request {generation.request_id} returned {found} for {len(generation.output_ids)} "
                              "tokens; --use-rollout-sampling-mask needs SGLang 0.5.16 or newer, and no router that drops the field")
        return list(support)

    def _add_versions(self, spans) -> None:
        for version, start, end in spans:
            if self.versions and self.versions[-1][0] == version and self.versions[-1][2] == start:
                start = self.versions.pop()[1]
            self.versions.append((version, start, end))
