"""Lesson 05: whatever is sharded, recomputed or split, two ranks learn what one process without all that learns.

That its losses are also those of lesson 04's script, is in test_same_losses_05.py.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY, Script
from lab.launching import load_script
from ranks import start_ranks
from workshop.errors import UserError

pytestmark = pytest.mark.slow

FOLDER = REPOSITORY / "05_fully_sharded"
LESSON = load_script(FOLDER)
CPU = torch.device("cpu")
ROUNDING = 1e-5
"""relative difference of losses that come from the same sums in another order"""
SIXTEEN_BITS = 3e-3
"""the same where products are computed in 16 bits"""
VARIANTS = {
    "vit": ROUNDING,
    "keep": ROUNDING,
    "root": ROUNDING,
    "checkpointing": ROUNDING,
    "accumulate": ROUNDING,
    "fused": ROUNDING,
    "all at once": ROUNDING,
    "bf16": SIXTEEN_BITS,
    "fp16": SIXTEEN_BITS,
    "sgd": ROUNDING,
    "clipped": ROUNDING,
    "fp16, clipped": SIXTEEN_BITS,
    "volumes": ROUNDING,
    "unet3d": ROUNDING,
    "cnn": ROUNDING,
}


@pytest.fixture(scope="module")
def facts() -> dict:
    """What two ranks find with each set of options, and one process without them; see sharded_facts.py."""
    results = start_ranks(2, REPOSITORY / "tests" / "sharded_facts.py", FOLDER, cwd=REPOSITORY)
    assert [result.status for result in results] == [0, 0], results[0].stderr
    assert results[1].stdout == ""
    return json.loads(results[0].stdout)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_learn_what_one_plain_process_does(facts: dict, variant: str) -> None:
    sharded, plain = facts[variant]["sharded"], facts[variant]["plain"]
    assert len(sharded["losses"]) == 4 + 1  # of the steps, and of 61 samples, of which rank 1 has a batch less
    assert sharded["losses"] == pytest.approx(plain["losses"], rel=VARIANTS[variant])
    assert plain["stored"] / 2 <= sharded["stored"] < 0.52 * plain["stored"]  # the first rank has the larger halves


def test_every_variant_was_looked_at_and_options_reach_the_step(facts: dict) -> None:
    assert facts.keys() == VARIANTS.keys()
    losses = {name: found["sharded"]["losses"] for name, found in facts.items()}
    for name in ("bf16", "fp16", "sgd"):
        assert losses[name] != losses["vit"]
    assert losses["clipped"] != losses["sgd"]


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "05_fully_sharded/train.py")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cuda_graph", "true"], "unknown flag --cuda_graph; it is a flag of 04_mixed_precision, not of this script"),
        (["--model", "mnist_cnn"], "--model mnist_cnn has no blocks"),
        (
            ["--model", "mnist_cnn", "--shard", "root", "--activation_checkpointing", "true"],
            "nothing would be computed again; use --model vit",
        ),
        (["--accumulate", 65], "--accumulate 65 divides a batch of 64 per rank into more parts than it has samples"),
        (["--accumulate", 2, "--loader", "shards"], "on some ranks an epoch may end with a batch of fewer samples"),
        (["--accumulate", 4, "--limit_train", 131], "a last batch of 3, which is less than one sample for each part"),
        (["--shard", "all"], "--shard takes one of 'blocks', 'keep', 'root', got 'all'"),
        (["--max_grad_norm", 0.0], "--max_grad_norm must be above 0, got 0.0"),
        (["--vit_patch", 5], "--vit_patch 5 does not divide 28, the edge of the samples; 4 does"),
        (["--vit_width", 30], "--vit_width 30 is not a multiple of 4"),
        (["--fused", "true", "--optimizer", "adadelta"], "PyTorch has no fused adadelta"),
        (["--fused", "true", "--optimizer", "sgd"], "PyTorch's fused SGD does not accept sharded weights"),
        (["--precision", "tf32"], "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer"),
        (["--cudnn_benchmark", "true"], "--cudnn_benchmark true needs an NVIDIA GPU; this is the CPU"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(train: Script, flags: list, message: str) -> None:
    result = train("--limit_val", 32, *flags)
    assert result.status == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_every_rank_needs_a_sample_for_each_part() -> None:
    check = LESSON.check_parts
    check(accumulate=4, num_samples=64 + 8, global_batch_size=64, world_size=2)
    check(accumulate=4, num_samples=64 + 1, global_batch_size=64, world_size=2)  # one for two ranks is left out
    with pytest.raises(UserError, match=r"a last batch of 7, .* on each of 2 rank\(s\); use --limit_train 64$"):
        check(accumulate=4, num_samples=64 + 7, global_batch_size=64, world_size=2)
    with pytest.raises(UserError, match=r"divides a batch of 3 per rank into more parts"):
        check(accumulate=4, num_samples=64, global_batch_size=6, world_size=2)


def test_a_rank_without_a_validation_sample_is_one_line_for_all(user_environment: dict[str, str]) -> None:
    results = start_ranks(2, "train.py", "--limit_val", 1, cwd=FOLDER, environment=user_environment)
    assert [result.status for result in results] == [2, 2]
    (line,) = {line for result in results for line in result.stderr.splitlines()}
    assert re.match(r"error: 1 validation sample\(s\) for 2 ranks: .*; use at least 2, or fewer ranks$", line)


def test_a_resumed_run_takes_fused_from_its_own_flags(train: Script, tmp_path: Path) -> None:
    flags = ["--limit_train", 64, "--limit_val", 32, "--run_dir", tmp_path]
    for more, expected in (["--fused", "true"], True), (["--epochs", 2, "--resume", "true"], None):
        result = train(*flags, *more)
        assert result.status == 0, result.stderr
        saved = torch.load(tmp_path / "checkpoint.pt")
        assert [group["fused"] for group in saved["optimizer"]["param_groups"]] == [expected]
