"""Show stored tables, single figures, code and outputs in the pages: `python -m lab.pages [--check] [PAGE ...]`.

A page says once, at its beginning, on which machines its figures were measured:

    <!-- machines: amd_epyc_avx512_2cpu, nvidia_h200_1gpu -->

A table is looked up in the folder of the first of them that has it, and links to plots in `results/` follow. So the
figures of another machine replace those of a page by one word. (MACHINE/TABLE is the table of one certain machine.)

A page says what it shows in HTML comments, which GitHub does not display. This script writes what belongs between them
and `<!-- end -->`:

    <!-- table: TABLE -->                           a stored table with its caption
    <!-- table: TABLE | columns: a; b | rows: c; d -->              some of it
    <!-- figure: TABLE row.column :,.0f -->         a number within a line, in a format
    <!-- figure: 1 - value("TABLE row.column") :.0% -->             a computed one
    <!-- code: 03_ddp/train.py ranks_from_env main -->              definitions of a script
    <!-- code: 03_ddp/train.py train from "TEXT" to "TEXT" -->      lines of one; without "to", one statement
    <!-- output: results/example_output/NAME.txt -->                a text file
    <!-- output: results/example_output/NAME.txt | lines: a; b -->  its lines that contain one of these texts
    <!-- exercises: 03_ddp -->                      the exercises of a lesson, or of `all`
    <!-- stored: all -->                            all stored tables, by machine and date

What a text claims is only checked:

    <!-- assert: value("loaders memory.FULL") > 3 * value("loaders map.FULL") -->

Whoever reads a page in an editor should see short names and not long expressions. So a page may name what its markers
show, and list its assertions, in one comment at its end; `<!-- figure: gain -->` then shows the first of these:

    <!-- figures
    gain = value("loaders memory.FULL") / value("loaders map.FULL") :.1f
    assert value("loaders memory.FULL") > 3 * value("loaders map.FULL")
    -->

The paths of figures are explained in lab/results.py. A comment at the beginning of a line makes GitHub show the rest of
this line as it is, without links or bold words, so a figure must not begin a line. Markers right after a backtick are
examples, and left alone.
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
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from lab import results
from lab.results import cell_text, cell_texts, high, load, low, plain, value
from workshop.paths import REPOSITORY

MARKER = re.compile(
    r"(?<!`)<!-- (table|figure|code|output|exercises|stored): ([^\n]*?) -->(.*?)<!-- end -->", re.DOTALL
)
ASSERTION = re.compile(r"(?<!`)<!-- assert: (.*?) -->", re.DOTALL)
FIGURES = re.compile(r"^<!-- figures\n(.*?)^-->", re.DOTALL | re.MULTILINE)
MACHINES = re.compile(r"^<!-- machines: (.*?) -->$", re.MULTILINE)
LINK = re.compile(r"(?P<before>\]\((?:\.\./)*results/)(?P<machine>\w+_\d+[cg]pu)(?P<after>/[^)\s]+\))")
"""a link to what was measured on a machine"""
LANGUAGES = {".py": "python", ".slurm": "sh", ".sh": "sh", ".yaml": "yaml"}


@dataclass
class Page:
    """A page, the machines whose figures it shows, those that it prefers first, and what it says at its end."""

    file: Path
    machines: list[str]
    names: dict[str, str] = field(default_factory=dict)
    assertions: list[str] = field(default_factory=list)
    machine: str = ""
    """of the last caption"""

    @classmethod
    def of(cls, file: Path, text: str) -> "Page":
        """Return the page in a file."""
        named = MACHINES.search(text)
        lines = [line for block in FIGURES.findall(text) for line in block.splitlines() if line.strip()]
        assertions = [line.removeprefix("assert ") for line in lines if line.startswith("assert ")]
        names = dict(line.split(" = ", 1) for line in lines if not line.startswith("assert "))
        return cls(file, named[1].split(", ") if named else [], names, ASSERTION.findall(text) + assertions)

    def path(self, path: str) -> str:
        """Return "MACHINE/TABLE ..." for "TABLE ...".

        Raises:
            LookupError: none of the page's machines has this table.
        """
        table, space, rest = path.strip().partition(" ")
        if "/" in table:
            return path
        return f"{self.machine_with(f'{table}.json')}/{table}{space}{rest}"

    def machine_with(self, file: str) -> str:
        """Return the first of the page's machines that has a file. Raises LookupError."""
        for machine in self.machines:
            if (results.RESULTS / machine / file).exists():
                return machine
        raise LookupError(f"none of the page's machines ({', '.join(self.machines) or 'none'}) has {file}")


def evaluate(expression: str, page: Page) -> Any:  # noqa: ANN401, a number or a truth value
    """Evaluate an expression over stored figures; it can use value, low, high, abs, min, max, round and sum."""
    names: dict[str, Callable] = {"abs": abs, "min": min, "max": max, "round": round, "sum": sum}
    names |= {
        "value": lambda path: value(page.path(path)),
        "low": lambda path: low(page.path(path)),
        "high": lambda path: high(page.path(path)),
    }
    return eval(expression.replace("\n", " "), {"__builtins__": {}} | names)  # not as locals: a generator has others


def table(what: str, page: Page) -> str:
    """Return a stored table in Markdown, and a caption that says what the numbers are and where they were measured."""
    name, *choices = what.split(" | ")
    stored = load(*page.path(name).split("/", 1))
    header, rows = stored["columns"], cell_texts(stored)
    shown = list(range(len(header)))
    for choice in choices:
        kind, _, names = choice.partition(": ")
        labels = {"columns": header, "rows": [row[0] for row in rows]}[kind]
        chosen = [[plain(label) for label in labels].index(plain(name)) for name in names.split(";")]
        if kind == "columns":
            shown = [0, *chosen]
        else:
            rows = [rows[number] for number in chosen]
    lines = [[line[number] for number in shown] for line in (header, *rows)]
    right = [number > 0 and mostly_numbers(cells) for number, (_, *cells) in enumerate(zip(*lines, strict=True))]
    lines.insert(1, ["---:" if numbers else "---" for numbers in right])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n*{caption(stored, page)}*"


def mostly_numbers(cells: Sequence[str]) -> bool:
    """Return whether more than half of the cells begin with a number; such a column is aligned to the right."""
    return sum(bool(re.match(r"[^\w`]*\d(?!.*[a-z]{3}.* [a-z]{2})|-?$", cell)) for cell in cells) > len(cells) / 2


def caption(stored: dict[str, Any], page: Page) -> str:
    """Return one line on a stored table: what its numbers are, the machine, the version, the date and the command.

    A machine and a version that the caption before it on the page has are "the same machine".
    """
    machine = stored["machine"]
    cpus = f"{machine['cpus_available']} CPUs of an {machine['cpu']} ({machine['cpu_instructions']})"
    where = f"{machine.get('device_name') or cpus}, torch {stored['versions']['torch']}"
    named = "Same machine" if where == page.machine else where
    page.machine = where
    what = ", ".join(part for part in (stored["unit"], stored["spread"]) if part)
    return f"{what[:1].upper()}{what[1:]}{'. ' if what else ''}{named}, {stored['date']}: `{stored['command']}`"


def figure(what: str, page: Page) -> str:
    """Return one number; ``what`` is a path or an expression, and after " :" its format."""
    expression, _, form = what.partition(" :")
    return cell_text(evaluate(expression, page) if '("' in expression else value(page.path(expression)), form)


def code(what: str, page: Page) -> str:
    """Return definitions of a script, lines of one of them, or a whole file, as a block of code."""
    path, *words = shlex.split(what)
    text = (REPOSITORY / path).read_text()
    if "from" in words:
        name, _, first, *rest = words
        shown = lines_of(definition(text, name), first, rest[1] if rest else None)
    else:
        shown = "\n\n\n".join(definition(text, name) for name in words) or text.rstrip()
    return f"```{LANGUAGES[Path(path).suffix]}\n{shown}\n```"


def definition(text: str, name: str) -> str:
    """Return a definition at the top level of a script, with the comments directly above it; "imports" are all imports.

    Raises:
        LookupError: the script has none of this name.
    """
    lines, nodes = text.splitlines(), ast.parse(text).body
    first, last = len(lines) + 1, 0
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        names = [getattr(node, "name", ""), *(ast.unparse(target) for target in getattr(node, "targets", []))]
        if name in names or (name == "imports" and isinstance(node, ast.Import | ast.ImportFrom)):
            first = min(first, *(part.lineno for part in (node, *getattr(node, "decorator_list", []))))
            described = isinstance(node, ast.Assign) and isinstance(getattr(after, "value", None), ast.Constant)
            last = (after if after and described else node).end_lineno or 0
    if last == 0:
        raise LookupError(f"no definition {name}")
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return "\n".join(lines[first - 1 : last])


def lines_of(text: str, first: str, last: str | None) -> str:
    """Return lines of a definition without their indentation.

    They begin with the line that contains ``first``, and end with the statement that contains ``last``; if that is
    None, with the statement that begins there.

    Raises:
        LookupError: the definition does not contain them.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines, 1) if first in line), 0)
    stop = next((number for number, line in enumerate(lines, 1) if number >= start and (last or first) in line), 0)
    if not start or not stop:
        raise LookupError(f"no {first!r} and then {last!r}" if last else f"no {first!r}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.end_lineno and (last is None or not hasattr(node, "body")):
            begins_there = node.lineno == start if last is None else node.lineno <= stop <= node.end_lineno
            stop = max(stop, node.end_lineno) if begins_there else stop
    return textwrap.dedent("\n".join(lines[start - 1 : stop]))


def output(what: str, page: Page) -> str:
    """Return a text file, or some of its lines, as a block of text, without the command that its first line may name.

    Raises:
        LookupError: no line contains one of the texts.
    """
    name, _, texts = what.partition(" | lines: ")
    shown = re.sub(r"\A\$ .*\n", "", (REPOSITORY / name).read_text())
    if texts:
        wanted = texts.split("; ")
        lines = shown.splitlines()
        for text in wanted:
            if not any(text in line for line in lines):
                raise LookupError(f"no line contains {text!r}")
        shown = "\n".join(line for line in lines if any(text in line for text in wanted))
    return "```text\n" + shown.strip("\n") + "\n```"


def exercises(what: str, page: Page) -> str:
    """Return the exercises in the order of the course: a table of all lessons, or a line of those of one."""
    files = sorted(REPOSITORY.glob("0*/exercises/*/about.toml"))
    course = [(file.parent, tomllib.loads(file.read_text())) for file in files]
    course.sort(key=lambda exercise: (exercise[0].parts[-3], exercise[1].get("order", 0)))
    numbered = [(number, *exercise) for number, exercise in enumerate(course, 1)]
    lines = ["| | exercise | minutes | difficulty | what it teaches |", "| ---: | --- | ---: | ---: | --- |"]
    names = []
    for lesson, members in groupby(numbered, key=lambda exercise: exercise[1].parts[-3]):
        lines.append(f"| | **[{lesson}]({os.path.relpath(REPOSITORY / lesson, page.file.parent)}/README.md)** | | | |")
        for number, folder, about in members:
            link = f"[`{folder.name}`]({os.path.relpath(folder, page.file.parent)}/README.md)"
            cells = (number, link, about["minutes"], about["difficulty"], about["teaches"])
            lines.append(f"| {' | '.join(map(str, cells))}{' (bonus)' if about.get('bonus') else ''} |")
            if lesson == what:
                names.append(f"{link} ({about['minutes']}, {'*' * about['difficulty']})".replace("*", "\\*"))
    return "\n".join(lines) if what == "all" else textwrap.fill(", ".join(names) + ".", 125, break_on_hyphens=False)


def stored(what: str, page: Page) -> str:
    """Return a table of all stored tables, by machine and date; each file has its commit and its command."""
    days: dict[tuple[str, str], list[str]] = {}
    for file in sorted(REPOSITORY.glob("results/*/*.json")):
        day = (file.parent.name, load(file.parent.name, file.stem)["date"])
        days.setdefault(day, []).append(f"[`{file.stem}`]({os.path.relpath(file, page.file.parent)})")
    lines = ["| machine | date | tables |", "| --- | --- | --- |"]
    lines += [f"| {machine} | {date} | {', '.join(tables)} |" for (machine, date), tables in sorted(days.items())]
    return "\n".join(lines)


SHOW: dict[str, Callable[[str, Page], str]] = {
    "table": table,
    "figure": figure,
    "code": code,
    "output": output,
    "exercises": exercises,
    "stored": stored,
}


def rendered(text: str, file: Path) -> tuple[str, list[str]]:
    """Return the text of a page with everything that its markers ask for, and what is wrong with them."""
    problems = []
    page = Page.of(file, text)

    def show(marker: re.Match[str]) -> str:
        kind, what, shown_before = marker.groups()
        before = text[text.rfind("\n", 0, marker.start()) + 1 : marker.start()]  # on the same line
        try:
            if "<!-- " in shown_before:
                raise LookupError("it has no <!-- end -->")
            if kind == "figure" and re.fullmatch(r"[\s>]*([-*+]|\d+\.)?\s*", before):
                raise LookupError("a figure must not begin a line")
            shown = SHOW[kind](page.names.get(what, what), page)
        except Exception as error:  # report all wrong markers, not only the first
            problems.append(f"{file}: <!-- {kind}: {what} -->: {error}")
            return marker[0]
        if kind != "figure":
            shown = "\n" + textwrap.indent(shown, before) + "\n" + before
        return f"<!-- {kind}: {what} -->{shown}<!-- end -->"

    def follow(link: re.Match[str]) -> str:
        try:
            return f"{link['before']}{page.machine_with(link['after'][1:-1])}{link['after']}"
        except LookupError as error:
            problems.append(f"{file}: {link[0][1:]}: {error}")
            return link[0]

    new = MARKER.sub(show, text)
    if page.machines:
        new = LINK.sub(follow, new)
    shown = {what for _, what, _ in MARKER.findall(text)}
    problems += [f"{file}: {name} is shown nowhere" for name in page.names if name not in shown]
    for assertion in page.assertions:
        try:
            if not evaluate(assertion, page):
                problems.append(f"{file}: not so: {assertion}")
        except Exception as error:
            problems.append(f"{file}: <!-- assert: {assertion} -->: {error}")
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
