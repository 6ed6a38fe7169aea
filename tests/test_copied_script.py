"""A researcher copies lesson 03's train.py into a folder of their own, and replaces the data set and the model."""

import difflib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slurm_cluster import SlurmCluster
from test_slurm_jobs import is_rank

REPOSITORY = Path(__file__).resolve().parent.parent
OWN_DATA = """
class Stripes(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        epoch, index = key
        image = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))
        image[0, :: 1 + index % 2] += 1
        return image, index % 2


def make_loader("""
OWN_MODEL = (
    "nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)).to(ranks.device)"
)
CHANGES = {
    "\ndef make_loader(": OWN_DATA,
    "ImageDataset(config.dataset, config.data_dir, split, limit, seed=config.seed)": "Stripes(1024 if training else 9)",
    "build_model(config.model, config.dataset, dropout=config.dropout).to(ranks.device)": OWN_MODEL,
}
FLAGS = ["--epochs", "2", "--batch_size", "8", "--num_workers", "1", "--log_interval", "8", "--save_interval", "20"]


def copied(folder: Path) -> Path:
    """Return the copy of the script, with another data set and another model."""
    original = (REPOSITORY / "03_ddp/train.py").read_text()
    own = original
    for old, new in CHANGES.items():
        assert own.count(old) == 1, f"not once in the script: {old}"
        own = own.replace(old, new)
    changed = [line for line in difflib.ndiff(original.splitlines(), own.splitlines()) if line.startswith("+")]
    assert len(changed) <= 20, "\n".join(changed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(own)
    return folder / "train.py"


def torchrun(script: Path, run_dir: Path, *flags: str) -> subprocess.Popen:
    """Start the script on two ranks, in its own folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script.name]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    words = [*command, *FLAGS, "--run_dir", str(run_dir), *flags]
    return subprocess.Popen(words, cwd=script.parent, env=environment, start_new_session=True)


def losses(run_dir: Path) -> list[tuple[float, float]]:
    """Return the training and validation loss of each epoch of a finished run."""
    epochs = json.loads((run_dir / "summary.json").read_text())["epochs"]
    return [(epoch["train_loss"], epoch["val_loss"]) for epoch in epochs]


def wait_for(path: Path, process: subprocess.Popen | None = None) -> None:
    """Wait until a file is there."""
    until = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        assert process is None or process.poll() is None, "the run has ended"
        time.sleep(0.02)


@pytest.mark.thorough
def test_killed_and_resumed_under_torchrun(tmp_path: Path) -> None:
    script = copied(tmp_path / "mine")
    assert torchrun(script, tmp_path / "whole").wait(timeout=300) == 0
    process = torchrun(script, tmp_path / "killed")
    wait_for(tmp_path / "killed/checkpoint.previous.pt", process)  # the second checkpoint within the first epoch
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert torchrun(script, tmp_path / "killed", "--resume", "true").wait(timeout=300) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.thorough
def test_killed_and_resumed_under_slurm(tmp_path: Path, slurm: SlurmCluster) -> None:
    """The job file is copied too; what it says of this site is replaced by one line."""
    folder = copied(tmp_path / "mine").parent
    own_site = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={REPOSITORY}"
    job_file, lines = re.subn("^source .*$", own_site, (REPOSITORY / "03_ddp/job.slurm").read_text(), flags=re.M)
    assert lines == 1
    (folder / "job.slurm").write_text(job_file)

    def submit(run_dir: Path) -> int:
        options = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "job.slurm"]
        return slurm.submit(*options, *FLAGS, "--run_dir", run_dir, cwd=folder)

    assert slurm.wait(submit(tmp_path / "whole")) == "COMPLETED"
    job = submit(tmp_path / "killed")
    wait_for(tmp_path / "killed/checkpoint.previous.pt")
    processes = psutil.process_iter(["pid", "environ"])
    os.kill(next(process.pid for process in processes if is_rank(process.info, "1", job)), signal.SIGKILL)
    assert slurm.wait(job) == "FAILED", (folder / f"{job}.log").read_text()
    again = submit(tmp_path / "killed")
    assert slurm.wait(again) == "COMPLETED", (folder / f"{again}.log").read_text()
    assert "resumed from" in (folder / f"{again}.log").read_text()
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
