"""Edits of a script, which find their lines by content, so that the rest of the script may change.

An edit consists of blocks, each of which says which lines to find and what to put in their place:

    <<<<<<< find
        loss_sum += loss.detach() * len(targets)
    ======= replace with
        loss_sum += loss.item() * len(targets)
    >>>>>>>

The lines must be in the script exactly once. Only their code is compared: comments are ignored, and so are the places
where a long line was broken. Lines without code at the beginning or end of the block, such as a comment above an
argument, are replaced too where the script has such lines there. A block that finds nothing adds its lines after the
last import.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError

BLOCK = re.compile(r"^<<<<<<< find\n(.*?)^======= replace with\n(.*?)^>>>>>>>$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Fix:
    """An edit of a faulty script that is meant to make it right."""

    name: str
    right: bool
    about: str
    """what it does and, if it is wrong, why; empty if learners need not know"""
    edit: str


def read_fixes(file: Path) -> list[Fix]:
    """Return the edits of a file, each below a line ``## right NAME: what it does`` or ``## wrong NAME: why``."""
    parts = re.split(r"^## (right|wrong) (\w+)(?:: (.*))?$", file.read_text(), flags=re.MULTILINE)
    assert not parts[0].strip(), f"{file} begins with something that is no heading"
    found = zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True)
    return [Fix(name, kind == "right", about or "", edit) for kind, name, about, edit in found]


def edited(script: str, edits: str) -> str:
    """Return ``script`` with the blocks of an edit applied to it, one after the other.

    Raises:
        UserError: the lines of a block are not in the script, or more than once, or a block is not complete.
    """
    if rest := BLOCK.sub("", edits).strip():
        raise UserError(f"an edit consists of blocks, and this line is in none: {rest.splitlines()[0]!r}")
    lines = script.split("\n")
    for find, replace in BLOCK.findall(edits):
        wanted, new = find.split("\n")[:-1], replace.split("\n")[:-1]
        if not wanted:
            place = _after_imports(lines)
            lines[place:place] = new
            continue
        found = _places(wanted, lines)
        if len(found) != 1:
            where = "is not there" if not found else f"is there {len(found)} times"
            first = next(line.strip() for line in wanted if _code(line))
            raise UserError(
                f"the lesson's train.py is no longer what the exercise begins with: {first!r} {where}; "
                "if you changed it, put yours aside and type `git checkout train.py` in the lesson's folder"
            )
        begin, end = found[0]
        lines[begin:end] = new
    return "\n".join(lines)


def _places(wanted: list[str], lines: list[str]) -> list[tuple[int, int]]:
    """Return where ``lines`` have the code of the lines ``wanted``: the index of the first line, and after the last."""
    code, codes = "".join(map(_code, wanted)), [_code(line) for line in lines]
    with_code = [i for i, line in enumerate(wanted) if _code(line)]
    before, after = with_code[0], len(wanted) - 1 - with_code[-1]
    indent = _indent(wanted[with_code[0]])
    places = []
    for begin in range(len(lines)):
        if not codes[begin] or _indent(lines[begin]) != indent:
            continue
        end, found = begin, ""
        while end < len(lines) and len(found) < len(code):
            found += codes[end]
            end += 1
        if found == code:
            first, last = max(0, begin - before), min(len(lines), end + after)
            while any(codes[first:begin]):
                first += 1
            while any(codes[end:last]):
                last -= 1
            places.append((first, last))
    return places


def _code(line: str) -> str:
    """Return a line without its comment and without white space."""
    return "".join(re.sub(r"(^|\s)# .*$", "", line).split())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _after_imports(lines: list[str]) -> int:
    """Return the index of the line after the last import at the top level."""
    last = max(i for i, line in enumerate(lines) if re.match(r"(from|import) \S", line))
    if lines[last].endswith("("):
        last = lines.index(")", last)
    return last + 1
