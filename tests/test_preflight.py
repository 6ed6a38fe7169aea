"""The checks before a class: each is broken on purpose once, and must say what to do."""

import ast
import errno
import importlib
import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import preflight
import preflight_checks as checks
import workshop.hardware
from conftest import REPOSITORY, Script
from preflight_checks import ALL, CheckResult
from ranks import free_port
from slurm_cluster import SlurmCluster

Patch = pytest.MonkeyPatch
SCRIPTS = [REPOSITORY / "slurm" / name for name in ("preflight.py", "preflight_checks.py")]


def says(result: CheckResult, status: str, found: str, remedy: str, lessons: tuple[str, ...] = ALL) -> bool:
    assert (result.status, result.lessons) == (status, lessons), vars(result)
    assert found in result.found and remedy in result.remedy, vars(result)
    return True


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_old_python_can_read_the_script(script: Path) -> None:
    tree = ast.parse(script.read_text(), feature_version=(3, 8))
    modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    assert not {"torch", "workshop", "tomllib"} & {name.partition(".")[0] for name in modules}


def test_python_too_old(monkeypatch: Patch) -> None:
    monkeypatch.setattr(checks, "sys", SimpleNamespace(version_info=(3, 9, 2), executable="/usr/bin/python3"))
    assert says(checks.python(), "fail", "3.9.2, /usr/bin/python3", "make setup PYTHON=python3.11")
    assert [result.check for result in preflight.foundations()] == ["Python"]


def versions(monkeypatch: Patch, **others: str | None) -> None:
    def found(name: str) -> str:
        number = others.get(name, version(name))
        if number is None:
            raise PackageNotFoundError
        return number

    monkeypatch.setattr(checks, "version", found)


def test_packages_missing_too_old_or_not_the_tested_ones(monkeypatch: Patch) -> None:
    versions(monkeypatch, h5py=None, torch="2.1.0+cu118")
    (result,) = checks.packages()
    assert says(result, "fail", "missing or too old: h5py, torch 2.1.0 (2.11 or newer)", "make setup")
    versions(monkeypatch, tqdm="1.0")
    (result,) = checks.packages()
    assert result.status == "warning" and "tqdm 1.0 (4." in result.found


def test_package_of_another_clone(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "workshop").mkdir()
    spec = SimpleNamespace(origin=str(tmp_path / "workshop" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert says(checks.package(), "fail", f"another clone, {tmp_path}", f"export PYTHONPATH={REPOSITORY}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert says(checks.package(), "fail", "finds nothing", f"`make setup` in {REPOSITORY}")


def test_driver_too_old_or_torch_without_cuda(monkeypatch: Patch) -> None:
    monkeypatch.setattr("workshop.hardware.driver_version", lambda: "535.104.05")
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert says(checks.driver(), "fail", "driver 535.104.05 is too old for torch's CUDA 13.2", "driver R580 or newer")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert checks.driver().status == "ok"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert says(checks.driver(), "fail", "knows no CUDA", "install a torch built for CUDA")


def test_gpu_granted_but_not_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert says(checks.device(), "fail", "CUDA_VISIBLE_DEVICES=0, but torch", "needs driver R580 or newer")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert says(checks.device(), "warning", "no GPU: computes on cpu", "take a GPU node")


def fake_gpu(monkeypatch: Patch, major: int, minor: int) -> None:
    monkeypatch.setattr(workshop.hardware, "pick_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="Some GPU", total_memory=16e9, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_gpu_that_this_torch_has_no_kernels_for(monkeypatch: Patch) -> None:
    fake_gpu(monkeypatch, 6, 1)

    def no_kernel(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(torch, "ones", no_kernel)
    found = "1 x Some GPU, 16 GB, compute capability 6.1, does not compute: CUDA error: no kernel image"
    assert says(checks.device(), "fail", found, "install one built for this GPU")


def test_old_and_single_gpu(monkeypatch: Patch) -> None:
    fake_gpu(monkeypatch, 7, 5)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(shape))
    assert says(checks.device(), "warning", "compute capability 7.5", "use fp16", ("04", "05"))
    (result,) = checks.gpus_for_lesson_02()
    assert says(result, "warning", "one GPU", "--gres=gpu:2", ("02",))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert checks.gpus_for_lesson_02() == []


def test_without_dali(monkeypatch: Patch) -> None:
    def missing(_: str) -> None:
        raise ImportError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert says(checks.dali(), "warning", "libnvrtc.so", "pip install nvidia-dali-cuda120", ("01", "04"))


def test_one_cpu_and_little_shared_memory(monkeypatch: Patch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert says(checks.processors(), "warning", "1 for this process", "--cpus-per-task=2")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64e6))
    assert says(checks.shared_memory(), "warning", "64 MB free", "--shm-size=1g")


def data_results(monkeypatch: Patch, folder: Path) -> dict[str, CheckResult]:
    monkeypatch.setenv("WORKSHOP_DATA", str(folder))
    monkeypatch.chdir(REPOSITORY)
    return {result.check.removeprefix("data: "): result for result in checks.data()}


def test_data_missing_cut_short_or_changed(monkeypatch: Patch, data_dir: Path, tmp_path: Path) -> None:
    assert {result.status for result in data_results(monkeypatch, data_dir).values()} == {"ok"}

    results = data_results(monkeypatch, tmp_path)
    prepare = "to prepare {0} run `python data/prepare.py {0}`, or without a network"
    assert says(results["mnist"], "fail", "has no train-images", prepare.format("mnist"))
    assert says(results["cifar10"], "warning", "data_batch_1", prepare.format("cifar10"), ("01", "03"))
    assert says(results["nbody"], "fail", "has no train.h5", prepare.format("nbody"), ("04",))

    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    with images.open("r+b") as file:
        file.seek(1000)
        file.write(b"\x07\x06\x05")
    os.truncate(tmp_path / "nbody" / "val.h5", 500)
    results = data_results(monkeypatch, tmp_path)
    assert says(results["mnist"], "fail", f"{images}: damaged", "python data/prepare.py mnist --synthetic")
    assert says(results["nbody"], "fail", "val.h5", prepare.format("nbody"), ("04",))


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_runs_cannot_be_written(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path / "file" / "runs"))
    (result,) = checks.runs_folder()
    assert says(result, "fail", f"cannot write to {tmp_path / 'file' / 'runs'}", "export WORKSHOP_RUNS=")
    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path / "runs"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EDQUOT))
        (result,) = checks.runs_folder()
    assert says(result, "fail", "quota exceeded", "a folder of yours with free space")
    assert list((tmp_path / "runs").iterdir()) == []


def test_little_space_a_foreign_clone_and_a_quota(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKSHOP_RUNS", str(tmp_path))
    monkeypatch.setattr(checks, "WRITTEN_MB", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1.5e9))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "02_dataparallel")
    over = subprocess.CompletedProcess("quota", 1, "Disk quotas:  /home 105*", "")
    monkeypatch.setattr(checks, "_output", lambda *_: over)
    space, clone, quota = checks.runs_folder()
    assert says(space, "warning", "2 GB free", "export WORKSHOP_RUNS=")
    assert says(clone, "fail", "cannot write to", "clone the repository to a folder of your own", ("02",))
    assert says(quota, "warning", "over quota: Disk quotas: /home 105*", "free some space")


def test_names_that_do_not_resolve(monkeypatch: Patch) -> None:
    def resolve(name: str, _: None) -> None:
        if name == "node7":
            raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert says(checks.names(["node6", "node7"]), "fail", "resolve: node7", "set MASTER_ADDR", ("03", "04", "05"))


def fake_slurm(monkeypatch: Patch, sinfo: str, test_only: str = "", refused: str = "") -> list[CheckResult]:
    """The results for a cluster whose commands answer like this."""

    def answer(command: str, *_: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        if command == "sinfo":
            return subprocess.CompletedProcess(command, 0, sinfo, "")
        status = 1 if refused and cwd.name.startswith(refused) else 0
        return subprocess.CompletedProcess(command, status, "", test_only)

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(checks, "_output", answer)
    return checks.slurm()


def test_without_slurm_or_without_an_answer(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert says(checks.slurm()[0], "warning", "no sbatch here", "slurm/local_cluster.sh up")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    for message, status in {
        "slurm_load_partitions: Unable to contact": "fail",
        "configuration source": "warning",
    }.items():
        silent = subprocess.CompletedProcess("sinfo", 1, "", f"first\n{message}")
        monkeypatch.setattr(checks, "_output", lambda *_, silent=silent: silent)
        (result,) = checks.slurm()
        assert says(result, status, message, "ask the administrators")


def test_partition_that_lacks_something(monkeypatch: Patch) -> None:
    def first(sinfo: str) -> CheckResult:
        return fake_slurm(monkeypatch, sinfo)[0]

    good = "gpu*|up|1-00:00:00|4|gpu:a100:4(S:0-1)|64|512000\ncpu|up|infinite|9|(null)|64|256000"
    assert first(good).status == "ok" and "4 nodes, up to 4 GPUs, 64 CPUs and 512000 MB" in first(good).found
    no_gpus = first("cpu*|up|1-00:00:00|9|(null)|64|256000")
    assert says(no_gpus, "fail", "up to 0 GPUs", "set SBATCH_PARTITION", ("02", "03", "04", "05"))
    assert "the jobs of lessons 02 to 05 ask for 2" in no_gpus.found
    assert says(
        first("gpu*|up|30:00|1|gpu:2|8|1"), "warning", "1 nodes", "leave out what asks for two", ("03", "04", "05")
    )
    assert says(first("gpu*|down|30:00|4|gpu:2|8|1"), "fail", "none is not among those that are up", "`sinfo` lists")
    monkeypatch.setenv("SBATCH_PARTITION", "gpuu")
    assert says(first(good), "fail", "gpuu is not among those that are up", "set SBATCH_PARTITION in slurm/site.sh")


def test_time_limit_below_that_of_the_jobs_and_a_job_that_slurm_refuses(monkeypatch: Patch) -> None:
    refusal = "sbatch: error: x\nallocation failure: Invalid account"
    results = fake_slurm(monkeypatch, "debug*|up|10:00|2|gpu:2|8|1", refusal, refused="03")
    limits = [result for result in results if result.check == "time limit"]
    assert [result.lessons for result in limits] == [("01",), ("02",), ("03",), ("04",), ("05",)]
    assert says(limits[0], "fail", "10:00, but the job asks for 20 minutes", "`sbatch --time=10:00`", ("01",))
    jobs = {result.check: result for result in results if result.check.startswith("job")}
    assert says(jobs["job of 03"], "fail", "Invalid account", "set SBATCH_ACCOUNT", ("03",))
    assert jobs["job of 01"].status == "ok"


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("20:00", 20), ("90", 90), ("1:30:00", 90), ("1-12:00:00", 2160), ("2-0", 2880), ("infinite", None)],
)
def test_times_as_slurm_writes_them(limit: str, minutes: float | None) -> None:
    assert checks._minutes(limit) == minutes


def test_ranks_that_do_not_join(monkeypatch: Patch) -> None:
    where = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (where | {"MASTER_PORT": str(free_port()), "WORKSHOP_RENDEZVOUS_SECONDS": "1"}).items():
        monkeypatch.setenv(name, value)
    own, result = preflight.with_the_other_ranks(lambda: [CheckResult("own", "ok", "")])
    assert own.check == "own"
    assert says(result, "fail", "rank 0 of 2 waited up to 1 s", "03_ddp/experiments/hangs.md", ("03", "04", "05"))


def test_torchrun_that_fails(monkeypatch: Patch) -> None:
    ended = subprocess.CompletedProcess("", 1, "", "Traceback\nOSError: no port")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    (result,) = preflight.ranks_on_this_machine()
    assert says(result, "fail", "two: OSError: no port", "torchrun --standalone", ("03", "04", "05"))


def test_ranks_that_add_up_wrong_or_slowly(monkeypatch: Patch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    with pytest.raises(RuntimeError, match=r"an all-reduce over 2 ranks gave 1.0, not the sum"):
        preflight.all_reduce_gb_per_second(torch.device("cpu"))
    slow = preflight.bandwidth(0.12, "nccl", 2)
    assert says(slow, "warning", "0.12 GB/s", "NCCL_SOCKET_IFNAME", ("03", "04", "05"))
    assert preflight.bandwidth(0.12, "gloo", 2).status == "ok"
    alone = preflight.bandwidth(0.0, "gloo", 1)
    assert says(alone, "warning", "one rank sends nothing", "--ntasks-per-node=2", ("03", "04", "05"))


def test_results_of_many_nodes_are_merged_and_decide_about_lessons(capsys: pytest.CaptureFixture) -> None:
    results = [CheckResult("Python", "ok", "3.12", node=node) for node in ("n1", "n2")]
    results += [
        CheckResult("driver", "ok", "580.1", node="n1"),
        CheckResult("driver", "fail", "535.1 is too old", "newer", node="n2"),
    ]
    results += [CheckResult("data: nbody", "fail", "missing", "prepare it", ("04",), node="n1")]
    assert preflight.show(results) == 1
    out = capsys.readouterr().out
    assert "ok       Python         3.12\n" in out and "ok       driver         [n1] 580.1\n" in out
    assert "fail     driver         [n2] 535.1 is too old\n         -> newer\n" in out
    assert "lesson 03_ddp: cannot run: driver\n" in out
    assert "lesson 04_mixed_precision: cannot run: driver, data: nbody\n" in out
    assert preflight.show([CheckResult("quota", "warning", "over", "free some space", ("01",))]) == 0
    out = capsys.readouterr().out
    assert "lesson 01_single_gpu: can run, with warnings: quota\nlesson 02_dataparallel: can run\n" in out


def test_nothing_more_is_asked_of_a_broken_installation(monkeypatch: Patch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert preflight.main() == 1
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert preflight.main() == 1
    assert "cannot run: package" in capsys.readouterr().out


def test_in_the_shell_of_a_job_it_checks_this_machine(monkeypatch: Patch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    result = CheckResult("Python", "ok", "3.12")
    monkeypatch.setattr(preflight, "foundations", lambda: [result])
    for owner, name in ((preflight, "machine"), (preflight, "ranks_on_this_machine"), (checks, "slurm")):
        monkeypatch.setattr(owner, name, lambda: [])
    monkeypatch.setattr(checks, "names", lambda _: result)
    assert preflight.main() == 0
    assert "lesson 03_ddp: can run" in capsys.readouterr().out


@pytest.mark.slow
def test_this_machine_can_run_every_lesson(run_script: Script) -> None:
    result = run_script("slurm/preflight.py")
    assert "ok       ranks          2 on 1 node(s) joined over gloo" in result.stdout, result.stdout
    answers = [line.partition(": ")[2] for line in result.stdout.splitlines() if line.startswith("lesson 0")]
    assert [answer[:7] for answer in answers] == ["can run"] * 5
    assert result.status == 0


def test_preflight_as_a_job_on_two_nodes(slurm: SlurmCluster, user_environment: dict[str, str]) -> None:
    environment = user_environment | slurm.environment | {"SBATCH_WAIT": "1"}
    command = ["sbatch", "--parsable", "slurm/preflight.slurm"]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    file = REPOSITORY / f"preflight_{result.stdout.strip()}.log"
    log = file.read_text()
    file.unlink()
    assert result.returncode == 0, log
    assert "on 127.0.0.1, 127.0.0.2:" in log
    assert "ok       ranks          4 on 2 node(s) joined over gloo" in log
    assert "ok       partition      workshop: 2 nodes, up to 2 GPUs" in log
    assert log.count("ok       job of 0") == 5
    assert log.count(": can run") == 5
