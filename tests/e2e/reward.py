"""A reward of its own for --custom-rm-path."""


async def even_tokens(args, sample):
    """The share of even token ids in the response."""
    response = sample.tokens[sample.prompt_length:]
    return float((response % 2 == 0).mean())


def two_rewards(args, sample):
    tokens = [int(t) for t in sample.tokens[sample.prompt_length:]]
    return {"even": sum(t % 2 == 0 for t in tokens) / max(len(tokens), 1), "short": float(len(set(tokens)) < len(tokens))}


async def by_id(args, sample):
    """Of an engine that answers a prompt always in the same words, every second response is good."""
    return float(sample.sample_id % 2)
