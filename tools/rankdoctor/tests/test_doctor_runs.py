"""The doctor runs scripts as their user would: it finds their faults, changes nothing, and leaves nothing running."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from doctor_events import correct_run
from rankdoctor import cli, launch, report, series
from rankdoctor.settings import Settings

SCRIPTS = Path(__file__).parent / "scripts"
PROJECT = Path(__file__).parent.parent
DOCTOR = [sys.executable, "-m", "rankdoctor"]
Found = dict[str, str]


class Doctor:
    """Runs the doctor on copies of the scripts, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, folder)

    def start(self, *arguments: object) -> subprocess.Popen:
        command = [*DOCTOR, *map(str, arguments)]
        return subprocess.Popen(command, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *arguments: object) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=500)
        return process.returncode, out, err

    def findings(self, *arguments: object) -> tuple[dict, Found]:
        """Return the whole report, and for each finding the mark of the line it names."""
        _, out, err = self.run("--json", *arguments)
        assert not err
        report = json.loads(out)
        assert not report["broken"]
        return report, {
            f["check"]: self.mark(f["at"]) for top in report["findings"] for f in (top, *top["consequences"])
        }

    def mark(self, at: str) -> str:
        file, _, line = at.rpartition(":")
        return Path(file).read_text().splitlines()[int(line) - 1].rpartition("# LINE ")[2].strip()


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


def null_gpus() -> None:
    """Compile the null GPU if that was not done before; skip the test where there can be none."""
    nullgpu = pytest.importorskip("nullgpu")
    try:
        nullgpu.environment({})
    except nullgpu.NotPossible as reason:
        pytest.skip(str(reason))


def processes_of(mark: str) -> list[str]:
    """Return the command lines of processes that name something."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark in command and folder.name != str(os.getpid()):
            found.append(command)
    return found


@pytest.mark.slow
def test_correct_script_has_no_finding_and_nothing_is_changed(doctor: Doctor) -> None:
    (doctor.folder / "checkpoint.pt.old").write_text("mine")
    before = {file.name: file.stat().st_mtime_ns for file in doctor.folder.iterdir()}
    report, found = doctor.findings("ddp.py")
    assert report["errors"] == []
    assert found == {}
    assert report["status"] == 0
    assert len(report["fine"]) > 20
    assert {file.name: file.stat().st_mtime_ns for file in doctor.folder.iterdir()} == before
    assert not processes_of(str(doctor.folder))


def test_faults_are_found_with_their_lines(doctor: Doctor) -> None:
    report, found = doctor.findings("ddp.py", "bare,same_order,padded,no_eval,clip_scaled,all_save,item")
    assert found["weights_agree"] == "call"
    assert found["same_order"] == "sampler"
    assert found["validation_counts"] == "val_loader"
    assert found["validation_mode"] == "validate"
    assert found["clip_scaled"] == "clip"
    assert found["one_writer"] == "save"
    assert found["waits"] == "item"
    assert report["status"] == 1


@pytest.mark.slow
def test_a_validation_that_forgets_no_grad_is_a_validation(doctor: Doctor) -> None:
    _, found = doctor.findings("ddp.py", "with_grad")
    assert found == {"validation_gradients": "validate"}
    _, found = doctor.findings("ddp.py", "with_grad,no_eval,not_combined")
    assert found["validation_mode"] == found["validation_gradients"] == "validate"
    assert found["results_combined"] == "validation"


@pytest.mark.slow
def test_a_script_is_started_as_a_module_of_a_package(doctor: Doctor) -> None:
    package = doctor.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "names.py").write_text("FILE = 'package.losses'\n")
    script = (doctor.folder / "one_process.py").read_text()
    (package / "train.py").write_text(f"from .names import FILE\n{script}\nopen(FILE, 'w').close()\n")
    status, out, _ = doctor.run("-m", "package.train")
    assert status == 0 and "package.losses" in out
    _, _, err = doctor.run("-m", "package.nothing")
    assert err.startswith("rankdoctor: error: there is no module package.nothing")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("book.ipynb", '{"cells": []}', "book.ipynb is a notebook: jupyter nbconvert --to script book.ipynb"),
        (
            "run.sh",
            "torchrun --nproc-per-node 8 \\\n    train.py --lr 0.1\n",
            "it starts: rankdoctor train.py --lr 0.1",
        ),
        ("job", "#!/bin/bash\nsrun hostname\n", "job is a shell script; name the script it starts"),
        (
            "start.py",
            "import subprocess\nsubprocess.run('torchrun train.py'.split())",
            "it starts: rankdoctor train.py",
        ),
    ],
)
def test_what_is_no_training_script_is_refused_with_the_command_to_use(
    doctor: Doctor, name: str, text: str, said: str
) -> None:
    (doctor.folder / name).write_text(text)
    status, _, err = doctor.run(name)
    assert status == 2 and said in err


@pytest.mark.thorough
def test_variables_of_two_launchers_and_of_the_site_and_files_that_a_library_in_c_writes(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_OF_OUR_SITE", "7")
    monkeypatch.setenv("SLURM_PROCID", "5")  # of the shell that the doctor is started from
    status, out, _ = doctor.run("cluster.py")
    assert status == 0, out
    assert "1 file(s) have changed meanwhile" in out and "beside.bin" in out
    assert "wanted to write 2 file(s)" in out and "new/folder/inside.bin" in out
    assert (doctor.folder / "beside.bin").exists() and not (doctor.folder / "new").exists()


@pytest.mark.thorough
def test_a_run_without_an_update_says_where_it_stood_and_is_not_repeated(doctor: Doctor) -> None:
    began = time.monotonic()
    status, out, _ = doctor.run("--seconds", 15, "slow_start.py")
    assert status == 2
    assert "It had come to: first process group after" in out
    assert re.search(r"It stood at slow_start.py:\d+ in download", out)
    assert out.count("rankdoctor: slow_start.py") == 1 and time.monotonic() - began < 10 * 15


@pytest.mark.thorough
def test_an_order_that_repeats_only_because_passes_are_cut_is_no_fault(doctor: Doctor) -> None:
    assert doctor.findings("endless.py")[1] == {}
    assert doctor.findings("endless.py", "same")[1] == {"same_order": "sampler"}


def installed(folder: Path) -> Path:
    """Build the wheel from a copy, install it into a folder site-packages, and return that."""
    source, site = folder / "source", folder / "site-packages"
    shutil.copytree(PROJECT, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("rankdoctor-*.whl")
    subprocess.run([*pip, "install", *offline, "--target", site, wheel], check=True)
    return site


@pytest.mark.thorough
def test_the_installed_package_is_complete_and_finds_the_same(doctor: Doctor, tmp_path: Path) -> None:
    """Noise and seeds are noticed only where the user's own line draws them: not a file in site-packages."""
    site = installed(tmp_path)
    modules = {file.relative_to(PROJECT / "src") for file in PROJECT.glob("src/rankdoctor/**/*.py")}
    assert {file.relative_to(site) for file in site.glob("rankdoctor/**/*.py")} == modules
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    command = [site / "bin" / "rankdoctor", "--json", "ddp.py", "all_save,same_dropout"]
    done = subprocess.run(command, cwd=doctor.folder, env=alone, text=True, capture_output=True)
    assert done.returncode == 1, done.stderr
    found = {finding["check"]: finding["text"] for finding in json.loads(done.stdout)["findings"]}
    assert found.keys() == {"one_writer", "same_dropout", "same_noise"}
    assert re.search(r"because ddp.py:\d+ seeds all of them with 0", found["same_noise"])


@pytest.mark.slow
def test_script_for_one_process(doctor: Doctor) -> None:
    status, out, _ = doctor.run("--report", "report.html", "one_process.py")
    assert status == 0
    assert "1 rank" in out
    assert "Nothing found." in out
    assert "losses.txt" in out  # the file that it wanted to write
    assert not (doctor.folder / "losses.txt").exists()
    assert "Nothing found." in (doctor.folder / "report.html").read_text()


@pytest.mark.thorough
def test_the_launcher_is_another_one_if_the_ranks_do_not_join(doctor: Doctor) -> None:
    """The script reads variables of torchrun and of Slurm, so its text does not say which it needs."""
    text = (doctor.folder / "ddp.py").read_text()
    start = 'import os\nos.environ["RANK"], os.environ["LOCAL_RANK"] = os.environ["SLURM_PROCID"], "0"\n'
    (doctor.folder / "both.py").write_text(f'{start}# "RANK" is what torchrun sets\nrank = os.getenv("RANK")\n{text}')
    report, found = doctor.findings("both.py")
    assert report["ranks"] == [2] and report["updates"] and found == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "there is no script missing.py"),
        ([], "name a training script"),
        (["--resume", "--resume", "ddp.py"], "write --resume=ARGS with an equals sign"),
        (["--nproc", "0", "ddp.py"], "--nproc must be larger than 0"),
        (["--gpus_per_task", "-1", "ddp.py"], "--gpus_per_task must not be below 0"),
        (["--preload", "none.py", "ddp.py"], "there is no file none.py"),
        (["--cpu", "--on_gpus", "ddp.py"], "exclude each other"),
        (["--reread", "nowhere"], "nowhere has no runs"),
        (["--no_such_option", "ddp.py"], "unrecognized arguments: --no_such_option; --help shows the options"),
        (["--steps", "many", "ddp.py"], "argument --steps: invalid int value: 'many'"),
    ],
)
def test_misuse_is_one_line(doctor: Doctor, arguments: list[str], said: str) -> None:
    status, out, err = doctor.run(*arguments)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("rankdoctor: error: ")
    assert said in line


def test_a_python_without_torch_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The environment must be that of the user's script."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", missing)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train.py"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("has no PyTorch: start the doctor with the Python with which your script trains")


def test_null_gpus_without_their_package_are_one_line(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nullgpu", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--null_gpu", str(doctor.folder / "ddp.py")])
    assert capsys.readouterr().err == (
        "rankdoctor: error: --null_gpu needs the package nullgpu, which stands beside this one: pip install "
        "./tools/nullgpu, or leave out --null_gpu\n"
    )


class NullGPU(types.ModuleType):
    """A package in place of nullgpu."""

    class NotPossible(Exception):
        pass

    def environment(self, base: Mapping[str, str], **options: object) -> dict[str, str]:
        if options != {"gpus": 2, "values": True}:
            raise self.NotPossible("there is no compiler: install g++")
        return dict(base) | {"PYTHONPATH": f"/null/hook:{base['PYTHONPATH']}"}


def test_the_hook_of_the_doctor_comes_before_that_of_null_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nullgpu", NullGPU("nullgpu"))
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    plan = launch.Plan(Path("train.py"), [], ranks=4, nodes=2, gpus="null")
    env = launch.environment(plan, 3, Settings(scratch="/scratch", root="/"))
    assert env["PYTHONPATH"].split(":") == [str(launch.HOOK), "/null/hook", "/mine"]
    assert "CUDA_VISIBLE_DEVICES" not in env and env["NCCL_HOSTID"] == "node 1"
    with pytest.raises(launch.NoNullGPU, match=r"^--null_gpu: there is no compiler: install g\+\+$"):
        launch.environment(replace(plan, nodes=4), 0, Settings(scratch="/scratch", root="/"))


@pytest.mark.parametrize(("version", "warned"), [("2.4.1+cu121", True), ("2.11.0", False), ("2.15.0a0+git1", False)])
def test_an_old_torch_is_said(
    version: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(cli, "version", lambda _: version)
    cli.see_environment()
    assert capsys.readouterr().err.startswith("rankdoctor: PyTorch 2.4.1+cu121 is older than 2.11") == warned


def test_full_has_no_limit_of_updates(doctor: Doctor) -> None:
    """So that an epoch of more than 100 updates comes to its validation."""
    plain, full, both = (
        cli.make_plan(cli.parser().parse_args([*flags, str(doctor.folder / "ddp.py")])).settings
        for flags in ([], ["--full"], ["--full", "--steps", "7"])
    )
    assert (plain["batches"], plain["steps"]) == (8, 100)
    assert (full["batches"], both["batches"], both["steps"]) == (0, 0, 7) and full["steps"] > 10**6


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
@pytest.mark.parametrize(
    ("faults", "wanted"),
    [
        ("same_samples,not_combined", "same_samples train_loader results_combined validation"),
        ("held_out,schedule,graphs", "held_out split schedule_length schedule graphs_kept backward"),
        ("frozen,workers,same_workers", "weights_agree wrap workers_restarted train_loader same_workers train_loader"),
        ("one_class,same_dropout", "gradients_arrive backward same_dropout call same_noise noise"),
        ("not_zeroed", "gradients_zeroed update"),
    ],
)
def test_each_fault_is_found(doctor: Doctor, faults: str, wanted: str) -> None:
    _, found = doctor.findings("ddp.py", faults)
    checks, marks = wanted.split()[::2], wanted.split()[1::2]
    assert [found.get(check) for check in checks] == marks


@pytest.mark.thorough
def test_provocations_find_what_an_ordinary_run_does_not_show(doctor: Doctor) -> None:
    report, found = doctor.findings("--thorough", "ddp.py", "local_rank,collective_per_batch,forgetful,skip_nan")
    runs = {(finding["check"], finding["run"]) for finding in report["findings"]}
    assert ("same_samples", "as on two nodes") in runs
    assert ("resumed", "stopped and resumed") in runs
    assert ("same_collectives", "with uneven data") in runs  # one rank has a batch more in validation
    assert ("same_collectives", "with a NaN on rank 1") in runs
    assert found["same_samples"] == "train_loader"


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["spike", "patience"])
def test_what_one_rank_decides_by_its_own_loss_is_found(doctor: Doctor, fault: str) -> None:
    report, _ = doctor.findings("--outliers", "ddp.py", fault)
    runs = {(finding["check"], finding["run"]) for finding in report["findings"] if finding["kind"] == "FAULT"}
    assert {run for _, run in runs} == {"with outliers on rank 1"}, report["findings"]


@pytest.mark.slow
def test_what_the_stand_in_cannot_run_is_run_on_null_gpus(doctor: Doctor) -> None:
    null_gpus()
    report, found = doctor.findings("fsdp1.py")
    assert report["runs"][0]["gpus"] == "null"
    assert "FSDP" in report["runs"][0]["instead"]
    assert report["updates"][0] == 16
    assert not report["errors"]
    assert found == {}


@pytest.mark.thorough
def test_faults_are_found_on_null_gpus_too(doctor: Doctor) -> None:
    null_gpus()
    report, found = doctor.findings("--null_gpu", "ddp.py", "bare,same_order,padded,no_eval,clip_scaled,all_save,item")
    assert report["runs"][0]["gpus"] == "null"
    _, expected = doctor.findings("ddp.py", "bare,same_order,padded,no_eval,clip_scaled,all_save,item")
    assert found == expected


@pytest.mark.thorough
def test_provocations_side_by_side_find_the_same(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(doctor.folder)
    monkeypatch.setattr(series, "at_once", lambda plan: 2)
    assert cli.main(["--uneven", "--two_nodes", "--json", "ddp.py", "local_rank"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in report["runs"]] == ["", "with uneven data", "as on two nodes"]
    assert {(f["check"], f["run"]) for f in report["findings"]} >= {("same_samples", "as on two nodes")}


@pytest.mark.thorough
def test_a_fault_that_begins_with_the_second_resume_is_found(doctor: Doctor) -> None:
    """The checkpoint counts the epochs since the last start."""
    report, found = doctor.findings("--resume=", "ddp.py", "counted_anew")
    assert [finding["run"] for finding in report["findings"]] == ["resumed a second time"]
    assert list(found) == ["resumed"]


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [[], ["--null_gpu"]])
def test_a_checkpoint_that_all_ranks_load_to_the_gpu_of_rank_0_is_found(doctor: Doctor, gpus: list[str]) -> None:
    if gpus:
        null_gpus()
    _, found = doctor.findings(*gpus, "--resume=", "ddp.py", "unlocated")
    assert found == {"loaded_to_own_gpu": "load"}


@pytest.mark.thorough
def test_a_checkpoint_that_is_saved_from_the_cpu_needs_no_map_location(doctor: Doctor) -> None:
    _, found = doctor.findings("--resume=", "ddp.py", "unlocated,from_cpu")
    assert found == {}


@pytest.mark.thorough
def test_provocations_find_no_more_than_the_source_says(doctor: Doctor) -> None:
    report, found = doctor.findings("--thorough", "ddp.py")
    (skipped,) = [finding for finding in report["findings"] if finding["kind"] != "COST"]
    assert skipped["run"].startswith("with a batch that") and "skip_nan" in found["same_collectives"], (
        "it is in the source"
    )
    names = {one["name"] for one in report["runs"]}
    assert {"with uneven data", "as on two nodes", "with a NaN on rank 1", "stopped", "stopped and resumed"} <= names
    assert "A resumed run goes on where the stopped one was." in report["fine"]


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


def wait_for_process(mark: str) -> int:
    """Return the id of a process that runs a script."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if mark in words:
                return int(folder.name)
        time.sleep(0.1)
    raise AssertionError("the rank was not started")


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


PYTORCH_ABORTS = "terminate called without an active exception"
"""what a rank says that PyTorch aborts when its process ends: once in some thousand runs, without the doctor too"""


@pytest.mark.thorough
def test_losses_are_those_without_the_doctor(doctor: Doctor) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = []
    for name, command in (("plain", torchrun), ("doctor", [*DOCTOR, "--cpu", "--full", "--no_redirect"])):
        words = [*command, "losses.py", f"{name}.json"]
        for _ in range(2):
            done = subprocess.run(words, cwd=doctor.folder, text=True, capture_output=True, timeout=300)
            if name == "doctor" or PYTORCH_ABORTS not in done.stderr:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append(json.loads((doctor.folder / f"{name}.json").read_text()))
    assert losses[0] == losses[1]


@pytest.mark.thorough
def test_a_kept_log_can_be_judged_again(doctor: Doctor) -> None:
    first = doctor.run("--keep", "kept", "one_process.py")
    again = doctor.run("--reread", "kept")
    assert again == first


BESIDE = [
    "profiler",
    "scheduled_profiler",
    "old_profiler",
    "sync_norm",
    "converted_norm",
    "compiled",
    "anomaly",
    "memory_history",
    "debugger",
    "faulthandler",
    "settrace",
]
"""tools that change PyTorch, or Python, at the same time as the doctor"""


@pytest.mark.thorough
@pytest.mark.parametrize("tool", BESIDE)
def test_a_script_with_another_tool_runs_and_is_not_accused(doctor: Doctor, tool: str) -> None:
    report, found = doctor.findings("beside.py", tool)
    assert report["errors"] == [] and report["updates"] == [8]
    assert report["runs"][0]["gpus"] == "standin", "the first try is enough"
    assert found == {} and report["status"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {}),
        ("members", {}),
        ("repeated", {}),
        ("live", {"kept_states": "kept"}),
        ("augmented", {"steady_validation": "held_out"}),
    ],
)
def test_weights_that_are_kept_members_of_an_ensemble_and_samples_that_validation_augments(
    doctor: Doctor, words: str, wanted: Found
) -> None:
    report, found = doctor.findings("best.py", *([words] if words else []))
    assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["", "attack", "sharpness", "surgery"])
def test_what_only_looks_like_a_fault_is_not_accused(doctor: Doctor, words: str) -> None:
    """Noise that a model scales, checkpointing, files that workers open, gradients that are read and thrown away."""
    report, found = doctor.findings("kinds.py", *([words] if words else []))
    assert report["errors"] == [] and found == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("sdpa", {"random_in_evaluation": "attention"}),
        ("noise", {"random_in_evaluation": "added"}),
        ("set", {"same_meaning": "index"}),
        ("handle", {"own_handles": "open"}),
        ("recomputed", {"recomputation": "recomputed"}),
        ("reentrant", {"recomputed_gradients": "reentrant"}),
        ("zeroed", {"gradients_used": "zeroed"}),
        ("clip_early", {"clip_in_time": "clip"}),
        ("stream", {"equal_steps": "stream"}),
        ("branch", {"same_unused": "backward"}),
    ],
)
def test_each_kind_is_found_with_its_line(doctor: Doctor, words: str, wanted: Found) -> None:
    _, found = doctor.findings("kinds.py", words)
    assert wanted.items() <= found.items(), found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {}),
        ("replacement", {}),
        ("own_order", {"same_samples": "model"}),
        ("own_count", {"element_weights": "backward"}),
        ("own_mean", {"element_weights": "backward"}),
        ("spread", {"own_target": "backward"}),
        ("pairs", {}),
    ],
)
def test_an_own_loader_and_a_masked_loss(doctor: Doctor, words: str, wanted: Found) -> None:
    report, found = doctor.findings("masks.py", *([words] if words else []))
    found.pop("collectives_per_step", None)  # a count that is added up in each step costs a little
    assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["fill", "fill,sums", "minus", "times", "left", "fill,plain"])
def test_a_mask_of_a_contrastive_loss(doctor: Doctor, how: str) -> None:
    for words, wanted in ((how, {}), (f"{how},no_offset", {"contrast_masks": "backward"})):
        report, found = doctor.findings("contrasts.py", words)
        found.pop("gathered_gradients", None)  # of constants
        assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {}),
        ("tally", {"added_once": "tally"}),
        ("divided", {"divided_once": "divided"}),
        ("average", {"statistics_of_copies": "average"}),
        ("vocabulary", {"same_numbering": "vocabulary"}),
        ("shuffled", {"stream_shared": "loader"}),
        ("worker", {"same_samples": "loader", "stream_shared": "loader"}),  # the second follows from the first
        ("sharded", {}),
        ("sharded,norms", {"norms_of_parts": "norms"}),
    ],
)
def test_totals_streams_and_vocabularies(doctor: Doctor, words: str, wanted: Found) -> None:
    report, found = doctor.findings("totals.py", *([words] if words else []))
    found.pop("small_norm", None)
    assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "words", "wanted"),
    [
        ("copies.py", "", {}),
        ("copies.py", "drawn", {}),
        ("copies.py", "stale", {"worker_copies": "loader"}),
        ("copies.py", "own_scaling", {"same_scaling": "scaling"}),
        ("copies.py", "low", {"averages_follow": "average"}),
        ("copies.py", "multiplied", {"averages_follow": "average"}),
        ("copies.py", "positions", {"same_samples": "loader"}),
        ("divided.py", "", {}),
        ("divided.py", "partial", {"shared_agree": "leave"}),
        ("parts.py", "", {}),
        ("parts.py", "revived", {"frozen_modes": "train"}),
        ("parts.py", "left", {"own_gradients": "discriminator"}),
        ("pipeline.py", "", {}),
        ("pipeline.py", "one", {"kept_inputs": "receive"}),
    ],
)
def test_what_the_thirteenth_and_fourteenth_round_brought(
    doctor: Doctor, script: str, words: str, wanted: Found
) -> None:
    report, found = doctor.findings(script, *([words] if words else []))
    found.pop("same_meaning", None)  # follows from another scaling of the samples
    assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
def test_collectives_of_torch_2_15_are_seen(doctor: Doctor) -> None:
    report, found = doctor.findings("ddp.py", "not_combined,single")
    assert "results_combined" not in found
    assert "all_gather" in report["fine"]["The ranks exchange the results of a validation that they share."]


@pytest.mark.parametrize(
    ("number", "said", "tried"), [(11, "the doctor may be the cause", True), (9, "no memory", False)]
)
def test_a_rank_that_ends_by_a_signal_is_not_blamed_on_the_script(number: int, said: str, tried: bool) -> None:
    run = correct_run(statuses=[0, -number])
    assert any(f"signal {number}" in line and said in line for line in report.failures(run))
    assert bool(series.why_null_gpus(run)) == tried, "null GPUs are tried"
