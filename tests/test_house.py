"""The house: small rooms, of which each knows only those below it; and how little of it lesson 01 is made of.

The rooms are the modules and packages right under workshop/.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import workshop
from conftest import REPOSITORY

HOUSE = REPOSITORY / "workshop"
GROUND_FLOOR_FIRST = [
    "errors",
    "paths",
    "signals",
    "hardware",
    "config",
    "commandline",
    "datasets",
    "distributed",
    "models",
    "loaders",
    "profiling",
    "step",
    "run",
    "measuring",
]
MODULES = sorted(HOUSE.rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def name_of(module: Path) -> str:
    return str(module.relative_to(HOUSE))


def length(file: Path) -> int:
    return len(file.read_text().splitlines())


def imports_of(file: Path, inside_functions: bool) -> set[Path]:
    """The workshop's modules that a file imports by name; those of functions are imported only when they are called."""
    found = set()
    for node in nodes_of(ast.parse(file.read_text()), inside_functions):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import, which this does not follow"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {module for name in names for module in MODULES if name == dotted(module)}
    return found


def nodes_of(node: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if inside_functions or not isinstance(child, FUNCTIONS):
            yield from nodes_of(child, inside_functions)


def dotted(module: Path) -> str:
    return ".".join(module.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def closure_of(file: Path) -> set[Path]:
    """All modules of the workshop that are read when ``file`` is imported, with the packages they are in."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        imported = imports_of(waiting.pop(), inside_functions=False)
        packages = {folder / "__init__.py" for module in imported for folder in module.parents}
        new = (imported | packages & set(MODULES)) - found
        found |= new
        waiting += new
    return found


@pytest.fixture(scope="module")
def read_by_lesson_01() -> set[Path]:
    return closure_of(REPOSITORY / "01_single_gpu" / "train.py")


def test_lesson_01_is_short() -> None:
    assert length(REPOSITORY / "01_single_gpu" / "train.py") <= 100


def test_lesson_01_asks_for_little(read_by_lesson_01: set[Path]) -> None:
    assert HOUSE / "run" / "progress.py" in read_by_lesson_01
    assert sum(map(length, read_by_lesson_01)) <= 3000


def test_lesson_01_knows_nothing_of_a_process_group(read_by_lesson_01: set[Path]) -> None:
    assert HOUSE / "distributed" / "process_group.py" in MODULES
    assert HOUSE / "distributed" / "process_group.py" not in read_by_lesson_01


def test_modules_are_small() -> None:
    assert {name_of(module): length(module) for module in MODULES if length(module) > 250} == {}


def test_every_room_is_known() -> None:
    assert {room_of(module) for module in MODULES} == {*GROUND_FLOOR_FIRST, "__init__"}
    described = [line.split()[0] for line in workshop.__doc__.splitlines() if "  " in line]
    assert described == GROUND_FLOOR_FIRST


def room_of(module: Path) -> str:
    return name_of(module).partition("/")[0].removesuffix(".py")


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_a_room_imports_only_from_rooms_below_it(module: Path) -> None:
    floor: Callable[[str], int] = ["__init__", *GROUND_FLOOR_FIRST].index
    imported = imports_of(module, inside_functions=True)
    above = {name_of(other) for other in imported if floor(room_of(other)) > floor(room_of(module))}
    assert above == set()
