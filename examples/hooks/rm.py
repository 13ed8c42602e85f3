"""A reward of one's own:  --custom-rm-path examples/hooks/rm.py:answer_and_format

Two named rewards, for example for  --algorithm gdpo --gdpo-reward-keys correct format. An exception means that the verifier failed: the
sample is then left out, never given reward 0.
"""

import re


async def answer_and_format(args, sample):
    """`sample` is a Sample: prompt, response, label, metadata, tokens, status. A plain number is fine too."""
    found = re.findall(r"-?\d+(?:\.\d+)?", sample.response)
    return {"correct": float(bool(found) and found[-1] == str(sample.label)), "format": float(len(found) == 1)}
