"""Dynamic sampling of one's own:  --dynamic-sampling-filter-path examples/hooks/sampling_filter.py:neither_easy_nor_hopeless"""

from megatron_grpo.hooks import FilterOutput


def neither_easy_nor_hopeless(args, samples):
    """Train on prompts that are solved at times. `samples` is one group, with raw rewards; the reason is counted in the metrics."""
    mean = sum(s.reward for s in samples) / len(samples)
    if 0 < mean < 1:
        return FilterOutput(True)
    return FilterOutput(False, reason="too_easy" if mean >= 1 else "too_hard")
