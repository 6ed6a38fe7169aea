"""The layers of the package: a module imports only from the modules below it; and what importing a lesson reads.

A layer is a module or a package directly under workshop/. `package_use` finds what is imported.
"""

import ast
from pathlib import Path

import pytest

import workshop
from conftest import REPOSITORY
from package_use import lines_using_package, modules_imported, modules_read

PACKAGE = REPOSITORY / "workshop"
LAYERS = [
    "errors",
    "entry",
    "paths",
    "signals",
    "hardware",
    "config",
    "checks",
    "commandline",
    "datasets",
    "models",
    "loaders",
    "distributed",
    "profiling",
    "run",
]
"""the lowest one first"""
MODULES = sorted(PACKAGE.rglob("*.py"))
LESSON_01 = REPOSITORY / "01_single_gpu" / "train.py"


def name_of(module: Path) -> str:
    return str(module.relative_to(PACKAGE))


def layer_of(module: Path) -> str:
    return name_of(module).partition("/")[0].removesuffix(".py")


def imports_of(file: Path, *roots: Path) -> set[Path]:
    """The modules below ``roots`` that a file imports, also those that its functions import when they are called."""
    return modules_imported(file, roots, ast.walk(ast.parse(file.read_text())))


def test_lesson_01_reads_nothing_of_a_process_group() -> None:
    read = modules_read(LESSON_01)
    assert PACKAGE / "run" / "position.py" in read
    assert PACKAGE / "distributed" / "rendezvous.py" in MODULES
    assert not [module for module in read if layer_of(module) == "distributed"]


def test_every_layer_is_known() -> None:
    assert {layer_of(module) for module in MODULES} == {*LAYERS, "__init__"}
    described = [line.split()[0] for line in (workshop.__doc__ or "").splitlines() if "  " in line]
    assert described == LAYERS


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_a_module_imports_only_from_layers_below_it(module: Path) -> None:
    height = ["__init__", *LAYERS].index
    imported = {other for other in imports_of(module, REPOSITORY) if PACKAGE in other.parents}
    above = {name_of(other) for other in imported if height(layer_of(other)) > height(layer_of(module))}
    assert above == set()


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_the_package_knows_no_lesson_no_experiment_and_no_test(module: Path) -> None:
    others = [REPOSITORY, *REPOSITORY.glob("0*"), *REPOSITORY.glob("0*/experiments")]
    others += [REPOSITORY / name for name in ("clinic", "data", "lab", "slurm", "tests")]
    imported = imports_of(module, *others) - {REPOSITORY / "workshop" / "__init__.py"}
    assert {file for file in imported if PACKAGE not in file.parents} == set()


def test_what_is_read_and_used_is_found(tmp_path: Path) -> None:
    """The functions of tests/package_use.py that these tests rely on."""
    script = tmp_path / "train.py"
    script.write_text(
        "from workshop.errors import (\n"
        "    UserError,\n"
        ")\n"
        "import torch\n"
        "def main(run):\n"
        "    from workshop.config import TrainConfig\n"
        "    run.save(torch.ones(1))\n"
        "    raise UserError('no')\n"
    )
    assert modules_read(script) == {PACKAGE / "__init__.py", PACKAGE / "errors.py"}
    assert lines_using_package(script) == {1, 2, 3, 6, 7, 8}
