"""A reward of its own for --custom-rm-path."""


async def even_tokens(args, sample):
    """The share of even token ids in the response."""
    response = sample.tokens[sample.prompt_length:]
    return float((response % 2 == 0).mean())


async def by_id(args, sample):
    """Of an engine that answers a prompt always in the same words, every second response is good."""
    return float(sample.sample_id % 2)
