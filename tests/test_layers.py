"""Imports go one way, and the maps of CONTRIBUTING.md, workshop and lab show what is there."""

import ast
import re
from pathlib import Path

import pytest

import lab
import workshop
from conftest import REPOSITORY

PACKAGE = REPOSITORY / "workshop"
LAYERS = [line.split()[0] for line in (workshop.__doc__ or "").splitlines() if "  " in line]
"""the modules and packages in workshop/, the lowest one first, as the package's docstring lists them"""
PARTS = {
    "lessons": ["0*/train.py", "0*/own_tokens/*.py"],
    "experiments": ["0*/experiments/*.py"],
    "graders": ["0*/exercises/*/*.py"],
    "workshop": ["workshop/**/*.py"],
    "lab": ["lab/*.py"],
    "studies": ["lab/studies/*.py"],
    "clinic": ["clinic/*.py", "exercise.py"],
    "data": ["data/*.py"],
    "slurm": ["slurm/*.py"],
    "nullgpu": ["tools/nullgpu/src/nullgpu/**/*.py"],
    "rankdoctor": ["tools/rankdoctor/src/rankdoctor/**/*.py"],
}
"""the boxes of the map in CONTRIBUTING.md, and the files in them"""
FILES = {part: [file for pattern in PARTS[part] for file in REPOSITORY.glob(pattern)] for part in PARTS}
PART_OF = {file: part for part, files in FILES.items() for file in files}
MAP = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("```mermaid")[2].partition("```")[0]


def imported_by(file: Path) -> set[str]:
    """The modules that a file imports anywhere, also in functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:  # others are of the same package
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def part_of(module: str, importer: Path) -> str | None:
    """The part of the repository that a module is of, or None if it is of a library."""
    beside = importer.with_name(f"{module.partition('.')[0]}.py")
    if beside in PART_OF:
        return PART_OF[beside]
    name = module.replace(".", "/")
    for folder in (".", "tools/nullgpu/src", "tools/rankdoctor/src", "data", "slurm"):
        for file in (REPOSITORY / folder / f"{name}.py", REPOSITORY / folder / name / "__init__.py"):
            if file in PART_OF:
                return PART_OF[file]
    return None


def test_the_map_has_the_imports_that_there_are() -> None:
    there = {
        (part, target)
        for part, files in FILES.items()
        for file in files
        for module in imported_by(file)
        if (target := part_of(module, file)) not in (None, part)
    }
    drawn = set(re.findall(r"^ *(\w+)(?:\[.*?\])? --> (\w+)", MAP, re.MULTILINE))
    assert drawn == there


def test_the_map_has_no_circle() -> None:
    arrows = re.findall(r"^ *(\w+)(?:\[.*?\])? --(?:.*--)?> (\w+)", MAP, re.MULTILINE)
    below: dict[str, set[str]] = {}
    for upper, lower in arrows:
        below.setdefault(upper, set()).add(lower)
    while below:
        ground = {part for part, targets in below.items() if not targets & below.keys()}
        assert ground, f"a circle among {sorted(below)}"
        below = {part: targets for part, targets in below.items() if part not in ground}


def test_the_tools_know_nothing_of_the_workshop() -> None:
    for tool in ("nullgpu", "rankdoctor"):
        for file in FILES[tool]:
            parts = {part_of(module, file) for module in imported_by(file)} - {None, tool}
            assert parts <= ({"nullgpu"} if tool == "rankdoctor" else set()), file


def test_the_map_of_lab_names_every_module() -> None:
    named = re.findall(r"^(\w+(?:, \w+)*)  +\S", (lab.__doc__ or "").partition("in a map:")[2], re.MULTILINE)
    files = {file.stem for file in (REPOSITORY / "lab").glob("*.py")} - {"__init__"}
    assert {name for names in named for name in names.split(", ")} == files | {"studies"}


def layer_of(module: str) -> str:
    return module.split(".")[1]


def test_every_module_of_the_package_is_in_its_list() -> None:
    found = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__"} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_imports_only_from_those_above_it_in_the_list(layer: str) -> None:
    for file in (PACKAGE / f"{layer}.py", *(PACKAGE / layer).glob("*.py")):
        if file.exists():
            used = {name for name in imported_by(file) if name.startswith("workshop.") and layer_of(name) in LAYERS}
            wrong = {name for name in used if LAYERS.index(layer_of(name)) > LAYERS.index(layer)}
            assert wrong == set(), f"{file.relative_to(REPOSITORY)} imports {wrong}"


def test_lesson_01_imports_nothing_of_lesson_03() -> None:
    for lesson in ("01_single_gpu", "02_dataparallel"):
        modules = imported_by(REPOSITORY / lesson / "train.py")
        assert not {name for name in modules if "distributed" in name.lower() and name.startswith("torch")}
