"""A job of a real Slurm on null GPUs of two nodes: the job has what `sbatch` has in its environment."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import REPOSITORY, null_gpu

from slurm_cluster import SlurmCluster, clean_environment

pytest_plugins = ["null_fixtures"]
pytestmark = [pytest.mark.usefixtures("null_gpus"), pytest.mark.thorough]

FEW = ["--limit_train", "64", "--limit_val", "16", "--batch_size", "4", "--epochs", "1", "--num_workers", "0"]
FLAGS = {
    "03_ddp": ["--dropout", "false"],
    "05_fully_sharded": ["--width", "64", "--depth", "2", "--sequence_length", "16"],
}


@pytest.mark.parametrize("lesson", FLAGS)
def test_a_job_on_null_gpus_has_the_losses_of_a_job_on_cpus(
    lesson: str, slurm: SlurmCluster, null_data: Path, tmp_path: Path
) -> None:
    for name in (lesson, "slurm"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    found = {}
    for kind, prefix in (("cpu", []), ("cuda", null_gpu("--gpus", "2", "--values"))):
        variables = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # the copy has no .venv
            "PYTHONPATH": str(REPOSITORY),
            "WORKSHOP_DATA": str(null_data),
            "WORKSHOP_RUNS": str(tmp_path / kind),
        }
        words = [*prefix, "sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "job.slurm"]
        environment = clean_environment(**slurm.environment, **variables)
        if prefix:
            environment.pop("CUDA_VISIBLE_DEVICES", None)  # empty in the tests, which would hide null GPUs too
        submitted = subprocess.run(
            [*words, *FEW, *FLAGS[lesson]], cwd=tmp_path / lesson, env=environment, capture_output=True, text=True
        )
        assert submitted.returncode == 0, submitted.stderr
        job = int(submitted.stdout)
        log = tmp_path / lesson / f"{job}.log"
        assert slurm.wait(job) == "COMPLETED", log.read_text()
        assert f"computing on {kind}" in log.read_text()
        summary = json.loads((tmp_path / kind / lesson / str(job) / "summary.json").read_text())
        assert summary["world_size"] == 2
        found[kind] = [epoch[name] for epoch in summary["epochs"] for name in ("train_loss", "val_loss")]
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-5)
