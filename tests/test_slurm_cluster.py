"""The local cluster and what every job sources, as a user sees them."""

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
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from slurm_cluster import SCRIPT, SlurmCluster, clean_environment, local_cluster, require_slurm

pytestmark = pytest.mark.slurm


@pytest.fixture
def state() -> Iterator[Path]:
    """Yield the name of a state folder that does not exist yet; its cluster is down afterwards, come what may."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "slurm"
        yield path
        local_cluster(path, "down")


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    """Return a lesson's folder in a small copy of the repository."""
    shutil.copytree(SCRIPT.parent, tmp_path / "repo" / "slurm")
    folder = tmp_path / "repo" / "01_lesson"
    folder.mkdir()
    (folder / "train.py").touch()
    return folder


def write_job(folder: Path, *lines: str) -> Path:
    job = folder / "job.slurm"
    job.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    return job


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
    require_slurm()
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
    require_slurm()
    assert local_cluster(state, "up").returncode == 0
    slurm = SlurmCluster(state)
    job = slurm.submit("--nodelist=127.0.0.1", "--wrap=touch running; sleep 600", cwd=tmp_path)
    wait_for_file(tmp_path / "running")
    os.kill(int((state / "slurmd-127.0.0.2.pid").read_text()), signal.SIGKILL)
    assert local_cluster(state, "status").returncode == 1
    again = local_cluster(state, "up")
    assert (again.returncode, again.stdout) == (0, f"export SLURM_CONF={state}/slurm.conf\n"), again.stderr
    assert local_cluster(state, "status").returncode == 0
    assert slurm.job(job)["JobState"] == "RUNNING"
    assert slurm.run("srun", "--nodelist=127.0.0.2", "echo", "back") == "back\n"


@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss, of the package iproute2")
def test_clusters_that_start_at_the_same_moment_take_different_ports() -> None:
    require_slurm()
    with tempfile.TemporaryDirectory() as folder:
        states = [Path(folder).resolve() / name for name in ("a", "b", "c", "d")]
        try:
            with ThreadPoolExecutor(len(states)) as pool:
                started = list(pool.map(lambda state: local_cluster(state, "up"), states))
            assert [each.returncode for each in started] == [0] * len(states), [each.stderr for each in started]
            settings = [(state / "slurm.conf").read_text() for state in states]
        finally:
            for state in states:
                local_cluster(state, "down")
    ports = [port for text in settings for port in re.findall(r"^SlurmctldPort=(\d+)|\bPort=(\d+)", text, re.M)]
    assert len(ports) == len(set(ports)) == 3 * len(states)


def test_no_other_machine_reaches_it(slurm: SlurmCluster) -> None:
    if not socket.gethostbyname(socket.gethostname()).startswith("127."):
        pytest.skip(
            "Slurm's daemons listen on the address of the machine's name or on all, and here it is a public one"
        )
    port = int(re.search(r"SlurmctldPort=(\d+)", (slurm.state / "slurm.conf").read_text())[1])
    listening = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout.splitlines()
    addresses = [line.split()[3].rpartition(":") for line in listening]
    found = {int(number): address for address, _, number in addresses if int(number) in range(port, port + 3)}
    assert len(found) == 3 and all(address.startswith("127.") for address in found.values()), found


def test_a_folder_with_other_files_is_refused_and_kept(state: Path) -> None:
    require_slurm()
    state.mkdir()
    (state / "thesis.tex").touch()
    up = local_cluster(state, "up")
    assert up.returncode == 2
    assert len(up.stderr.splitlines()) == 1 and str(state) in up.stderr
    assert local_cluster(state, "down").returncode == 0
    assert (state / "thesis.tex").exists()
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
    require_slurm()
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


def test_two_nodes_with_two_tasks_reach_each_other_by_name(slurm: SlurmCluster, tmp_path: Path) -> None:
    # What torch.distributed does: the ranks connect to the first node's name. SLURM_PROCID 0 listens, the others call.
    (tmp_path / "connect.py").write_text(
        "import os, socket, sys, time\n"
        "rank, place = int(os.environ['SLURM_PROCID']), (sys.argv[1], int(sys.argv[2]))\n"
        "print(rank, os.environ['SLURMD_NODENAME'], socket.gethostbyname(os.environ['SLURMD_NODENAME']))\n"
        "if rank == 0:\n"
        "    with socket.create_server(('', place[1])) as server:\n"
        "        [server.accept() for _ in range(3)]\n"
        "else:\n"
        "    for _ in range(100):\n"
        "        try:\n"
        "            sys.exit(socket.create_connection(place).close())\n"
        "        except ConnectionRefusedError:\n"
        "            time.sleep(0.1)\n"
        "    sys.exit('nobody listens')\n"
    )
    job = write_job(
        tmp_path,
        "#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --mem=8G --gres=gpu:2 --time=1 --output=log",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f'srun {sys.executable} connect.py "$first" $((20000 + SLURM_JOB_ID))',
    )
    assert slurm.wait(slurm.submit(job, cwd=tmp_path)) == "COMPLETED", (tmp_path / "log").read_text()
    rows = [line.split() for line in sorted((tmp_path / "log").read_text().splitlines())]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0][1] == rows[1][1] != rows[2][1] == rows[3][1]


@pytest.mark.parametrize("request_gpus", ["--gres=gpu:2", "--gpus-per-node=2", "--gpus=4"])
def test_each_way_to_ask_for_gpus_gives_them(slurm: SlurmCluster, request_gpus: str) -> None:
    out = slurm.run("srun", "--nodes=2", request_gpus, "bash", "-c", "echo $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES")
    rows = out.splitlines()
    assert len(rows) >= 2
    for row in rows:
        count, numbers = row.split()
        assert count == "2" and len(set(numbers.split(","))) == 2
        assert all(int(number) >= 100 for number in numbers.split(",")), "a real GPU could have this number"


def test_two_jobs_on_one_node_get_different_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    # Each job ends only when it sees the other's file, so they do run at the same time.
    job = write_job(
        tmp_path,
        "#SBATCH --nodelist=127.0.0.1 --gres=gpu:1 --time=1 --output=%j.log",
        'echo "$CUDA_VISIBLE_DEVICES" >"$SLURM_JOB_ID.gpu"',
        "until [[ $(ls *.gpu | wc -l) -eq 2 ]]; do sleep 0.2; done",
    )
    jobs = [slurm.submit(job, cwd=tmp_path) for _ in range(2)]
    assert [slurm.wait(job) for job in jobs] == ["COMPLETED"] * 2
    assert len({(tmp_path / f"{job}.gpu").read_text() for job in jobs}) == 2


def test_a_requeued_job_starts_again_with_the_same_id(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        "#SBATCH --requeue --open-mode=append --time=1 --output=log",
        'echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0}"',
        "touch running",
        "[[ -n $SLURM_RESTART_COUNT ]] || sleep 600",
    )
    number = slurm.submit(job, cwd=tmp_path)
    wait_for_file(tmp_path / "running")
    slurm.run("scontrol", "requeue", str(number))
    assert slurm.wait(number) == "COMPLETED"
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == f"{number} 0" and lines[-1] == f"{number} 1"
    assert slurm.job(number)["Restarts"] == "1"


def test_a_finished_job_is_noticed_by_wait_and_still_known_afterwards(slurm: SlurmCluster, tmp_path: Path) -> None:
    number = int(slurm.run("sbatch", "--parsable", "--wait", "--output=log", "--wrap=sleep 3", cwd=tmp_path))
    late = datetime.now() - datetime.fromisoformat(slurm.job(number)["EndTime"])
    assert late < timedelta(seconds=7)  # as Slurm is shipped it is 9: the second look comes 10 seconds after the first
    time.sleep(5)
    assert slurm.job(number)["JobState"] == "COMPLETED"


def test_a_job_takes_its_threads_from_cpus_per_task(slurm: SlurmCluster, lesson: Path) -> None:
    job = write_job(
        lesson,
        "#SBATCH --ntasks=2 --cpus-per-task=3 --mem=1G --gres=gpu:1 --time=1 --output=log",
        "source ../slurm/setup.sh",
        "srun bash -c 'echo threads=$OMP_NUM_THREADS step=$SLURM_CPUS_PER_TASK unbuffered=$PYTHONUNBUFFERED'",
    )
    number = slurm.submit(job, cwd=lesson)
    assert slurm.wait(number) == "COMPLETED", (lesson / "log").read_text()
    log = (lesson / "log").read_text()
    assert log.count("threads=3 step=3 unbuffered=1") == 2
    assert f"job {number}, restart 0, on 127.0.0.1: 2 task(s), 3 CPU(s) per task, 1 GPU(s) per node" in log


def source_in(shell: str, file: str, cwd: Path, then: str = "true") -> subprocess.CompletedProcess[str]:
    command = [shutil.which(shell) or shell, "-c", f"source {file}; {then}"]
    return subprocess.run(command, cwd=cwd, env=clean_environment(), capture_output=True, text=True)


def test_setup_outside_a_lesson_is_one_line_and_ends_the_job(lesson: Path) -> None:
    result = source_in("bash", "../slurm/setup.sh", lesson.parent / "slurm", then="echo went on")
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "not a lesson's folder" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("place", ["repository", "elsewhere"])
def test_site_as_shipped_activates_the_venv_of_the_repository(
    lesson: Path, tmp_path: Path, shell: str, place: str
) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    repo = lesson.parent
    file, cwd = ("slurm/site.sh", repo) if place == "repository" else (f"{repo}/slurm/site.sh", tmp_path)
    before = source_in(shell, file, cwd, then="command -v python3")
    assert before.returncode == 0 and before.stdout == f"{shutil.which('python3')}\n"  # no .venv: as it was

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", repo / ".venv"], check=True)
    after = source_in(shell, file, cwd, then="command -v python")
    assert (after.stdout, after.stderr) == (f"{repo}/.venv/bin/python\n", "")
