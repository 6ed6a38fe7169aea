"""Lesson 05: whatever is sharded, recomputed or split, any number of ranks learns what one plain process learns.

What its runs survive is in test_survive*.py.
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
from workshop.checks import check_parts
from workshop.errors import UserError

FOLDER = REPOSITORY / "05_fully_sharded"
LESSON = load_script(FOLDER)
ROUNDING = 1e-5
"""relative difference of losses that come from the same sums in another order"""
SIXTEEN_BITS = 3e-3
"""the same where products are computed in 16 bits"""
OF_ALL_RANKS = ("language", "language, all at once", "blocks", "keep", "root", "recomputed", "accumulate", "clipped")
VARIANTS = (*OF_ALL_RANKS, "fused", "all at once", "bf16", "fp16, clipped", "volumes", "unet3d", "cnn")


@pytest.fixture(scope="module", params=[2, *[pytest.param(n, marks=pytest.mark.thorough) for n in (1, 4)]])
def facts(request: pytest.FixtureRequest) -> dict:
    """What so many ranks find with each set of options, and one process without them; see sharded_facts.py."""
    variants = VARIANTS if request.param == 2 else OF_ALL_RANKS
    script = REPOSITORY / "tests" / "sharded_facts.py"
    results = start_ranks(request.param, script, *variants, cwd=REPOSITORY)
    assert {result.status for result in results} == {0}, results[0].stderr
    assert all(result.stdout == "" for result in results[1:])
    return json.loads(results[0].stdout) | {"ranks": request.param}


def test_every_number_of_ranks_learns_what_one_plain_process_does(facts: dict) -> None:
    variants = facts.keys() - {"ranks", "DDP"}
    assert variants == set(VARIANTS if facts["ranks"] == 2 else OF_ALL_RANKS)
    for name in variants:
        sharded, plain = facts[name]["sharded"], facts[name]["plain"]
        assert len(sharded["losses"]) == 4 + 1, "of the steps, and of the validation samples"
        tolerance = SIXTEEN_BITS if "16" in name else ROUNDING
        assert sharded["losses"] == pytest.approx(plain["losses"], rel=tolerance), name
        # Of a weight with fewer rows than ranks, the first ranks store more than their share.
        assert plain["stored"] / facts["ranks"] <= sharded["stored"] < 1.15 * plain["stored"] / facts["ranks"], name
    assert facts["blocks"]["sharded"]["losses"] != facts["clipped"]["sharded"]["losses"]


def test_validation_counts_every_sample_once(facts: dict) -> None:
    """Of 61 samples, some ranks have a batch less than others."""
    for name in OF_ALL_RANKS:
        sharded, plain = facts[name]["sharded"], facts[name]["plain"]
        assert sharded["accuracy"] == pytest.approx(plain["accuracy"], abs=0.5 / 61), name


def test_the_losses_are_those_of_ddp(facts: dict) -> None:
    for way in ("blocks", "keep", "root"):
        assert facts[way]["sharded"]["losses"][:-1] == pytest.approx(facts["DDP"], rel=ROUNDING)


def test_options_reach_the_step(facts: dict) -> None:
    if facts["ranks"] == 2:
        assert facts["bf16"]["sharded"]["losses"] != facts["blocks"]["sharded"]["losses"]


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "05_fully_sharded/train.py")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "mnist_cnn"], "--model mnist_cnn has no nn.ModuleList of blocks: use --model vit"),
        (["--accumulate", 65], "--accumulate 65: a batch of 64 per rank has fewer samples than parts"),
        (["--accumulate", 4, "--limit_train", 131], "less than a sample for each part"),
        (["--max_grad_norm", 0.0], "max_grad_norm"),
        (["--vit_patch", 5], "--vit_patch 5 does not divide 28, the edge of the samples; 4 does"),
        (["--fused", "true", "--optimizer", "adadelta"], "PyTorch has no fused adadelta"),
        (["--fused", "true", "--optimizer", "sgd"], "PyTorch's fused SGD takes no sharded weights"),
        (["--precision", "tf32"], "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(train: Script, flags: list, message: str) -> None:
    assert message in train("--limit_val", 32, *flags).error


def test_every_rank_needs_a_sample_for_each_part() -> None:
    flags = LESSON.Config(accumulate=4, batch_size=32)
    check_parts(flags, num_train=64 + 8, num_val=2, world_size=2)
    check_parts(flags, num_train=64 + 1, num_val=2, world_size=2)  # one for two ranks is left out
    with pytest.raises(UserError, match="use --limit_train 64"):
        check_parts(flags, num_train=64 + 7, num_val=2, world_size=2)
    with pytest.raises(UserError, match="each rank needs at least one"):
        check_parts(flags, num_train=64, num_val=1, world_size=2)


def test_a_mistake_of_all_ranks_is_one_line_each(user_environment: dict[str, str]) -> None:
    results = start_ranks(2, "train.py", "--limit_val", 1, cwd=FOLDER, environment=user_environment)
    assert [result.status for result in results] == [2, 2]
    (line,) = {line for result in results for line in result.stderr.splitlines()}
    assert re.match(r"error: 1 validation sample\(s\) for 2 ranks: each rank needs at least one", line)


def test_two_ranks_save_parts_of_which_one_process_makes_a_file(
    user_environment: dict[str, str], tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    flags = ["--limit_train", 128, "--limit_val", 32, "--vit_width", 16, "--num_workers", 0, "--run_dir", tmp_path]
    results = start_ranks(2, "train.py", *flags, cwd=FOLDER, environment=user_environment)
    assert [result.status for result in results] == [0, 0], results[0].stderr
    (folder,) = (tmp_path / "checkpoints").iterdir()
    dcp_to_torch_save(folder, tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=False)["model"]
    model = LESSON.make_model(LESSON.Config(vit_width=16))
    assert model.load_state_dict(weights)
