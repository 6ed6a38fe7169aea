"""The measurement of a requeued job leaves no job and no log behind, and writes no incomplete results."""

from pathlib import Path

import pytest

from lab import requeue_timeline
from workshop.errors import UserError


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that were given to a Slurm that takes one job, which stays in the queue after its first steps."""
    commands: list[tuple[str, ...]] = []
    answers = {"sbatch": "7", "squeue": "R"}

    def output_of(*words: str) -> str:
        commands.append(words)
        (tmp_path / "7.log").write_text("epoch 1  step  10/50\n")
        return answers.get(words[0], "")

    monkeypatch.setattr(requeue_timeline, "output_of", output_of)
    monkeypatch.setattr(requeue_timeline, "LESSON", tmp_path)
    monkeypatch.setattr(requeue_timeline, "LIMIT_SECONDS", 0.3)
    return commands


def test_a_job_that_does_not_end_is_cancelled(asked: list[tuple[str, ...]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not say: checkpoint saved, starts again, done"):
        requeue_timeline.watch(tmp_path)
    assert asked.count(("scancel", "--signal=USR1", "7")) == 1
    assert asked[-1] == ("scancel", "7")
    assert not (tmp_path / "7.log").exists()


def test_without_slurm_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="Slurm did not take the job"):
        requeue_timeline.watch(tmp_path)
