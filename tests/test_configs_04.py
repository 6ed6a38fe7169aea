"""The named configurations of the U-Net are those of NERSC's tutorial, and the page's job lines start them."""

import math
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from conftest import REPOSITORY
from lab.launching import load_script
from workshop.config import load_config

FOLDER = REPOSITORY / "04_mixed_precision"
CONFIGS = REPOSITORY / "configs"
PAGE = (FOLDER / "experiments" / "unet3d.md").read_text()
LESSON = load_script(FOLDER)


class Named(NamedTuple):
    """What NERSC/sc22-dl-tutorial has in config/UNet.yaml."""

    gpus: int
    crops: int
    epochs: int
    batch: int
    steps: int
    highest_lr: float


NAMED = {
    "short": Named(1, 4096, 4, 64, 256, 2e-4),
    "base": Named(1, 65536, 10, 64, 10240, 2e-4),
    "bs64_opt": Named(1, 65536, 10, 64, 10240, 2e-4),
    "bs256_opt": Named(4, 65536, 20, 256, 5120, 4e-4),
    "bs512_test": Named(8, 65536, 10, 512, 1280, 2e-4 * math.sqrt(8)),
    "bs512_opt": Named(8, 65536, 40, 512, 5120, 2e-4 * math.sqrt(8)),
    "bs2048_opt": Named(32, 65536, 160, 2048, 5120, 2e-4 * math.sqrt(32)),
}


@pytest.fixture(scope="module")
def jobs() -> dict[str, tuple[dict[str, str], list[str]]]:
    """Options of sbatch and flags of train.py of each job line of the page, by the name in the comment above it."""
    block = PAGE[PAGE.index('base="--config') : PAGE.index("```", PAGE.index('base="--config'))]
    shell = "sbatch() { printf '%s\\n' \"$*\"; }\n" + block.replace("\n# ", "\necho NAME ")
    lines = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for name, line in zip(lines[::2], lines[1::2], strict=True):
        options, _, flags = line.partition(" job.slurm ")
        words = shlex.split(options.replace("=", " "))
        found[name.removeprefix("NAME ")] = (dict(zip(words[::2], words[1::2], strict=True)), shlex.split(flags))
    return found


@pytest.mark.parametrize("name", NAMED)
def test_a_named_configuration_is_that_of_the_tutorial(name: str, jobs: dict[str, Any]) -> None:
    options, flags = jobs[name]
    wanted = NAMED[name]
    ranks = int(options["-N"]) * int(options["--ntasks-per-node"])
    assert ranks == wanted.gpus and options["--gres"] == f"gpu:{options['--ntasks-per-node']}" and "-t" in options
    config = load_config(LESSON.Config, [word.replace("../configs", str(CONFIGS)) for word in flags])
    assert (config.train_crops, config.epochs, config.global_batch_size) == wanted[1:4]
    assert config.precision == ("bf16" if name.startswith("bs") else "fp32")
    assert LESSON.batch_size_per_rank(config, ranks) * ranks == wanted.batch
    steps = config.epochs * (config.train_crops // wanted.batch)
    factors = [
        LESSON.lr_factor(config, global_batch_size=wanted.batch, step=step, total_steps=steps) for step in range(steps)
    ]
    assert steps == wanted.steps
    assert config.lr * max(factors) == pytest.approx(wanted.highest_lr, rel=1e-3)
    assert factors.index(max(factors)) + 1 == pytest.approx(12 if name == "short" else 128, abs=1)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} "))
    assert [cell.strip() for cell in row.split("|")[2:7]] == [
        f"{options['-N']} x {options['--ntasks-per-node']}",
        *(f"{number:,}" for number in (wanted.batch, wanted.epochs, wanted.steps)),
        f"{wanted.highest_lr:.2g}",
    ]


def test_all_files_of_the_unet_are_named_on_its_page() -> None:
    assert [file.name for file in CONFIGS.glob("unet3d*.yaml") if f"configs/{file.name}" not in PAGE] == []


def test_a_batch_size_changes_the_schedule_alone() -> None:
    for file in CONFIGS.glob("unet3d_bs*.yaml"):
        assert yaml.safe_load(file.read_text()).keys() <= {"global_batch_size", "epochs", "warmup"}


@pytest.mark.parametrize("files", [["unet3d"], ["unet3d", "unet3d_tiny"]])
def test_a_configuration_builds_its_model(files: list[str]) -> None:
    words = [word for file in files for word in ("--config", str(CONFIGS / f"{file}.yaml"))]
    config = load_config(LESSON.Config, words)
    with torch.device("meta"):
        outputs = LESSON.make_model(config)(torch.empty(2, 4, *[config.crop_size] * 3))
    assert outputs.shape == (2, 5, *[config.crop_size] * 3)


def test_the_fast_configuration_has_whole_batches_and_the_precision_of_the_device() -> None:
    files = [str(CONFIGS / name) for name in ("mnist.yaml", "mnist_fast.yaml")]
    config = load_config(LESSON.Config, ["--config", files[0], "--config", files[1]])
    assert config.precision == "auto" and config.limit_train % config.batch_size == 0
    assert Path(files[1]).name in (FOLDER / "README.md").read_text()
