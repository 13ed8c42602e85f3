"""A rollout of one's own:  --rollout-function-path examples/hooks/rollout.py:think_twice

Two turns: the policy answers, an environment says "Check.", the policy answers again. Tokens of the environment are part of the
sequence and not trained on.
"""


async def think_twice(args, episode):
    """`episode` is one conversation with the engine; it ends when the function returns."""
    await episode.generate(max_new_tokens=max(1, episode.remaining // 2))
    words = episode.tokenizer.encode("\nCheck.\n", add_special_tokens=False)
    if episode.remaining <= len(words):
        return
    episode.append(words)
    await episode.generate()
