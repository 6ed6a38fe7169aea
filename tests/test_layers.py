"""Imports go one way: lessons -> workshop; experiments -> lab, workshop and their lesson; within workshop downwards."""

import ast
import sys
from pathlib import Path

import pytest

import workshop
from conftest import REPOSITORY

PACKAGE = REPOSITORY / "workshop"
LAYERS = [line.split()[0] for line in (workshop.__doc__ or "").splitlines() if "  " in line]
"""the modules and packages in workshop/, the lowest one first, as the package's docstring lists them"""
FOLDERS = ("workshop", "lab", "doctor", "nullgpu", "clinic", "slurm", "data", "tests")
MAY_IMPORT = {
    "workshop/**/*.py": {"workshop"},
    "lab/*.py": {"workshop", "lab"},
    "doctor/**/*.py": {"doctor", "nullgpu"},
    "nullgpu/**/*.py": {"nullgpu"},
    "clinic/*.py": {"workshop", "lab", "data", "doctor", "clinic"},
    "0*/train.py": {"workshop"},
    "0*/experiments/*.py": {"workshop", "lab", "experiments"},
    "0*/exercises/*/*.py": {"workshop", "lab", "data", "doctor", "clinic"},
}
"""files, and the folders whose modules they may import; what stands beside a file it may import too"""


def imported_by(file: Path) -> set[str]:
    """The modules that a file imports anywhere, also in functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:  # others are of the same package
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def folder_of(module: str) -> str | None:
    """The folder of this repository that a module is of, or None if it is of a library."""
    first = module.partition(".")[0]
    if first in FOLDERS and (REPOSITORY / first / "__init__.py").exists():
        return first
    if first in sys.stdlib_module_names:
        return None
    files = [file for folder in (*FOLDERS, "0*/experiments") for file in REPOSITORY.glob(f"{folder}/{first}.py")]
    return files[0].parent.name if files else None


@pytest.mark.parametrize("pattern", MAY_IMPORT)
def test_imports_go_one_way(pattern: str) -> None:
    for file in REPOSITORY.glob(pattern):
        beside = {other.stem for other in file.parent.glob("*.py")}
        own = {module for module in imported_by(file) if module.partition(".")[0] not in beside}
        wrong = {module for module in own if folder_of(module) not in {None, *MAY_IMPORT[pattern]}}
        assert wrong == set(), f"{file.relative_to(REPOSITORY)} imports {wrong}"


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
