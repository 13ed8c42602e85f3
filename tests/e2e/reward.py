"""A reward of its own for --custom-rm-path."""


async def even_tokens(args, sample):
    """The share of even token ids in the response."""
    response = sample.tokens[sample.prompt_length:]
    return float((response % 2 == 0).mean())
