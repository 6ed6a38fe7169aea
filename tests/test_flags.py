"""Every flag of every lesson is used by its script, or refused; none is accepted and ignored."""

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from conftest import REPOSITORY, Script
from lab.launching import load_script
from workshop.config import Flags, load_config
from workshop.errors import UserError

CONFIGS = {file.parent.name: load_script(file.parent).Config for file in sorted(REPOSITORY.glob("0*/train.py"))}
BENCHMARK = ["--benchmark", "true", "--benchmark_seconds", 0.01]
IMAGES = ["--limit_train", 64, "--limit_val", 16, "--batch_size", 16]
VOLUMES = ["--dataset", "nbody", "--model", "unet3d", "--loader", "memory", "--train_crops", 4, "--val_crops", 2]
VOLUMES += ["--crop_size", 16, "--unet_width", 8, "--unet_depth", 2, "--batch_size", 2]
TEXTS = ["--width", 64, "--depth", 2, "--sequence_length", 16, "--limit_train", 64, "--limit_val", 16]
RUNS: dict[str, list[list]] = {
    "01_single_gpu": [IMAGES, [*IMAGES, *BENCHMARK]],
    "02_dataparallel": [IMAGES, [*IMAGES, *BENCHMARK]],
    "03_ddp": [IMAGES, [*IMAGES, *BENCHMARK]],
    "04_mixed_precision": [IMAGES, [*IMAGES, *BENCHMARK], VOLUMES],
    "05_fully_sharded": [TEXTS, [*TEXTS, *BENCHMARK], [*TEXTS, "--sample", 1]],
}
"""flags of the runs of each lesson, which together use all of them"""
NO_USE = {"config.py", "dataclasses.py", "copy.py"}
"""files that read all flags: to check, to store or to copy them"""
CHECKS = {"__post_init__", "without_effect"}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of the flags that a script, or the package on its behalf, has read."""
    names = {field.name for config in CONFIGS.values() for field in fields(config)}
    found: set[str] = set()

    def read(self: Flags, name: str) -> Any:  # noqa: ANN401
        if name in names:
            code = sys._getframe(1).f_code
            if Path(code.co_filename).name not in NO_USE and code.co_name not in CHECKS:
                found.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Flags, "__getattribute__", read)
    yield found


def choices(config: type, name: str) -> tuple:
    """The values that a flag can have, if there is a list of them."""
    kind = get_type_hints(config)[name]
    return get_args(kind) if get_origin(kind) is not None and str(kind).startswith("typing.Literal") else ()


@pytest.mark.slow
@pytest.mark.parametrize("lesson", CONFIGS)
def test_every_flag_of_a_lesson_is_used(lesson: str, used: set[str], run_script: Script, tmp_path: Path) -> None:
    for number, flags in enumerate(RUNS[lesson]):
        workers = int(number == 0)
        result = run_script(f"{lesson}/train.py", *flags, "--num_workers", workers, "--run_dir", tmp_path / str(number))
        assert result.status == 0, result.stderr
    config = CONFIGS[lesson]
    unused = {field.name for field in fields(config)} - used
    assert {name for name in unused if len(choices(config, name)) != 1} == set(), "accepted and ignored"


@pytest.mark.parametrize(
    ("lesson", "flags", "error"),
    [
        ("05_fully_sharded", ["--dropout", "false"], "unrecognized arguments: --dropout"),
        ("05_fully_sharded", ["--forward_sync_buffers", "false"], "unrecognized arguments: --forward_sync_buffers"),
        ("04_mixed_precision", ["--crop_size", "64"], "--crop_size 64 needs --dataset nbody, not mnist"),
        (
            "04_mixed_precision",
            ["--dataset", "nbody", "--model", "unet3d", "--dropout", "true"],
            "--dropout True needs a model that has dropout: unet3d has none",
        ),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused_also_with_its_default(
    lesson: str, flags: list[str], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        load_config(CONFIGS[lesson], flags)
