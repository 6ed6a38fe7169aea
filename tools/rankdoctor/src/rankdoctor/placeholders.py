"""Arguments of a script that depend on the number of ranks: ``--batch_size '{64/ranks}'``."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class WrongPlaceholder(ValueError):
    """An expression in braces that cannot be computed; the message says why."""


def filled(argument: str, ranks: int) -> str:
    """Return an argument of the script with its expressions of ``ranks`` computed. Raises WrongPlaceholder.

    Braces that do not name ``ranks`` stay as they are.
    """
    return re.sub(r"\{([^{}]*\branks\b[^{}]*)\}", lambda found: computed(found[1], ranks), argument)


def computed(text: str, ranks: int) -> str:
    """Return the value of an expression: a whole number if all of its numbers are whole. Raises WrongPlaceholder."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise WrongPlaceholder(f"{{{text}}} is no expression of ranks, such as {{64/ranks}}") from None
    try:
        result = value_of(tree, ranks)
    except ZeroDivisionError:
        raise WrongPlaceholder(f"{{{text}}} divides by zero with {ranks} ranks") from None
    whole = not any(isinstance(node, ast.Constant) and isinstance(node.value, float) for node in ast.walk(tree))
    if whole and result != int(result):
        raise WrongPlaceholder(
            f"{{{text}}} is {result:.4g} with {ranks} ranks, and no whole number: choose other --ranks, or write a "
            "number with a point if a fraction is meant"
        )
    return str(int(result) if whole else result)


def value_of(node: ast.expr, ranks: int) -> float:
    """Return the value of a part of an expression. Raises WrongPlaceholder."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value is not True:
        return node.value
    if isinstance(node, ast.Name) and node.id == "ranks":
        return ranks
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand, ranks)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left, ranks), value_of(node.right, ranks))
    raise WrongPlaceholder(
        f"an expression in braces may have numbers, ranks, + - * / //, but not {ast.unparse(node)!r}"
    )
