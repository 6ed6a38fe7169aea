"""Scripts that fail, hang, or are killed: the report says so, and nothing is left running or changed."""

import os
import re
import shlex
import signal
import subprocess
import time

import pytest

from asked_runs import DOCTOR, Doctor, processes_of, wait_for_process
from doctor_events import correct_run
from rankdoctor import report, series


@pytest.mark.thorough
def test_a_run_without_an_update_says_where_it_stood_and_is_not_repeated(doctor: Doctor) -> None:
    for seconds in (15, 60, 240):  # a busy machine needs more than 15 s to import torch
        status, out, _ = doctor.run("--seconds", seconds, "slow_start.py")
        assert status == 2
        assert out.count("rankdoctor: slow_start.py") == 1
        if "It had come to: first process group after" in out:
            break
    assert re.search(r"It stood at slow_start.py:\d+ in download", out)


def test_script_that_fails_at_once_shows_its_own_message(doctor: Doctor) -> None:
    (doctor.folder / "needs.py").write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', "
                                            "required=True)\np.parse_args()\n")  # fmt: skip
    status, out, _ = doctor.run("needs.py")
    assert status == 2
    assert "the following arguments are required: --data" in out
    assert "nothing can be said" in out


@pytest.mark.thorough
def test_script_that_never_trains(doctor: Doctor) -> None:
    (doctor.folder / "idle.py").write_text("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)\n")
    status, out, _ = doctor.run("idle.py")
    assert status == 2
    assert "No update of weights was seen" in out


@pytest.mark.thorough
def test_endless_script_is_ended_and_judged(doctor: Doctor) -> None:
    status, out, _ = doctor.run("--steps", "30", "one_process.py", "endless")
    assert status == 0
    assert "30 updates" in out
    assert not processes_of(str(doctor.folder))


@pytest.mark.thorough
def test_rank_that_ends_early(doctor: Doctor) -> None:
    _, found = doctor.findings("ddp.py", "exit")
    assert "hang" in found or "same_collectives" in found


@pytest.mark.thorough
def test_killed_rank_is_reported_and_nothing_is_left(doctor: Doctor) -> None:
    process = doctor.start("ddp.py")
    rank = wait_for_process(str(doctor.folder / "ddp.py"))
    os.kill(rank, signal.SIGKILL)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "signal 9" in out
    assert not processes_of(str(doctor.folder))


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_doctor_leaves_no_rank(doctor: Doctor, number: signal.Signals) -> None:
    process = doctor.start("ddp.py")
    wait_for_process(str(doctor.folder / "ddp.py"))
    process.send_signal(number)
    process.communicate(timeout=30)
    end = time.monotonic() + 20
    while processes_of(str(doctor.folder)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not processes_of(str(doctor.folder))


@pytest.mark.thorough
def test_what_a_script_has_started_ends_with_it(doctor: Doctor) -> None:
    """A fork, and a program in a session of its own, which a kill of the rank's process group does not reach."""
    start = (
        "import os, subprocess, sys, time\n"
        "if not os.fork():\n    time.sleep(600)\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {str(doctor.folder)!r}], "
        "start_new_session=True)\n"
    )
    (doctor.folder / "forks.py").write_text(start + (doctor.folder / "ddp.py").read_text())
    report, found = doctor.findings("forks.py")
    assert report["updates"][0] and found == {}
    assert not processes_of(str(doctor.folder))


@pytest.mark.thorough
def test_a_full_disk_is_said_and_changes_nothing(doctor: Doctor) -> None:
    """Each process may write 20 kB per file, so the doctor's notes do not fit."""
    before = {file.name: file.read_bytes() for file in doctor.folder.iterdir()}
    command = ["bash", "-c", f"ulimit -f 20; exec {shlex.join(DOCTOR)} ddp.py"]
    done = subprocess.run(command, cwd=doctor.folder, text=True, capture_output=True, timeout=500)
    assert done.returncode == 2, done.stdout
    assert "the doctor's notes of rank 0 end at update" in done.stdout
    assert {file.name: file.read_bytes() for file in doctor.folder.iterdir()} == before
    assert not processes_of(str(doctor.folder))


@pytest.mark.parametrize(
    ("number", "said", "tried"), [(11, "the doctor may be the cause", True), (9, "no memory", False)]
)
def test_a_rank_that_ends_by_a_signal_is_not_blamed_on_the_script(number: int, said: str, tried: bool) -> None:
    run = correct_run(statuses=[0, -number])
    assert any(f"signal {number}" in line and said in line for line in report.failures(run))
    assert bool(series.why_null_gpus(run)) == tried, "null GPUs are tried"
