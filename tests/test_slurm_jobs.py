"""The lessons as jobs of a real Slurm."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY
from slurm_cluster import SlurmCluster


def test_lesson_01_job(slurm: SlurmCluster, user_environment: dict[str, str], tmp_path: Path) -> None:
    lesson = REPOSITORY / "01_single_gpu"
    environment = user_environment | slurm.environment | {"SBATCH_WAIT": "1"}
    command = ["sbatch", "--parsable", "--cpus-per-task=1", "job.slurm", "--limit_train", "640", "--epochs", "2"]
    result = subprocess.run(command, cwd=lesson, env=environment, capture_output=True, text=True)
    job = result.stdout.strip()
    log, profile = lesson / f"{job}.log", lesson / f"{job}.lprof"
    try:
        assert result.returncode == 0, log.read_text()
        assert "epoch 2  train loss" in log.read_text()
        (summary,) = (tmp_path / "runs" / "01_single_gpu" / job).glob("summary.json")
        record = json.loads(summary.read_text())
        assert len(record["epochs"]) == 2
        assert record["config"]["num_workers"] == 1
        assert (record["hardware"]["cpus_available"], record["hardware"]["threads"]) == (1, 1)
        shown = subprocess.run(
            [sys.executable, "-m", "line_profiler", "-rmt", profile], cwd=lesson, capture_output=True, text=True
        ).stdout
        assert "train_one_epoch" in shown
        assert "loss.backward()" in shown
    finally:
        log.unlink(missing_ok=True)
        profile.unlink(missing_ok=True)
