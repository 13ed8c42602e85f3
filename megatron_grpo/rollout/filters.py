"""Built-in filters for --dynamic-sampling-filter-path (DAPO, arXiv 2503.14476, section 3.2: 0 < correct answers < G).

They look at the raw rewards, before any shaping: a length penalty would make every group look informative.
"""

from ..batch import Sample
from ..hooks import FilterOutput

TOLERANCE = 1e-9        # equal rewards that were summed in another order


def reward_nonzero_std(args, samples: list[Sample]) -> FilterOutput:
    """Keep a group whose rewards differ: its advantages are not all 0."""
    return _differ({"reward": [s.reward for s in samples]})


def any_reward_nonzero_std(args, samples: list[Sample]) -> FilterOutput:
    """Keep a group in which at least one named reward differs, also if the sum does not: GDPO normalises each on its own."""
    names = sorted({name for s in samples for name in s.rewards})
    return _differ({name: [s.rewards.get(name, 0.0) for s in samples] for name in names})


def _differ(columns: dict[str, list[float]]) -> FilterOutput:
    if any(max(values) - min(values) > TOLERANCE for values in columns.values()):
        return FilterOutput(keep=True)
    return FilterOutput(keep=False, reason=", ".join(f"every {name} is {values[0]:g}" for name, values in columns.items()))
