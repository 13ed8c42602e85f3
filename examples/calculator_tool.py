"""A calculator as a tool: the policy writes [17*24], the calculator appends its result, the policy goes on.

    python -m megatron_grpo.train ... --rollout-function-path examples/calculator_tool.py:rollout

The result's tokens are part of the sequence that the model reads, with loss mask 0: the policy did not choose them. The tokenizer must
have a token that is exactly "]", which ends a turn; a character tokenizer needs "[" and "]" in its alphabet.
"""

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
MOST_CALLS = 4
LONGEST_EXPRESSION = 64     # characters; what is longer is not computed


async def rollout(args, episode):
    """At most MOST_CALLS calculations, then the answer."""
    close = call_end(episode.tokenizer)
    for _ in range(MOST_CALLS):
        turn = await episode.generate(stop_token_ids=(close,))
        if not turn.output_ids or turn.output_ids[-1] != close:
            return      # an answer, or the end of the response's length
        written = episode.tokenizer.decode(turn.output_ids)
        episode.append(episode.tokenizer.encode(calculate(written), add_special_tokens=False))
        if not episode.remaining:
            return
    await episode.generate()


def call_end(tokenizer) -> int:
    """The token that ends a call. Raises ValueError when "]" is not one token."""
    ids = tokenizer.encode("]", add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError('the calculator needs a tokenizer in which "]" is one token')
    return ids[0]


def calculate(written: str) -> str:
    """The value of the last [expression], or "?" for one that is none: integers, + - * // and brackets."""
    expression = written.rpartition("[")[2].removesuffix("]").strip()
    try:
        if len(expression) > LONGEST_EXPRESSION:
            raise ValueError(expression)
        return str(_value(ast.parse(expression, mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return "?"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))
