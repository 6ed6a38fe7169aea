"""Show stored tables, single figures, code and outputs in the pages: `python -m lab.pages [--check] [PAGE ...]`.

A page says what it shows in HTML comments, which GitHub does not display. This script writes what belongs between them:

    <!-- table: MACHINE/TABLE -->        a stored table with its caption; some of it: `MACHINE/TABLE | columns: a; b | rows: c; d`
    <!-- figure: MACHINE/TABLE row.column :,.0f -->      a number within a line, also computed: `1 - value("MACHINE/TABLE row.column")`
    <!-- code: 03_ddp/train.py ranks_from_env -->        definitions of a script, or a part of one: `train from "TEXT" to "TEXT"`
    <!-- output: results/example_output/NAME.txt -->     a text file
    <!-- exercises: 03_ddp -->           the exercises of a lesson, or of `all`; `answers: 03_ddp` the fault and the fix of each

each with `<!-- end -->` after it. What a text claims stands beside it, and is only checked:

    <!-- assert: value("MACHINE/loaders memory.FULL") > 3 * value("MACHINE/loaders map.FULL") -->

A comment at the beginning of a line makes GitHub show the rest of this line as it is, without links or bold words, so a
figure must not begin a line. Markers behind a backtick are examples, and left alone.
"""

import argparse
import ast
import os
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lab.results import cell_text, cell_texts, high, load, low, plain, value
from workshop.paths import REPOSITORY

MARKER = re.compile(
    r"(?<!`)<!-- (table|figure|code|output|exercises|answers): ([^\n]*?) -->(.*?)<!-- end -->", re.DOTALL
)
ASSERTION = re.compile(r"(?<!`)<!-- assert: (.*?) -->", re.DOTALL)
LANGUAGES = {".py": "python", ".slurm": "sh", ".sh": "sh", ".yaml": "yaml"}


def evaluate(expression: str) -> Any:  # noqa: ANN401, a number or a truth value
    """Evaluate an expression over stored figures; it can use value, low, high, abs, min, max, round, sum."""
    names = {"value": value, "low": low, "high": high, "abs": abs, "min": min, "max": max, "round": round, "sum": sum}
    return eval(expression.replace("\n", " "), {"__builtins__": {}}, names)


def table(what: str, page: Path) -> str:
    """Return a stored table in Markdown, and a caption that says what the numbers are and where they were measured."""
    name, *chosen = what.split(" | ")
    stored = load(*name.split("/", 1))
    header, rows = [plain(column) for column in stored["columns"]], cell_texts(stored)
    shown, keep = list(range(len(header))), rows
    for choice in chosen:
        kind, _, names = choice.partition(": ")
        wanted = [plain(one) for one in names.split(";")]
        if kind == "columns":
            shown = [0, *(header.index(column) for column in wanted)]
        elif kind == "rows":
            labels = [plain(row[0]) for row in rows]
            keep = [rows[labels.index(label)] for label in wanted]
        else:
            raise LookupError(f"no choice {kind!r}: columns or rows")
    lines = [[line[number] for number in shown] for line in (stored["columns"], *keep)]
    right = [number > 0 and mostly_numbers(cells) for number, (_, *cells) in enumerate(zip(*lines, strict=True))]
    lines.insert(1, ["---:" if numbers else "---" for numbers in right])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n*{caption(stored)}*"


def mostly_numbers(cells: Sequence[str]) -> bool:
    """Return whether more than half of the cells begin with a number; such a column is aligned to the right."""
    return sum(bool(re.match(r"[^\w`]*\d(?!.*[a-z]{3}.* [a-z]{2})|-?$", cell)) for cell in cells) > len(cells) / 2


def caption(stored: dict[str, Any]) -> str:
    """Return one line on a stored table: what its numbers are, the machine, the versions, the date and the command."""
    machine, versions = stored["machine"], stored["versions"]
    cpu = f"{machine['cpus_available']} CPUs of an {machine['cpu']} ({machine['cpu_instructions']})"
    what = ", ".join(part for part in (stored["unit"], stored["spread"]) if part)
    where = f"{machine.get('device_name') or cpu}, torch {versions['torch']}, {stored['date']}: `{stored['command']}`"
    return f"{what[:1].upper()}{what[1:]}{'. ' if what else ''}{where}"


def figure(what: str, page: Path) -> str:
    """Return one number; ``what`` is a path or an expression, and after " :" its format."""
    expression, _, form = what.partition(" :")
    return cell_text(evaluate(expression) if '("' in expression else value(expression), form)


def code(what: str, page: Path) -> str:
    """Return definitions of a script, lines of one definition, or a whole file, as a block of code."""
    path, *words = shlex.split(what)
    text = (REPOSITORY / path).read_text()
    language = LANGUAGES[Path(path).suffix]
    if "from" in words:
        (name, _, first, *rest) = words
        parts = [lines_of(text, name, first, rest[1] if rest else None)]
    else:
        parts = [definition(text, name) for name in words] or [text.rstrip()]
    joined = "\n\n\n".join(parts)
    return f"```{language}\n{joined}\n```"


def definition(text: str, name: str) -> str:
    """Return a definition at the top level of a script, with the comments directly above it; "imports" are all imports.

    Raises:
        LookupError: the script has none of this name.
    """
    lines, nodes = text.splitlines(), ast.parse(text).body
    ends: list[int] = []
    for number, node in enumerate(nodes):
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        names += [ast.unparse(target) for target in getattr(node, "targets", [])]
        names += ["imports"] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if name in names:
            start = min(part.lineno for part in (node, *getattr(node, "decorator_list", [])))
            after = nodes[number + 1] if number + 1 < len(nodes) else None
            documented = isinstance(node, ast.Assign) and isinstance(getattr(after, "value", None), ast.Constant)
            ends += [start, (after if after and documented else node).end_lineno or 0]
    if not ends:
        raise LookupError(f"no definition {name}")
    start = min(ends)
    while lines[start - 2].startswith("#") and start > 1:
        start -= 1
    return "\n".join(lines[start - 1 : max(ends)])


def lines_of(text: str, name: str, first: str, last: str | None) -> str:
    """Return lines of a definition without their indentation: those from the line that contains ``first`` to the end of
    the statement with ``last`` in it, or of the statement that begins at ``first``.

    Raises:
        LookupError: a text is not in the definition.
    """
    source = definition(text, name)
    lines = source.splitlines()
    start = next((number for number, line in enumerate(lines, 1) if first in line), None)
    stop = next((number for number, line in enumerate(lines, 1) if number >= (start or 1) and (last or first) in line), 0)
    if start is None or not stop:
        raise LookupError(f"no {first!r} and then {last!r} in {name}")
    whole = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    if last is None:
        stop = max((node.end_lineno or 0 for node in whole if node.lineno == start), default=stop)
    else:
        simple = [node for node in whole if not hasattr(node, "body") and node.lineno <= stop]
        stop = max([stop, *(end for node in simple if (end := node.end_lineno or 0) >= stop)])
    return textwrap.dedent("\n".join(lines[start - 1 : stop]))


def output(what: str, page: Path) -> str:
    """Return a text file as a block of text, without the command that its first line may name."""
    text = (REPOSITORY / what).read_text().strip("\n")
    shown = re.sub(r"\A\$ .*\n", "", text)
    return f"```text\n{shown}\n```"


def _exercises(lesson: str) -> list[tuple[int, Path, dict[str, Any]]]:
    """Return number, folder and description of the exercises of a lesson, or of all; numbers are those of the course."""
    files = sorted(REPOSITORY.glob("0*/exercises/*/about.toml"))
    found = [(file.parent, tomllib.loads(file.read_text())) for file in files]
    found.sort(key=lambda one: (one[0].parts[-3], one[1].get("order", 0), one[0].name))
    numbered = [(number, *one) for number, one in enumerate(found, 1)]
    return [one for one in numbered if lesson in ("all", one[1].parts[-3])]


def exercises(what: str, page: Path) -> str:
    """Return a table of the exercises of a lesson, or of all lessons."""
    lines = ["| | exercise | minutes | difficulty | what it teaches |", "| ---: | --- | ---: | ---: | --- |"]
    for lesson, members in groupby(_exercises(what), key=lambda one: one[1].parts[-3]):
        if what == "all":
            lines.append(f"| | **[{lesson}]({os.path.relpath(REPOSITORY / lesson, page.parent)}/README.md)** | | | |")
        for number, folder, about in members:
            link = f"[`{folder.name}`]({os.path.relpath(folder, page.parent)}/README.md)"
            bonus = " (bonus)" if about.get("bonus") else ""
            lines.append(f"| {number} | {link} | {about['minutes']} | {about['difficulty']} | {about['teaches']}{bonus} |")
    return "\n".join(lines)


def answers(what: str, page: Path) -> str:
    """Return a table of the exercises of a lesson: the fault of each, its fix, and wrong fixes."""
    lines = ["| exercise | the fault | the fix | usual wrong fixes, and why they are wrong |", "| --- | --- | --- | --- |"]
    for number, folder, about in _exercises(what):
        link = f"{number}. [`{folder.name}`]({os.path.relpath(folder, page.parent)}/README.md)"
        wrong = "<br>".join(f"• {text}" for text in about.get("wrong_fixes", {}).values())
        lines.append(f"| {link} ({about['minutes']} minutes) | {about['fault']} | {about['fix']} | {wrong} |")
    return "\n".join(lines)


SHOW: dict[str, Callable[[str, Path], str]] = {
    "table": table,
    "figure": figure,
    "code": code,
    "output": output,
    "exercises": exercises,
    "answers": answers,
}


def rendered(text: str, page: Path) -> tuple[str, list[str]]:
    """Return the text of a page with everything that its markers ask for, and what is wrong with them."""
    problems = []

    def show(marker: re.Match[str]) -> str:
        kind, what, shown_before = marker.groups()
        before = text[text.rfind("\n", 0, marker.start()) + 1 : marker.start()]  # on the same line
        try:
            if "<!-- " in shown_before:
                raise LookupError("it has no <!-- end -->")
            if kind == "figure" and re.fullmatch(r"[\s>]*([-*+]|\d+\.)?\s*", before):
                raise LookupError("a figure must not begin a line")
            shown = SHOW[kind](what, page)
        except Exception as error:  # whatever is wrong with one marker, the others are looked at too
            problems.append(f"{page}: <!-- {kind}: {what} -->: {error}")
            return marker[0]
        if kind != "figure":
            shown = "\n" + textwrap.indent(shown, before) + "\n" + before
        return f"<!-- {kind}: {what} -->{shown}<!-- end -->"

    new = MARKER.sub(show, text)
    for assertion in ASSERTION.findall(text):
        try:
            if not evaluate(assertion):
                problems.append(f"{page}: not so: {assertion}")
        except Exception as error:
            problems.append(f"{page}: <!-- assert: {assertion} -->: {error}")
    return new, problems


def pages() -> list[Path]:
    """Return all pages: the Markdown files of the repository but those in hidden folders and of runs."""
    found = sorted(REPOSITORY.rglob("*.md"))
    return [page for page in found if not re.match(r"(.*/)?\.|runs/|build/", str(page.relative_to(REPOSITORY)))]


def main() -> None:
    """Render the pages named on the command line, or all; with --check, only say which are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if a page is not up to date")
    parser.add_argument("pages", nargs="*", type=Path)
    arguments = parser.parse_args()
    problems = []
    for page in [page.resolve() for page in arguments.pages] or pages():
        text = page.read_text()
        new, wrong = rendered(text, page)
        problems += wrong
        if new != text and arguments.check:
            problems.append(f"{page} is not up to date: run `make docs`")
        elif new != text:
            page.write_text(new)
    for problem in problems:
        print(problem.replace(f"{REPOSITORY}/", ""), file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
