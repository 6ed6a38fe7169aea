"""The flags of each lesson: those that all lessons share, and its own; each is checked."""

import math
from dataclasses import fields

import pytest

from conftest import REPOSITORY
from lab.launching import load_script
from workshop.config import TrainConfig
from workshop.errors import UserError

LESSONS = sorted(folder.name for folder in REPOSITORY.glob("0*") if (folder / "train.py").exists())
CONFIGS = {lesson: load_script(REPOSITORY / lesson).Config for lesson in LESSONS}
DDP = ("03_ddp", "04_mixed_precision")
RANKS = (*DDP, "05_fully_sharded")
VOLUMES = RANKS[1:]
CHANGED = {"05_fully_sharded": {"model"}}
"""shared flags whose default is another one in a lesson"""
OF_VOLUMES = {"dataset": "nbody", "model": "unet3d"}


def defaults(config_class: type) -> dict[str, object]:
    config = config_class()
    return {field.name: getattr(config, field.name) for field in fields(config_class)}


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_has_the_shared_flags_and_their_defaults(lesson: str) -> None:
    assert issubclass(CONFIGS[lesson], TrainConfig)
    shared = {name: value for name, value in defaults(TrainConfig).items() if name not in CHANGED.get(lesson, set())}
    assert defaults(CONFIGS[lesson]).items() >= shared.items()


def test_lesson_05_has_the_flags_of_lesson_04_but_for_those_of_ddp_and_graphs() -> None:
    before, after = defaults(CONFIGS["04_mixed_precision"]), defaults(CONFIGS["05_fully_sharded"])
    of_ddp = {"bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "forward_sync_buffers", "sync_gradients"}
    assert before.keys() - after.keys() == of_ddp | {"channels_last", "cuda_graph"}
    assert {name for name in before.keys() & after.keys() if before[name] != after[name]} == {"model"}


@pytest.mark.parametrize(
    ("lesson", "builds_on"), [("02_dataparallel", "01_single_gpu"), ("04_mixed_precision", "03_ddp")]
)
def test_a_lesson_has_the_flags_and_defaults_of_the_one_it_builds_on(lesson: str, builds_on: str) -> None:
    assert defaults(CONFIGS[lesson]).items() >= defaults(CONFIGS[builds_on]).items()


COUNTS = {
    **dict.fromkeys(("batch_size", "epochs", "log_interval", "save_interval", "prefetch_factor"), LESSONS),
    **dict.fromkeys(("limit_train", "limit_val"), LESSONS),
    **dict.fromkeys(("global_batch_size", "base_batch_size"), RANKS),
    "accumulate": ("05_fully_sharded",),
    **dict.fromkeys(("crop_size", "train_crops", "val_crops", "unet_width", "unet_depth"), VOLUMES),
    **dict.fromkeys(("vit_patch", "vit_width", "vit_depth"), VOLUMES),
}
AMOUNTS = {
    "lr": LESSONS,
    "benchmark_seconds": LESSONS,
    "bucket_cap_mb": DDP,
    "max_grad_norm": ("05_fully_sharded",),
}


def cases(flags: dict) -> list[tuple[str, str]]:
    return [(lesson, flag) for flag, lessons in flags.items() for lesson in lessons]


@pytest.mark.parametrize(("lesson", "flag"), cases(COUNTS))
def test_what_is_counted_is_at_least_one(lesson: str, flag: str) -> None:
    others = OF_VOLUMES if COUNTS[flag] is VOLUMES else {}
    least = 2 if flag == "crop_size" else 1  # a volume of one cell cannot be halved
    depth = {"unet_depth": 1} if flag == "crop_size" else {}
    assert getattr(CONFIGS[lesson](**others, **depth, **{flag: least}), flag) == least
    for value in (0, -1):
        with pytest.raises(UserError, match=rf"^--{flag} must be at least 1, got {value}$"):
            CONFIGS[lesson](**others, **{flag: value})


@pytest.mark.parametrize(("lesson", "flag"), cases(AMOUNTS))
def test_what_is_measured_is_above_zero(lesson: str, flag: str) -> None:
    config = CONFIGS[lesson]
    assert getattr(config(**{flag: 1e-9}), flag) == 1e-9
    for value in (0.0, -0.5):
        with pytest.raises(UserError, match=rf"^--{flag} must be above 0, got {value}$"):
            config(**{flag: value})
    for value in (math.nan, math.inf, -math.inf, 1e39):
        with pytest.raises(UserError, match=rf"^--{flag} must be a number of at most 3\.4e\+38, got "):
            config(**{flag: value})


@pytest.mark.parametrize(
    ("lessons", "flags", "message"),
    [
        (LESSONS, {"num_workers": -1}, r"--num_workers must be 0 .* or more, got -1"),
        (LESSONS, {"seed": -1}, r"^--seed must be 0 or more, got -1$"),
        (LESSONS, {"seed": 2**63}, r"^--seed must be a number of at most 9\.2e\+18, got 9223372036854775808$"),
        (RANKS, {"warmup": math.nan}, r"^--warmup must be a number of at most 3\.4e\+38, got nan$"),
        (DDP, {"bucket_cap_mb": 1e30}, r"^--bucket_cap_mb is in MiB, at most a million, got 1e\+30$"),
        (RANKS, {"warmup": 1.0}, r"--warmup is a share of all steps, from 0 to below 1, got 1\.0"),
        (RANKS, {"warmup": -0.1}, r"--warmup is a share of all steps, from 0 to below 1, got -0\.1"),
        (DDP, {"static_graph": True, "sync_gradients": False}, r"--static_graph true .*: it needs --sync_gradients"),
    ],
)
def test_what_else_is_refused(lessons: tuple[str, ...], flags: dict, message: str) -> None:
    for lesson in lessons:
        with pytest.raises(UserError, match=message):
            CONFIGS[lesson](**flags)
