"""A reward that takes a second, so that a signal finds the run in mid-step."""

import asyncio


async def even_tokens(args, sample):
    """The share of even token ids in the response."""
    await asyncio.sleep(1)
    response = sample.tokens[sample.prompt_length:]
    return float((response % 2 == 0).mean())
