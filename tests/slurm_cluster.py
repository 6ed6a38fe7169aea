"""A Slurm of the tests' own; `from slurm_cluster import slurm` in conftest.py makes it a fixture of every test."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "slurm" / "local_cluster.sh"
UNFINISHED = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "COMPLETING"}


def require_slurm() -> None:
    """Skip where Slurm is not installed; fail where it must be, in CI."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=path)]
    if missing:
        reason = f"no Slurm here, missing: {', '.join(missing)}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def clean_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment plus `variables`, without any Slurm job or site the tests were started from."""
    foreign = re.compile("SLURM_|SBATCH_|SRUN_|SALLOC_|SQUEUE_|SINFO_|SCANCEL_")
    return {k: v for k, v in os.environ.items() if not foreign.match(k)} | variables


def local_cluster(state: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run local_cluster.sh on the cluster that lives in the folder `state`."""
    environment = clean_environment(WORKSHOP_SLURM_DIR=str(state))
    return subprocess.run([SCRIPT, command], env=environment, capture_output=True, text=True, timeout=120, check=False)


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster, and the few things that tests do with one."""

    state: Path

    @property
    def environment(self) -> dict[str, str]:
        """The one variable that points sbatch, srun and squeue at this cluster: env=os.environ | slurm.environment."""
        return {"SLURM_CONF": f"{self.state}/slurm.conf"}

    def run(self, *command: str | Path, cwd: Path | None = None, timeout: float = 120) -> str:
        """Run a command that talks to this cluster; return what it prints."""
        environment = clean_environment(**self.environment)
        result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
        assert result.returncode == 0, f"{command}: status {result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout

    def submit(self, *arguments: str | Path, cwd: Path) -> int:
        """Submit with sbatch from the folder `cwd`; return the job id."""
        return int(self.run("sbatch", "--parsable", *arguments, cwd=cwd))

    def job(self, job: int) -> dict[str, str]:
        """Return what scontrol says about a job, running or finished: JobState, Restarts, ExitCode, NodeList, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", str(job))))

    def wait(self, job: int, seconds: float = 300) -> str:
        """Wait until a job has ended; return its state: COMPLETED, FAILED, TIMEOUT, CANCELLED, ..."""
        end = time.monotonic() + seconds
        while (state := self.job(job)["JobState"]) in UNFINISHED:
            assert time.monotonic() < end, f"job {job} is {state} after {seconds} s:\n{self.run('squeue')}"
            time.sleep(0.2)
        return state


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Yield a running cluster of 2 nodes with 2 fake GPUs each, for the whole session."""
    require_slurm()
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: the name of a socket may have 107 characters only
        state = Path(folder).resolve() / "slurm"
        started = local_cluster(state, "up")
        assert started.returncode == 0, started.stderr
        try:
            yield SlurmCluster(state)
        finally:
            stopped = local_cluster(state, "down")
            kill_jobs(f"{state}/slurm.conf")
            assert stopped.returncode == 0, stopped.stderr


def kill_jobs(configuration: str) -> None:
    """Kill what is left of a cluster's jobs: torchrun's ranks are sessions of their own, which Slurm does not find."""
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}  # None for the processes of others
        if environment.get("SLURM_CONF") == configuration and "SLURM_JOB_ID" in environment:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
