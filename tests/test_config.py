"""The groups of flags: they stand side by side, and each checks its own."""

import math
from dataclasses import fields, make_dataclass
from itertools import combinations, permutations

import pytest

from workshop.config import ComputeFlags, DDPFlags, TrainConfig, VolumeFlags
from workshop.errors import UserError

GROUPS = (TrainConfig, DDPFlags, ComputeFlags, VolumeFlags)


def names(group: type) -> set[str]:
    return {field.name for field in fields(group)}


def combined(*groups: type) -> type:
    return make_dataclass("Config", [], bases=groups, frozen=True, kw_only=True)


def test_no_two_groups_have_a_flag_in_common() -> None:
    for one, other in combinations(GROUPS, 2):
        assert not names(one) & names(other)


def test_a_lesson_has_the_flags_of_its_groups_and_their_defaults() -> None:
    config = combined(*GROUPS)()
    assert names(type(config)) == set().union(*map(names, GROUPS))
    for group in GROUPS:
        assert {name: getattr(config, name) for name in names(group)} == vars(group())


@pytest.mark.parametrize("order", list(permutations((TrainConfig, DDPFlags, VolumeFlags))))
def test_every_group_checks_its_flags_wherever_it_stands(order: tuple[type, ...]) -> None:
    for flag in ("epochs", "base_batch_size", "depth"):
        with pytest.raises(UserError, match=rf"^--{flag} must be at least 1, got 0$"):
            combined(*order)(**{flag: 0})


COUNTS = {
    TrainConfig: (
        *("batch_size", "epochs", "log_interval", "save_interval", "prefetch_factor"),
        *("limit_train", "limit_val"),
    ),
    DDPFlags: ("global_batch_size", "base_batch_size"),
    VolumeFlags: ("crop_size", "train_crops", "val_crops", "width", "depth"),
}
AMOUNTS = {TrainConfig: ("lr", "benchmark_seconds"), DDPFlags: ("bucket_cap_mb",)}


@pytest.mark.parametrize(("group", "flag"), [(group, flag) for group in COUNTS for flag in COUNTS[group]])
def test_what_is_counted_is_at_least_one(group: type, flag: str) -> None:
    assert getattr(group(**{flag: 1}), flag) == 1
    for value in (0, -1):
        with pytest.raises(UserError, match=rf"^--{flag} must be at least 1, got {value}$"):
            group(**{flag: value})


@pytest.mark.parametrize(("group", "flag"), [(group, flag) for group in AMOUNTS for flag in AMOUNTS[group]])
def test_what_is_measured_is_above_zero(group: type, flag: str) -> None:
    assert getattr(group(**{flag: 1e-9}), flag) == 1e-9
    for value in (0.0, -0.5):
        with pytest.raises(UserError, match=rf"^--{flag} must be above 0, got {value}$"):
            group(**{flag: value})
    for value in (math.nan, math.inf, -math.inf, 1e39):
        with pytest.raises(UserError, match=rf"^--{flag} must be a number of at most 3\.4e\+38, got "):
            group(**{flag: value})


@pytest.mark.parametrize(
    ("group", "flags", "message"),
    [
        (TrainConfig, {"num_workers": -1}, r"--num_workers must be 0 .* or more, got -1"),
        (TrainConfig, {"seed": -1}, r"^--seed must be 0 or more, got -1$"),
        (TrainConfig, {"seed": 2**63}, r"^--seed must be a number of at most 9\.2e\+18, got 9223372036854775808$"),
        (DDPFlags, {"warmup": math.nan}, r"^--warmup must be a number of at most 3\.4e\+38, got nan$"),
        (DDPFlags, {"bucket_cap_mb": 1e30}, r"^--bucket_cap_mb is in MiB, at most a million, got 1e\+30$"),
        (DDPFlags, {"warmup": 1.0}, r"--warmup is a share of all steps, from 0 to below 1, got 1\.0"),
        (DDPFlags, {"warmup": -0.1}, r"--warmup is a share of all steps, from 0 to below 1, got -0\.1"),
        (DDPFlags, {"static_graph": True, "sync_gradients": False}, r"--static_graph true .*: --sync_gradients true"),
    ],
)
def test_what_else_a_group_refuses(group: type, flags: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        group(**flags)
