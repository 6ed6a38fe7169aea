"""Lesson 05: whatever is sharded, recomputed or split, any number of ranks learns what one plain process learns.

What its runs survive is in test_survive*.py.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conftest import REPOSITORY, Script
from lab.launching import load_script
from ranks import start_ranks
from same_losses import NO_FORMATS, SMALL, WAYS
from workshop.errors import UserError
from workshop.models import gpt
from workshop.ranks import Ranks

FOLDER = REPOSITORY / "05_fully_sharded"
LESSON = load_script(FOLDER)
ROUNDING = 1e-6
"""relative difference of losses that come from the same sums in another order"""
SIXTEEN_BITS = 2e-4
"""the same where products are computed in 16 bits"""
TINY = ["--width", 64, "--depth", 2, "--sequence_length", 16]
Rows = dict[str, list[float]]


@pytest.fixture(scope="module", params=[2, *[pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3, 4)]])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Rows]:
    """A number of ranks, and what they find in each way of training: two losses, two differences, the share stored."""
    file = tmp_path_factory.mktemp("losses") / "rows.json"
    script = FOLDER / "experiments" / "same_losses.py"
    results = start_ranks(request.param, script, "--write", file, cwd=FOLDER)
    assert {result.status for result in results} == {0}, "\n".join(result.stderr for result in results if result.status)
    return request.param, json.loads(file.read_text())


def test_every_way_learns_what_one_plain_process_does(rows: tuple[int, Rows]) -> None:
    ranks, found = rows
    assert found.keys() == {"DDP", *(name for name, flags in WAYS.items() if ranks % flags.get("replicas", 1) == 0)}
    for name, (_, _, losses, weights, _) in found.items():
        sixteen_bits = "16" in name
        assert losses < (SIXTEEN_BITS if sixteen_bits else ROUNDING), name
        assert weights < 0.05 or "bf16" in name, (name, "of the learning rate, by which AdamW moves a weight in a step")
    if ranks > 1:
        assert found["`--precision bf16`"][2] > 10 * found["`--shard blocks`"][2], "the option reaches the step"


def test_each_rank_stores_its_part(rows: tuple[int, Rows]) -> None:
    ranks, found = rows
    for name, (*_, stored) in found.items():
        whole = WAYS.get(name, {"shard": "none"}).get("shard") == "none"
        parts = 1 if whole else ranks // WAYS[name].get("replicas", 1)
        assert 1 / parts <= stored < 1.05 / parts, name  # of a weight with odd rows, the first ranks store more


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.13")
def test_a_loss_that_is_computed_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "TOKENS_AT_ONCE", 16)
    model = gpt.GPT(gpt.GPTSize(width=64, depth=1, vocabulary=300, head_dimension=16))
    inputs, targets = torch.randint(300, (2, 2, 20))
    targets[1, 5:] = LESSON.IGNORED
    losses, grads = [], []
    for loss in (LESSON.sum_of_losses(model(inputs), targets), model(inputs, targets)):
        model.zero_grad()
        (loss / 7).backward()
        losses.append(loss.item())
        grads.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)


def test_blocks_of_other_models_are_recomputed_too() -> None:
    """PyTorch's own encoder calls its layers with keywords."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), 2)
    inputs, grads = torch.rand(2, 3, 8), []
    for _ in range(2):
        encoder.zero_grad()
        encoder(inputs, src_key_padding_mask=torch.zeros(2, 3)).sum().backward()
        grads.append(torch.cat([weight.grad.flatten() for weight in encoder.parameters()]))
        for layer in encoder.layers:
            layer.forward = LESSON.recomputed(layer.forward)
    assert torch.equal(*grads)


def test_buffers_that_nothing_would_fill_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("positions", torch.arange(2.0), persistent=False)
    monkeypatch.setattr(LESSON, "make_model", lambda _: model)
    with pytest.raises(UserError, match=r"fill the buffers \['positions'\] after to_empty"):
        LESSON.shard_model(LESSON.Config(), Ranks(device=torch.device("cpu")))


def test_padded_sequences_on_two_ranks_train_as_on_one(tmp_path: Path) -> None:
    """The loss is the mean over the tokens of the whole update, whichever part or rank has how many of them."""
    results = start_ranks(2, REPOSITORY / "tests/token_facts.py", tmp_path / "found.json", cwd=REPOSITORY / "tests")
    assert {result.status for result in results} == {0}, "\n".join(result.stderr for result in results if result.status)
    for name, (loss, weights) in json.loads((tmp_path / "found.json").read_text()).items():
        assert loss < 3e-6 and weights < 1e-6, name


def test_the_ways_cover_the_flags_that_change_how_a_step_is_computed() -> None:
    tried = {flag for flags in WAYS.values() for flag in flags}
    assert tried == {
        *(
            "shard",
            "replicas",
            "accumulate",
            "reduce_each_part",
            "activation_checkpointing",
            "fused",
            "precision",
            "optimizer",
        ),
        "max_grad_norm",
    }
    assert NO_FORMATS.keys() | SMALL.keys() <= {field for field in vars(LESSON.Config())}


@pytest.fixture
def train(run_script: Script) -> Script:
    return partial(run_script, "05_fully_sharded/train.py")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accumulate", 17], "--accumulate 17: a batch of 16 per rank has fewer samples than parts"),
        (["--accumulate", 4, "--limit_train", 35], "less than a sample for each part"),
        (["--max_grad_norm", 0.0], "max_grad_norm"),
        (["--reduce_each_part", "true"], "needs --accumulate 2 or more"),
        (["--width", 100], "--width 100 is no multiple of the head dimension 64; 128 is"),
        (["--replicas", 2], "--replicas 2 does not divide the 1 rank(s) of this job"),
        (["--sequence_length", 10_000_000], "--sequence_length 10000000 needs 10000001 bytes"),
        (["--model", "gpt_huge"], "gpt_huge"),
        (["--sample", -1], "--sample must be 0 (none) or more, got -1"),
        (["--fused", "true", "--optimizer", "sgd"], "PyTorch's fused SGD takes no sharded weights"),
        (["--precision", "tf32"], "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or newer"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(train: Script, flags: list, message: str, tmp_path: Path) -> None:
    assert message in train("--limit_val", 32, *TINY, "--run_dir", tmp_path / "run", *flags).error
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_damaged_or_missing_text_is_one_line(train: Script, tmp_path: Path) -> None:
    assert "to prepare text run `" in train(*TINY, "--data_dir", tmp_path).error


def test_every_rank_needs_a_sample_for_each_part() -> None:
    flags = LESSON.Config(accumulate=4, batch_size=32)
    check = partial(LESSON.check_parts, flags, Ranks(device=torch.device("cpu"), world_size=2))
    check(num_train=64 + 8, num_val=2)
    check(num_train=64 + 1, num_val=2)  # one for two ranks is left out
    with pytest.raises(UserError, match="use --limit_train 64"):
        check(num_train=64 + 7, num_val=2)
    with pytest.raises(UserError, match="each rank needs at least one"):
        check(num_train=64, num_val=1)


def test_a_mistake_of_all_ranks_is_one_line_each(user_environment: dict[str, str]) -> None:
    results = start_ranks(2, "train.py", "--limit_val", 1, cwd=FOLDER, environment=user_environment)
    for rank, result in enumerate(results):
        if result.status == 1:  # this rank was slower, and lost the other one before it found the mistake itself
            continue
        whose = "rank 1: " if rank else ""
        message = rf"error: {whose}1 validation sample\(s\) for 2 ranks: each rank needs at least one.*\n"
        assert result.status == 2 and re.fullmatch(message, result.stderr), result.stderr
    assert 2 in {result.status for result in results}


def test_two_ranks_save_parts_of_which_one_process_makes_a_file(
    user_environment: dict[str, str], tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    flags = [*TINY, "--limit_train", 128, "--limit_val", 32, "--num_workers", 0, "--run_dir", tmp_path]
    results = start_ranks(2, "train.py", *flags, cwd=FOLDER, environment=user_environment)
    assert [result.status for result in results] == [0, 0], results[0].stderr
    (folder,) = (tmp_path / "checkpoints").iterdir()
    dcp_to_torch_save(folder, tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=False)["model"]
    model = LESSON.make_model(LESSON.Config(width=64, depth=2))
    assert model.load_state_dict(weights)
