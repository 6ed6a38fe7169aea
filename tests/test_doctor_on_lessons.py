"""The doctor and the course fit together: it accuses no lesson, and the exercises that its findings name exist."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY
from sources import collect, generate

LESSONS = sorted(folder.name for folder in REPOSITORY.glob("0*"))
DOCTOR = [sys.executable, "-m", "rankdoctor"]


def test_the_exercises_that_findings_name_exist() -> None:
    from rankdoctor.checks import CHECKS
    from rankdoctor.checks.comparisons import COMPARISONS

    named = {check.exercise for check in (*CHECKS, *COMPARISONS.values())} - {""}
    found = [folder.name for folder in REPOSITORY.glob("0*/exercises/*") if (folder / "README.md").is_file()]
    assert len(named) > 20 and named <= set(found)
    assert len(found) == len(set(found)), "an exercise is known by its name alone"


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of somebody with few data for the lessons."""
    folder = tmp_path_factory.mktemp("few")
    generate("mnist", folder, train_samples=320, val_samples=61)
    generate("nbody", folder, cells=32)
    collect(folder, REPOSITORY / "workshop")
    return os.environ | {"WORKSHOP_DATA": str(folder), "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lesson", LESSONS)
def test_the_scripts_of_the_lessons_have_no_fault(lesson: str, ranks: int, few_digits: dict[str, str]) -> None:
    command = [*DOCTOR, "--json", "--nproc", str(ranks), "train.py", "--epochs", "2"]
    done = subprocess.run(command, cwd=REPOSITORY / lesson, env=few_digits, text=True, capture_output=True, timeout=600)
    report = json.loads(done.stdout)
    wrong = [f for f in report["findings"] if f["kind"] != "COST"]
    assert wrong == [] and report["errors"] == [] and report["updates"][0] > 4


@pytest.mark.thorough
def test_the_losses_of_lesson_03_are_those_without_the_doctor(few_digits: dict[str, str], tmp_path: Path) -> None:
    flags = ["train.py", "--epochs", "2", "--limit_train", "256", "--batch_size", "16", "--run_dir"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = []
    for name, command in (("plain", torchrun), ("doctor", [*DOCTOR, "--full", "--no_redirect"])):
        words = [*command, *flags, str(tmp_path / name)]
        done = subprocess.run(words, cwd=REPOSITORY / "03_ddp", env=few_digits, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        epochs = json.loads((tmp_path / name / "summary.json").read_text())["epochs"]
        losses.append([(epoch["train_loss"], epoch["val_loss"], epoch["val_accuracy"]) for epoch in epochs])
    assert losses[0] == losses[1]
