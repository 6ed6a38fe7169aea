"""Where a rank can leave out a step by itself: `if ...: continue` before backward, decided by its own batch.

The ordinary run only looks for such places, in the source around the first backward pass. A separate run then takes one
of them on one rank: as if a batch of this rank alone fulfilled the condition.
"""

import ast
import contextlib
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch.distributed as dist

from ..trail import note, trail
from .common import CONFIG, quietly

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "reduce", "gather", "scatter", "barrier", "all_to_all")
DIRECT = {f"{name}{kind}" for name in COLLECTIVES for kind in ("", "_object", "_tensor", "_single")}
DIRECT |= {"all_gather_into_tensor", "broadcast_object_list"}
ARRIVAL = 3
"""the branch is taken when its condition is reached for the third time"""
FRAMES = 4
"""innermost frames of the user that are looked at"""


class Branches:
    """What is known of the branches of this process."""

    looked = False
    arrivals = 0
    taken = False


@quietly
def look() -> None:
    """Note the branches before the first backward pass; in the run that takes one of them, prepare that."""
    if Branches.looked:
        return
    Branches.looked = True
    frame: FrameType | None = sys._getframe(1)
    users: list[FrameType] = []
    while frame and len(users) < FRAMES:
        if trail.kind_of(frame.f_code.co_filename) > 0:
            users.append(frame)
        frame = frame.f_back
    for user in users:
        scope, in_loop = scope_of(user)
        for test, body in branches_of(scope, user, in_loop):
            note("branch", at=f"{user.f_code.co_filename}:{test}", body=body)
        if in_loop:
            break
    if CONFIG.branch and dist.is_initialized() and dist.get_rank() == CONFIG.branch_rank:
        for user in users:
            user.f_trace = trace
        sys.settrace(trace)


def trace(frame: FrameType, event: str, value: Any) -> Any:  # noqa: ANN401
    """Jump into the branch when its condition is reached for the third time. A trace function of Python."""
    file, _, line = CONFIG.branch.rpartition(":")
    if frame.f_code.co_filename != file:
        return None
    if event == "line" and frame.f_lineno == int(line) and not Branches.taken:
        Branches.arrivals += 1
        if Branches.arrivals >= ARRIVAL:
            Branches.taken, at = True, trail.place_of(frame)
            sys.settrace(None)
            with contextlib.suppress(ValueError):  # Python cannot jump there
                frame.f_lineno = CONFIG.branch_body  # type: ignore[misc]  # a trace function may
                note("branch_taken", at=at)
    return trace


def scope_of(frame: FrameType) -> tuple[ast.AST | None, bool]:
    """Return the innermost loop around the line of a frame, or its function; and whether it is a loop."""
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    line, first = frame.f_lineno, frame.f_code.co_firstlineno
    scope: ast.AST | None = tree if frame.f_code.co_name == "<module>" else None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            starts = [node.lineno, *(one.lineno for one in node.decorator_list)]
            if min(starts) == first and node.name == frame.f_code.co_name:
                scope = node
    if scope is None:
        return None, False
    loop = None
    for node in ast.walk(scope):  # the outer ones first
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or 0):
            loop = node
    return loop or scope, loop is not None


def branches_of(scope: ast.AST | None, frame: FrameType, in_loop: bool) -> Iterator[tuple[int, int]]:
    """Yield the lines of conditions that leave out the rest of a step, and of the first statements after them."""
    if scope is not None:
        search = Search(
            ends=ast.Continue if in_loop else ast.Return,
            own=names_of_batch(scope, frame),
            talking=functions_with_collectives(frame.f_code.co_filename),
        )
        for statement in statements_before(getattr(scope, "body", []), frame.f_lineno):
            yield from search.look_at(statement)


@dataclass
class Search:
    """What is known of the names in the statements before a backward pass, read in their order."""

    ends: type[ast.stmt]
    """of the statement that leaves out the rest of the step"""
    own: set[str]
    """names that hold something of this rank's batch"""
    talking: set[str]
    """names of functions that call a collective"""
    agreed: set[str] = field(default_factory=set)
    """names of what went through a collective: it is the same on all ranks"""

    def look_at(self, statement: ast.stmt) -> Iterator[tuple[int, int]]:
        """Learn from a statement; yield the conditions in it by which this rank alone leaves out the step."""
        if isinstance(statement, ast.If | ast.With):
            if isinstance(statement, ast.If) and self.is_branch(statement):
                yield statement.lineno, statement.body[0].lineno
            else:
                for inner in statement.body:
                    yield from self.look_at(inner)
        elif calls_in(statement) & self.talking:
            in_place = calls_in(statement) & DIRECT or not isinstance(statement, ast.Assign)
            self.agreed |= names_in(statement) if in_place else stored_in(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            value = statement.value
            if value is not None and (names_in(value) & self.own or "next" in calls_in(value)):
                self.own |= stored_in(statement)

    def is_branch(self, statement: ast.If) -> bool:
        """Return whether this rank's batch decides that the rest of the step is left out, in lines of their own."""
        used = names_in(statement.test)
        return (
            isinstance(statement.body[-1], self.ends)
            and statement.body[0].lineno > statement.test.lineno
            and not statement.orelse
            and bool(used & self.own)
            and not used & self.agreed
            and not calls_in(statement.test) & self.talking
        )


def statements_before(body: list[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """Yield the statements of a body that end before a line, also those of the blocks around this line."""
    for statement in body:
        if (statement.end_lineno or 0) < line:
            yield statement
        elif isinstance(statement, ast.With | ast.AsyncWith | ast.Try | ast.If):
            yield from statements_before(statement.body, line)
            return
        else:
            return


def names_of_batch(scope: ast.AST, frame: FrameType) -> set[str]:
    """Return the names that hold this rank's batch: the targets of a loop, the arguments of a function."""
    if isinstance(scope, ast.For):
        target: ast.AST = scope.target
        counted = isinstance(scope.iter, ast.Call) and "enumerate" in calls_in(scope.iter)
        if counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
        return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    if isinstance(scope, ast.FunctionDef):
        return {
            one.arg
            for one in scope.args.args
            if one.arg != "self" and not isinstance(frame.f_locals.get(one.arg), int | float | str)
        }
    return set()


def names_in(node: ast.AST) -> set[str]:
    """Return the names of variables in a piece of source."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def stored_in(statement: ast.stmt) -> set[str]:
    """Return the names that a statement assigns to."""
    names = [one for one in ast.walk(statement) if isinstance(one, ast.Name)]
    return {one.id for one in names if isinstance(one.ctx, ast.Store)}


def calls_in(node: ast.AST) -> set[str]:
    """Return the names of the functions and methods that a piece of source calls."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {getattr(one, "id", getattr(one, "attr", "")) for one in calls}


def functions_with_collectives(file: str) -> set[str]:
    """Return the names of collectives, and of the functions of a file that call one."""
    tree = ast.parse("".join(linecache.getlines(file)))
    names = DIRECT | {"gather_for_metrics", "reduce_tensor"}
    for _ in range(2):  # also those that call such a function
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and calls_in(node) & names:
                names.add(node.name)
    return names
