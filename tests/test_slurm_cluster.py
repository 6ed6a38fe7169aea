"""The Slurm on one machine, and the file that a site edits, as a user sees them."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm_cluster import SCRIPT, SlurmCluster, clean_environment, local_cluster, require_slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def state() -> Iterator[Path]:
    """Yield the name of a state folder that does not exist yet; its cluster is down afterwards, come what may."""
    require_slurm()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "slurm"
        yield path
        local_cluster(path, "down")


def wait_for_file(file: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"no {file} after {seconds} s"
        time.sleep(0.1)


def processes_mentioning(text: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if text in command:
            found.append(command)
    return found


def test_up_status_and_down_can_be_repeated_and_leave_nothing(state: Path, tmp_path: Path) -> None:
    assert local_cluster(state, "status").returncode == 1
    export = f"export SLURM_CONF={state}/slurm.conf\n"
    for _ in range(2):
        up = local_cluster(state, "up")
        assert (up.returncode, up.stdout) == (0, export), up.stderr
    SlurmCluster(state).submit("--wrap=touch running; sleep 600", cwd=tmp_path)  # must not outlive the cluster
    wait_for_file(tmp_path / "running")
    status = local_cluster(state, "status")
    assert status.returncode == 0
    assert status.stdout.count("gpu:2") == 2 and status.stdout.endswith(export)
    for _ in range(2):
        assert local_cluster(state, "down").returncode == 0
    assert processes_mentioning(str(state)) == []
    assert list(state.parent.iterdir()) == []


def test_up_starts_again_what_is_dead_and_jobs_go_on(state: Path, tmp_path: Path) -> None:
    assert local_cluster(state, "up").returncode == 0
    slurm = SlurmCluster(state)
    job = slurm.submit("--nodelist=127.0.0.1", "--wrap=touch running; sleep 600", cwd=tmp_path)
    wait_for_file(tmp_path / "running")
    os.kill(int((state / "slurmd-127.0.0.2.pid").read_text()), signal.SIGKILL)
    assert local_cluster(state, "status").returncode == 1
    assert local_cluster(state, "up").returncode == 0
    assert slurm.job(job)["JobState"] == "RUNNING"
    assert slurm.run("srun", "--nodelist=127.0.0.2", "echo", "back") == "back\n"


def test_clusters_that_start_at_the_same_moment_take_different_ports(state: Path) -> None:
    states = [state, state.with_name("other")]
    try:
        with ThreadPoolExecutor(len(states)) as pool:
            started = list(pool.map(lambda state: local_cluster(state, "up"), states))
        assert [each.returncode for each in started] == [0, 0], [each.stderr for each in started]
        settings = "".join((state / "slurm.conf").read_text() for state in states)
    finally:
        local_cluster(states[1], "down")
    ports = re.findall(r"\b(?:SlurmctldPort|Port)=(\d+)", settings)
    assert len(ports) == len(set(ports)) == 6


@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss, of the package iproute2")
def test_no_other_machine_reaches_it(slurm: SlurmCluster) -> None:
    if not socket.gethostbyname(socket.gethostname()).startswith("127."):
        pytest.skip("the daemons listen on the address of the machine's name, and here it is a public one")
    port = int(re.search(r"SlurmctldPort=(\d+)", (slurm.state / "slurm.conf").read_text())[1])
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout.splitlines()
    addresses = [line.split()[3].rpartition(":") for line in listening]
    found = [address for address, _, number in addresses if int(number) in range(port, port + 3)]
    assert len(found) == 3 and all(address.startswith("127.") for address in found), found


def test_a_folder_with_other_files_is_refused_and_kept(state: Path) -> None:
    state.mkdir()
    (state / "thesis.tex").touch()
    up = local_cluster(state, "up")
    assert up.returncode == 2
    assert len(up.stderr.splitlines()) == 1 and str(state) in up.stderr
    assert local_cluster(state, "down").returncode == 0
    (state / "thesis.tex").unlink()


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(tmp_path: Path) -> None:
    for tool in ("realpath", "id"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    environment = clean_environment(PATH=str(tmp_path), WORKSHOP_SLURM_DIR=str(tmp_path / "slurm"))
    up = subprocess.run([SCRIPT, "up"], env=environment, capture_output=True, text=True)
    assert up.returncode == 2
    assert len(up.stderr.splitlines()) == 1
    assert "apt-get install slurmctld slurmd slurm-client munge" in up.stderr


def test_up_that_fails_says_why_and_leaves_nothing(state: Path, tmp_path: Path) -> None:
    broken = tmp_path / "slurmctld"
    broken.write_text("#!/bin/sh\necho 'slurmctld: no luck today' >&2\nexit 1\n")
    broken.chmod(0o755)
    environment = clean_environment(WORKSHOP_SLURM_DIR=str(state))
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    up = subprocess.run([SCRIPT, "up"], env=environment, capture_output=True, text=True)
    assert (up.returncode, up.stdout) == (1, "")
    assert "no luck today" in up.stderr and "Slurm did not start" in up.stderr
    assert processes_mentioning(str(state)) == []
    assert not state.exists()


@pytest.mark.parametrize("arguments", [[], ["start"], ["up", "down"]], ids=str)
def test_wrong_arguments_are_one_line_of_usage(arguments: list[str]) -> None:
    result = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "usage" in result.stderr


@pytest.mark.parametrize("request_gpus", ["--gres=gpu:2", "--gpus-per-node=2", "--gpus=4"])
def test_each_way_to_ask_for_gpus_gives_them(slurm: SlurmCluster, request_gpus: str) -> None:
    out = slurm.run("srun", "--nodes=2", request_gpus, "bash", "-c", "echo $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES")
    rows = out.splitlines()
    assert len(rows) >= 2
    for row in rows:
        count, numbers = row.split()
        assert count == "2" and len(set(numbers.split(","))) == 2
        assert all(int(number) >= 100 for number in numbers.split(",")), "a real GPU could have this number"


def test_a_requeued_job_starts_again_with_the_same_id(slurm: SlurmCluster, tmp_path: Path) -> None:
    lines = [
        "#!/bin/bash",
        "#SBATCH --requeue --open-mode=append --time=1 --output=log",
        'echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0}"',
        "touch running",
        "[[ -n $SLURM_RESTART_COUNT ]] || sleep 600",
    ]
    (tmp_path / "job.slurm").write_text("\n".join([*lines, ""]))
    number = slurm.submit("job.slurm", cwd=tmp_path)
    wait_for_file(tmp_path / "running")
    slurm.run("scontrol", "requeue", str(number))
    assert slurm.wait(number) == "COMPLETED"
    log = (tmp_path / "log").read_text().splitlines()
    assert log[0] == f"{number} 0" and log[-1] == f"{number} 1"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("place", ["repository", "elsewhere"])
def test_site_as_shipped_gives_the_environment_and_the_package_of_its_clone(
    tmp_path: Path, shell: str, place: str
) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    repository = tmp_path / "repository"
    shutil.copytree(SCRIPT.parent, repository / "slurm")
    (tmp_path / "elsewhere").mkdir()
    file = "slurm/site.sh" if place == "repository" else f"{repository}/slurm/site.sh"

    def sourced() -> list[str]:
        command = [shell, "-c", f"source {file}; command -v python3; echo $PYTHONPATH"]
        environment = clean_environment(PYTHONPATH="/before")
        result = subprocess.run(command, cwd=tmp_path / place, env=environment, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout.splitlines()

    assert sourced() == [shutil.which("python3"), f"{repository}:/before"]  # no .venv: the python that was there
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", repository / ".venv"], check=True)
    assert sourced()[0] == f"{repository}/.venv/bin/python3"
