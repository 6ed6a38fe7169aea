"""03_ddp/experiments/share_gpu.py: several ranks on one GPU, which is a null GPU here."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import nullgpu
import pytest
from cases import REPOSITORY, environment, largest_difference, named, null_gpu, run_on_cpu, start

from conftest import Script

pytestmark = pytest.mark.slow

pytest_plugins = ["null_fixtures"]

SHARE_GPU = "03_ddp/experiments/share_gpu.py"


def sharing(ranks: int, *words: object) -> list[str]:
    """Return the command that runs a script as so many ranks on one null GPU with values."""
    command = [sys.executable, REPOSITORY / SHARE_GPU, "--ranks", ranks, *words]
    return null_gpu("--gpus", "1", "--values", *map(str, command))


def popen(folder: Path, ranks: int, program: str) -> subprocess.Popen[str]:
    """Start so many ranks of a program on one null GPU, without the command nullgpu, which would get the signals."""
    script = folder / "script.py"
    script.write_text(program)
    words = [sys.executable, str(REPOSITORY / SHARE_GPU), "--ranks", str(ranks), str(script)]
    env = nullgpu.environment(environment(PYTHONPATH=str(REPOSITORY)), gpus=1)
    return subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2", "train.py"], "PyTorch finds no GPU here. Run the ranks on the CPUs: CUDA_VISIBLE_DEVICES= "),
        (["--ranks", "1", "train.py"], "--ranks: 1 is not a number of ranks: give 2 or more"),
        (["--ranks", "2"], "the following arguments are required: script"),
        (["--ranks", "2", "missing.py"], "missing.py: there is no such script"),
    ],
    ids=["no GPU", "one rank", "no script", "another script"],
)
def test_a_mistake_is_one_line(words: list[str], message: str, run_script: Script) -> None:
    assert run_script(SHARE_GPU, *words).error.startswith(message)


FAILS = """
import os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "on GPU", os.environ["LOCAL_RANK"])
if rank == 0:
    time.sleep(1000)
time.sleep(1)
sys.exit(3)
"""


def test_a_rank_that_fails_ends_the_others_and_gives_its_status(null_gpus: None, tmp_path: Path) -> None:
    job = popen(tmp_path, 3, FAILS)
    stdout, stderr = job.communicate()
    assert job.returncode == 3
    assert stdout == "rank 0 of 3 on GPU 0\n"
    lines = stderr.splitlines()
    assert {"rank 1: rank 1 of 3 on GPU 0", "rank 2: rank 2 of 3 on GPU 0"} <= set(lines)
    assert lines[-1] in [f"error: rank {rank} ended with exit status 3; its messages are above" for rank in (1, 2)]


def test_a_rank_that_is_killed_ends_the_others(null_gpus: None, tmp_path: Path) -> None:
    job = popen(tmp_path, 2, FAILS.replace("sys.exit(3)", "os.kill(os.getpid(), 9)"))
    _, stderr = job.communicate()
    assert job.returncode == 128 + signal.SIGKILL
    assert stderr.splitlines()[-1] == "error: rank 1 was ended by SIGKILL"


SIGNALED = """
import os, signal, sys, time
from pathlib import Path
def note(number, _):
    with open(f"rank{os.environ['RANK']}", "a") as file:
        print(signal.Signals(number).name, file=file)
    if number == signal.SIGTERM:
        sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
Path(f"rank{os.environ['RANK']}").touch()
time.sleep(600)
sys.exit("no SIGTERM")
"""


def test_each_rank_gets_each_signal_once(null_gpus: None, tmp_path: Path) -> None:
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    names = ["SIGUSR1", "SIGINT", "SIGTERM"]

    def wait_for(lines: list[str]) -> None:
        while any(not file.exists() or file.read_text().split() != lines for file in files):
            assert job.poll() is None
            time.sleep(0.02)

    job = popen(tmp_path, 2, SIGNALED)
    wait_for([])
    for number, name in enumerate(names):
        job.send_signal(signal.Signals[name])
        if name != "SIGTERM":
            wait_for(names[: number + 1])
    _, stderr = job.communicate()
    assert [file.read_text().split() for file in files] == [names, names]
    assert job.returncode == 0, stderr


def test_a_mistake_in_the_flags_of_a_lesson_is_one_line(null_gpus: None, tmp_path: Path) -> None:
    env = environment(PYTHONPATH=str(REPOSITORY))
    words = sharing(2, "train.py", "--run_dir", tmp_path, "--limit_trains", 128)
    done = subprocess.run(words, cwd=REPOSITORY / "03_ddp", env=env, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "--limit_trains" in line


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["03, two ranks", "05, HSDP, 2 x 2 ranks"])
def test_ranks_that_share_a_gpu_have_the_losses_of_ranks_on_cpus(name: str, null_data: Path, tmp_path: Path) -> None:
    case = named(name)
    run = start(sharing(case.gpus, "train.py", *case.flags.split()), REPOSITORY, case.lesson, null_data, tmp_path)
    assert run.status == 0, run.stderr[-3000:]
    others = run_on_cpu(case, null_data)
    assert largest_difference(run.losses, others.losses) <= case.difference, (run.losses, others.losses)
