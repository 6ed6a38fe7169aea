"""The check before a class: what is wrong is named, with what to do about it and the lessons that cannot run."""

import ast
import errno
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import preflight
from conftest import REPOSITORY
from preflight import LESSONS, Result
from slurm_cluster import SlurmCluster

SCRIPT = REPOSITORY / "slurm" / "preflight.py"
Patch = pytest.MonkeyPatch


def says(result: Result, status: str, found: str, remedy: str) -> None:
    assert result.status == status and found in result.found and remedy in result.remedy, vars(result)


def test_an_old_python_can_read_the_script_and_is_named(monkeypatch: Patch) -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    assert not {"torch", "workshop", "tomllib"} & {name.partition(".")[0] for name in modules}
    monkeypatch.setattr(preflight, "sys", SimpleNamespace(version_info=(3, 9, 2), executable="/usr/bin/python3"))
    says(preflight.check_python(), "fail", "3.9.2, /usr/bin/python3", "Python 3.11 or newer")


def test_packages_missing_or_too_old(monkeypatch: Patch) -> None:
    def found(name: str) -> str:
        if name == "h5py":
            raise PackageNotFoundError
        return "2.1.0+cu118" if name == "torch" else version(name)

    monkeypatch.setattr(preflight, "version", found)
    says(preflight.check_packages(), "fail", "torch is 2.1.0+cu118", "docs/installing.md")
    says(preflight.check_packages(), "fail", "h5py is missing", "docs/installing.md")


def test_package_of_another_clone(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "workshop").mkdir()
    spec = SimpleNamespace(origin=str(tmp_path / "workshop" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    says(preflight.check_package(), "fail", f"another clone, {tmp_path}", f"PYTHONPATH={REPOSITORY}")


def test_a_folder_named_workshop_is_no_package(monkeypatch: Patch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace(origin=None))
    says(preflight.check_package(), "fail", "finds nothing", f"PYTHONPATH={REPOSITORY}")


def test_a_gpu_that_torch_does_not_find_or_cannot_compute_on(monkeypatch: Patch) -> None:
    which = "Which GPU and which driver"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    says(preflight.check_device(), "fail", "CUDA_VISIBLE_DEVICES=0, but torch", which)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver = subprocess.CompletedProcess("nvidia-smi", 0, "535.104.05\n", "")
    monkeypatch.setattr(preflight, "run", lambda *_: driver)
    says(preflight.check_device(), "fail", "driver 535.104.05, but torch", which)

    def no_kernel(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    gpu = SimpleNamespace(name="Some GPU", total_memory=16e9, major=6, minor=1)
    monkeypatch.setattr("workshop.hardware.pick_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch, "ones", no_kernel)
    says(preflight.check_device(), "fail", "Some GPU, 16 GB, compute capability 6.1, does not compute: CUDA", which)


def test_one_cpu_or_little_shared_memory(monkeypatch: Patch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    says(preflight.check_cpus(), "warning", "1 for this process", "--cpus-per-task=2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64e6))
    says(preflight.check_cpus(), "warning", "/dev/shm", "--shm-size")


def test_data_missing_or_cut_short(monkeypatch: Patch, data_dir: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKSHOP_DATA", str(data_dir))
    assert {result.status for result in preflight.check_data()} == {"ok"}
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    results = {result.check: result for result in preflight.check_data()}
    for name in ("mnist", "cifar10", "nbody", "text"):
        says(results[f"data: {name}"], "fail", str(tmp_path), f"python data/prepare.py {name}")
    assert results["data: mnist"].lessons == LESSONS[:4]
    assert results["data: text"].lessons == LESSONS[4:]
    assert results["data: nbody"].lessons == ["04_mixed_precision"]
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    os.truncate(tmp_path / "nbody" / "val.h5", 500)
    results = {result.check: result for result in preflight.check_data()}
    says(results["data: nbody"], "fail", "val.h5", "python data/prepare.py nbody")


def test_folders_that_cannot_be_written(monkeypatch: Patch, tmp_path: Path) -> None:
    def over_quota(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path / "runs"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", over_quota)
        says(preflight.check_folders(), "fail", "quota exceeded", "export WORKSHOP_RUNS=")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, _: path.name != "02_dataparallel")
        says(preflight.check_folders(), "fail", "02_dataparallel", "clone the repository to a folder of your own")
    assert preflight.check_folders().status in ("ok", "warning")


def test_slurm_missing_down_or_refusing_a_job(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    says(preflight.check_slurm()[0], "warning", "no sbatch here", "slurm/local_cluster.sh up")
    monkeypatch.setattr(shutil, "which", lambda name: name)

    def answer(command: str, *_: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        refused = cwd is not None and cwd.name == "03_ddp"
        return subprocess.CompletedProcess(command, int(refused), "", "x\nInvalid account" if refused else "")

    monkeypatch.setattr(preflight, "run", answer)
    jobs = {result.lessons[0]: result for result in preflight.check_slurm()}
    assert list(jobs) == LESSONS
    says(jobs["03_ddp"], "fail", "Invalid account", "SBATCH_ACCOUNT")
    assert {jobs[name].status for name in LESSONS if name != "03_ddp"} == {"ok"}
    down = subprocess.CompletedProcess("sinfo", 1, "", "first\nUnable to contact slurm controller")
    monkeypatch.setattr(preflight, "run", lambda *_: down)
    says(preflight.check_slurm()[0], "fail", "Unable to contact", "ask the administrators")


def test_ranks_that_do_not_join(monkeypatch: Patch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, text in where.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(preflight, "RANKS_JOIN_IN_SECONDS", 1)
    result = preflight.join_ranks()
    says(result, "fail", "rank 0 of 2", "03_ddp/experiments/hangs.md")
    assert {"03_ddp", "04_mixed_precision", "05_fully_sharded"} == set(result.lessons)


def test_each_lesson_gets_an_answer_and_the_exit_status_follows(capsys: pytest.CaptureFixture) -> None:
    assert len(LESSONS) >= 5
    warning = Result("quota", "warning", "nearly full", "free some space", ["01_single_gpu"])
    assert preflight.show([Result("Python", "ok", "3.12"), warning]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith(": all lessons can run")
    assert out.splitlines()[-1] == "next: cd 01_single_gpu, and follow its README.md"
    assert "warning  quota          nearly full\n         -> free some space\n" in out
    assert "lesson 01_single_gpu: can run, with warnings: quota\nlesson 02_dataparallel: can run\n" in out
    assert preflight.show([warning, Result("data: nbody", "fail", "none", "prepare it", ["04_mixed_precision"])]) == 1
    out = capsys.readouterr().out
    assert "lesson 03_ddp: can run\nlesson 04_mixed_precision: cannot run: data: nbody\n" in out
    assert out.splitlines()[0].endswith(": lesson 04 cannot run yet")
    assert out.splitlines()[-1] == "next: prepare it"


@pytest.mark.thorough
def test_this_machine_can_run_every_lesson(user_environment: dict[str, str]) -> None:
    result = subprocess.run([sys.executable, SCRIPT], env=user_environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok       ranks          2 joined over gloo and added up correctly" in result.stdout
    assert len(re.findall("^lesson .*: can run", result.stdout, re.M)) == len(LESSONS)


@pytest.mark.thorough
def test_preflight_as_a_job_on_two_nodes(slurm: SlurmCluster, user_environment: dict[str, str]) -> None:
    environment = user_environment | slurm.environment | {"SBATCH_WAIT": "1"}
    command = ["sbatch", "--parsable", "slurm/preflight.slurm"]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    file = REPOSITORY / f"preflight_{result.stdout.strip()}.log"
    log = file.read_text()
    file.unlink()
    assert result.returncode == 0, log
    assert "on 127.0.0.1:" in log and "on 127.0.0.2:" in log
    assert log.count("ok       ranks          4 joined over gloo") == 2
    assert log.count("ok       job of 0") == len(LESSONS)
    assert len(re.findall("^lesson .*: can run", log, re.M)) == 2 * len(LESSONS)
