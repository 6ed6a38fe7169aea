"""What users and their scripts may rely on: flags, files of a run, the line profile, and one line for a mistake."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pytest
import torch
import yaml

import quick_python
from conftest import REPOSITORY, Script
from lab.launching import load_script
from ranks import free_port, torchrun
from workshop.config import LessonFlags, load_config, run_with_config
from workshop.errors import UserError, run_reporting_user_errors

CONFIGS = {file.parent.name: load_script(file.parent).Config for file in sorted(REPOSITORY.glob("0*/train.py"))}
COMMON = [
    *("dataset", "data_dir", "run_dir", "model", "loader", "batch_size", "num_workers", "epochs", "lr", "optimizer"),
    *("seed", "log_interval", "limit_train", "limit_val", "resume", "benchmark", "trace", "monitor"),
]
FEW = ["--limit_train", 64, "--limit_val", 16, "--loader", "memory"]
FEW_TEXTS = [*FEW[:-2], "--width", 64, "--depth", 2, "--sequence_length", 16, "--batch_size", 64]
FEW_OF = dict.fromkeys(CONFIGS, FEW) | {"05_fully_sharded": FEW_TEXTS}


# Flags, YAML keys and fields of the dataclass are the same.


@pytest.mark.parametrize("lesson", CONFIGS)
def test_flags_are_yaml_keys_are_fields(lesson: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config_class = CONFIGS[lesson]
    default = config_class()
    names = [field.name for field in fields(config_class)]
    assert set(COMMON) <= set(names) and load_config(config_class, []) == default
    given = {name: value for name, value in asdict(default).items() if value is not None} | {"epochs": 3}
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump({name: str(v) if isinstance(v, Path) else v for name, v in given.items()}))
    typed = {name: value for name, value in given.items() if name not in default.without_effect()}
    shown_as = {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in typed.items()}
    words = [word for name, value in shown_as.items() for word in (f"--{name}", value)]
    assert load_config(config_class, words) == load_config(config_class, ["--config", str(file)])
    assert load_config(config_class, ["--config", str(file)]) == config_class(**given)
    with pytest.raises(SystemExit, match="0"):
        load_config(config_class, ["--help"], "What it shows.\n\n    python train.py    # how")
    shown = capsys.readouterr().out
    assert "What it shows.\n\n    python train.py    # how\n" in shown  # with its line breaks
    assert [name for name in names if f"--{name} " not in shown] == []


def test_a_flag_wins_over_every_file_and_of_two_files_the_later_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("batch_size: 8\nlr: 1e-2\nepochs: 3\n")
    second.write_text("batch_size: 16\n")
    words = ["--config", str(first), "--config", str(second), "--epochs", "5"]
    config = load_config(CONFIGS["01_single_gpu"], words)
    assert (config.batch_size, config.lr, config.epochs) == (16, 0.01, 5)
    assert capsys.readouterr().out == ""
    words = ["--epochs", "4", "--batch_size", "8", f"--config={first}", "--batch_size=32", "--config", str(second)]
    config = load_config(CONFIGS["01_single_gpu"], words)
    assert (config.batch_size, config.lr, config.epochs) == (32, 0.01, 4)
    assert capsys.readouterr().out.splitlines() == [
        "--epochs 4 wins over epochs: 3 of a later --config",
        "--batch_size 32 wins over batch_size: 16 of a later --config",
    ]


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_every_key_of_a_shipped_config_arrives(file: Path) -> None:
    base = file.with_name(f"{file.name.partition('_')[0]}.yaml")  # such as unet3d.yaml, which others change
    base = base if base.stem in file.stem and base.exists() else file.with_name("cifar10.yaml")
    lesson = "05_fully_sharded" if file.stem.startswith("gpt") else "04_mixed_precision"
    base = file if file.stem.startswith("gpt") else base
    config = load_config(CONFIGS[lesson], ["--config", str(base), "--config", str(file)])
    for key, value in yaml.safe_load(file.read_text()).items():
        assert getattr(config, key) == value


# The folder of a run.


@pytest.mark.parametrize("lesson", CONFIGS)
def test_a_run_leaves_a_summary_curves_and_a_checkpoint(run_script: Script, tmp_path: Path, lesson: str) -> None:
    result = run_script(f"{lesson}/train.py", *FEW_OF[lesson], WORKSHOP_RUNS=str(tmp_path))
    assert result.status == 0, result.stderr
    text = lesson.startswith("05")
    run_dir = tmp_path / lesson / ("text" if text else "mnist")
    assert f"writing to {run_dir}, computing on cpu\n" in result.stdout
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1
    assert any(path.exists() for path in (run_dir / "checkpoint.pt", run_dir / "checkpoints"))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["lesson"], summary["world_size"], summary["global_batch_size"]) == (lesson, 1, 64)
    assert summary["command"].startswith("python train.py --limit_train 64 ")
    assert set(COMMON) <= summary["config"].keys()
    assert {"cpu", "device", "memory_bytes"} <= summary["hardware"].keys() and summary["versions"]["torch"]
    assert summary["peak_memory_bytes"] > 1e6
    (epoch,) = summary["epochs"]
    names = {"epoch", "train_loss", "val_loss", "val_accuracy", "seconds", "samples_per_second", "val_seconds"}
    assert epoch.keys() == names | ({"tokens_per_second"} if text else set())
    assert all(value >= 0 for value in epoch.values() if value is not None)
    assert (epoch["val_accuracy"] is None) == text
    shown = f"epoch 1  train loss {epoch['train_loss']:.4f}  val loss {epoch['val_loss']:.4f}  "
    assert shown + ("" if text else "accuracy ") in result.stdout


def test_a_job_has_its_number_as_run_name_and_so_finds_its_checkpoint_again(run_script: Script, tmp_path: Path) -> None:
    job = {"WORKSHOP_RUNS": str(tmp_path), "SLURM_JOB_ID": "17"}
    for epochs in (1, 2):
        result = run_script("01_single_gpu/train.py", *FEW, "--epochs", epochs, "--resume", "true", **job)
        assert f"writing to {tmp_path}/01_single_gpu/17," in result.stdout
    assert f"resumed from {tmp_path}/01_single_gpu/17/checkpoint.pt: epoch 2, after step 0\n" in result.stdout


@pytest.mark.parametrize("lesson", ["01_single_gpu", pytest.param("05_fully_sharded", marks=pytest.mark.thorough)])
def test_a_benchmark_measures_three_speeds_and_trains_nothing(run_script: Script, tmp_path: Path, lesson: str) -> None:
    flags = [
        "--benchmark",
        "true",
        "--benchmark_seconds",
        0.01,
        "--batch_size",
        4,
        "--limit_train",
        16,
        "--run_dir",
        tmp_path,
    ]
    result = run_script(f"{lesson}/train.py", *FEW_OF[lesson], *flags)
    assert result.status == 0, result.stderr
    assert all(re.search(rf"^{name} .*\d", result.stdout, re.MULTILINE) for name in ("IO", "SYNTHETIC", "FULL"))
    measured = json.loads((tmp_path / "throughput.json").read_text())
    assert all(measured[name]["mean"] > 0 and measured[name]["std"] >= 0 for name in ("IO", "SYNTHETIC", "FULL"))
    assert not (tmp_path / "summary.json").exists() and not list(tmp_path.glob("checkpoint*"))


PROFILED = {lesson: ["train_one_epoch"] for lesson in CONFIGS}
PROFILED["04_mixed_precision"] = PROFILED["05_fully_sharded"] = ["train_one_epoch", "train_step"]


@pytest.mark.parametrize("lesson", PROFILED)
def test_kernprof_sees_the_profiled_functions_and_python_pays_nothing(
    lesson: str, user_environment: dict[str, str], tmp_path: Path
) -> None:
    folder = REPOSITORY / lesson
    kernprof = [quick_python.commands() / "kernprof", "-lv", "-o", tmp_path / "train.lprof"]
    words = [*kernprof, "train.py", *FEW_OF[lesson]]
    result = subprocess.run([*map(str, words)], cwd=folder, env=user_environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert sorted(re.findall(r"^Function: (\w+) at", result.stdout, re.MULTILINE)) == PROFILED[lesson]
    assert re.search(r"^ +\d+ +[12] .*for inputs, targets in loader", result.stdout, re.MULTILINE)
    script = load_script(folder)
    assert all(not hasattr(getattr(script, name), "__wrapped__") for name in PROFILED[lesson])


# A user's mistake is one line, with exit status 2.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batchsize", 3], "unrecognized arguments: --batchsize 3"),
        (["stray"], "unrecognized arguments: stray"),
        (["--batch_size"], "--batch_size: expected one argument"),
        (["--batch_size", "many"], r'"batch_size": Expected .*int.*many'),
        (["--batch_size", "1.5"], r'"batch_size": Expected .*int.*1\.5'),
        (["--dataset", "imagenet"], r'"dataset": Expected .*\'mnist\', \'cifar10\'.*imagenet'),
        (["--resume", "perhaps"], r'"resume": Expected .*bool.*perhaps'),
        (["--lr", "nan"], '"lr": Expected .*float.*nan'),
        (["--save_interval", "x"], r'"save_interval": .*\'?int\'?.*x'),
        (["--config", "nowhere.yaml"], "File does not exist: .*nowhere.yaml"),
        *(
            (["--" + name, 0], f"--{name} must be at least 1, got 0")
            for name in ("batch_size", "epochs", "limit_train")
        ),
        (["--lr", 0], r"--lr must be above 0, got 0\.0"),
        (["--lr", 1e30], r"--lr must be below 2\*\*63, got 1e\+30"),
        (["--num_workers", -1], r"--num_workers must be 0 .* or more, got -1"),
        (["--seed", -1], "--seed must be 0 or more"),
        (["--limit_train", 8], r"--batch_size 64 .*only 8 to train on"),
        (["--model", "no_such_model"], "no_such_model"),
        (["--benchmark", "true", "--save_interval", 3], "leave out --save_interval"),
        (["--data_dir", "/nowhere"], "/nowhere.*python .*data/prepare.py mnist --synthetic"),
        *((["--run_dir", file], f"{file}: .*; give a folder, not a file") for file in ("/dev/null", "/dev/null/run")),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_one_line(run_script: Script, words: list, message: str) -> None:
    assert re.search(message, run_script("01_single_gpu/train.py", *words).error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise: 3\n", "'batch_sise' is not accepted"),
        ("batch_size: many\n", r'"batch_size": Expected .*int.*many'),
        ("- a\n- b\n", "Unexpected config"),
        ("a: [\n", "parsing"),
        ("lr: .nan\n", "--lr must be above 0, got nan"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(run_script: Script, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    error = run_script("01_single_gpu/train.py", "--config", file).error
    assert re.search(message, error) and ("run.yaml" in error or "--lr" in error)


RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
ALONE = {"RANK": "0"}


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (
            [],
            {name: RANK[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
            "MASTER_ADDR .*not set; start .*torchrun",
        ),
        ([], RANK | {"RANK": "x"}, "RANK, LOCAL_RANK, WORLD_SIZE must be numbers: start the ranks with torchrun"),
        ([], ALONE, "RANK, LOCAL_RANK, WORLD_SIZE must be numbers: start the ranks with torchrun"),
        ([], RANK, r"1/2 clients joined.*start as many as the world size says"),
        ([], RANK | {"RANK": "1"}, "127.0.0.1.*check"),
        ([], {"SLURM_NTASKS": "4"}, "only one of 4 tasks of this job was started: write srun before it"),
        ([], {"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=0, but torch .* finds no GPU"),
        (["--global_batch_size", 0], {}, "--global_batch_size must be at least 1, got 0"),
        (["--warmup", 1], {}, r"--warmup is a share of all steps, from 0 to below 1, got 1\.0"),
        (["--static_graph", "true", "--sync_gradients", "false"], {}, "it needs --sync_gradients true"),
    ],
)
def test_a_mistake_of_a_rank_is_one_line(
    run_script: Script, monkeypatch: pytest.MonkeyPatch, words: list, variables: dict[str, str], message: str
) -> None:
    monkeypatch.setattr("workshop.errors.several_ranks", lambda: False)  # several ranks end without Python's clean-up
    variables = {name: value.format(port=free_port()) for name, value in variables.items()}
    result = run_script("03_ddp/train.py", *FEW, "--timeout_minutes", 0.03, *words, **variables)
    assert result.status == 2, result.stderr
    *_, line = result.stderr.splitlines()  # torch may print where a socket has failed before it
    assert line.startswith("error: ") and re.search(message, line)


def test_a_mistake_of_all_ranks_is_reported_once(user_environment: dict[str, str]) -> None:
    for flag, message in (
        ("--lr", "--lr must be above 0"),
        ("--global_batch_size", "cannot be shared evenly by 2 ranks"),
    ):
        value = {"--lr": 0, "--global_batch_size": 65}[flag]
        result = torchrun(2, "train.py", *FEW, flag, value, cwd=REPOSITORY / "03_ddp", environment=user_environment)
        assert result.status == 1  # torchrun's own
        assert len(re.findall(rf"^error: .*{message}", result.stderr, re.MULTILINE)) == 1, result.stderr


@dataclass(frozen=True)
class Raising:
    """A main function that raises an error."""

    error: BaseException

    def __call__(self) -> None:
        raise self.error


FULL = "unable to write to file </torch_1_2_0>: No space left on device (28)"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("a\n  mistake"), "a mistake"),
        (
            UserError("Caught UserError in DataLoader worker\nTraceback\nworkshop.errors.UserError: no image"),
            "no image",
        ),
        (RuntimeError(f"Caught\nTraceback\nRuntimeError: {FULL}\n"), "/dev/shm is full: take fewer --num_workers"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "does not fit into the memory"),
        (
            OSError(errno.ENOSPC, "No space left on device", "checkpoint.tmp"),
            "checkpoint.tmp: No space left on device; free",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory; take fewer --num_workers"),
        (MemoryError(), "no memory is left; take fewer --num_workers"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "does not fit into the memory of this GPU"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "does not fit into the memory of this GPU",
        ),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            "error: Cuda failure 2 'out of memory'; the model or the batch does not fit into the memory of this GPU",
        ),
        (
            torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nSearch for"),
            "for execution on the device; this PyTorch was not compiled for this GPU",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_user_can_change_is_one_line(error: BaseException, message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_reporting_user_errors(Raising(error))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), OSError(errno.ENOENT, "No such file")])
def test_no_other_error_is_hidden(error: Exception) -> None:
    with pytest.raises(type(error)) as found:
        run_reporting_user_errors(Raising(error))
    assert found.value is error


def test_ctrl_c_is_quiet(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="130"):
        run_reporting_user_errors(Raising(KeyboardInterrupt()))
    assert capsys.readouterr() == ("", "")


def test_a_run_ends_quietly_when_nobody_reads(user_environment: dict[str, str], tmp_path: Path) -> None:
    words = [quick_python.commands() / "python", "train.py", *FEW, "--log_interval", 1, "--run_dir", tmp_path]
    command = f"{' '.join(map(str, words))} | head -n 0; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=REPOSITORY / "01_single_gpu",
        env=user_environment | {"PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
    )
    assert (result.stdout, result.stderr) == ("1\n", "")


WORKERS = """
import os, signal, sys, torch
from workshop.errors import UserError, run_reporting_user_errors

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UserError("image 3 is damaged: prepare the data again")

run_reporting_user_errors(lambda: list(torch.utils.data.DataLoader(Samples(), num_workers=2)))
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [("killed", "a worker has died.*: take fewer --num_workers"), ("mistake", "^error: image 3 is damaged: prepare")],
)
def test_what_happens_in_a_worker_is_one_line(fault: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    words = [quick_python.commands() / "python", tmp_path / "workers.py", fault]
    result = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert re.search(message, line)


def another_clone(folder: Path, script: str) -> Callable[[LessonFlags], None]:
    """Another clone, as far as it matters, and the main function of a script of it."""
    for file in (folder / "workshop/errors.py", folder / script):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def main(config):\n    print('runs')\n")
    return load_script((folder / script).parent).main


def test_a_script_of_one_clone_with_the_package_of_another_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = another_clone(tmp_path, "01_single_gpu/train.py")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match="2"):
        run_with_config(main, CONFIGS["01_single_gpu"], None)
    error = capsys.readouterr().err
    assert f"got the package of another clone, {REPOSITORY}" in error and f"export PYTHONPATH={tmp_path}`" in error
    (tmp_path / "workshop/errors.py").unlink()
    run_with_config(main, CONFIGS["01_single_gpu"], None)  # copied into a folder without a package
    assert capsys.readouterr().out == "runs\n"
