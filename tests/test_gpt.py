"""The language model and its text: sizes, causality, the same model from the meta device, samples of each rank."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from conftest import Script
from sources import collect
from workshop.datasets import text
from workshop.datasets.text import TextDataset
from workshop.errors import UserError
from workshop.models.gpt import GPT, SIZES, GPTSize, rotary_tables, rotated

SMALL = GPTSize(width=64, depth=2, head_dimension=16)


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt_tiny", 1.08e6), ("gpt2_124m", 124e6), ("gpt_1b", 1.09e9), ("gpt_7b", 6.6e9)]
)
def test_the_models_have_the_sizes_that_they_state(name: str, parameters: float) -> None:
    with torch.device("meta"):
        model = GPT(SIZES[name])
    counted = sum(weight.numel() for weight in model.parameters())
    assert counted == SIZES[name].parameters == pytest.approx(parameters, rel=0.02)
    assert SIZES[name].head_dimension in (64, 128) and SIZES[name].width % SIZES[name].head_dimension == 0


@pytest.mark.parametrize("name", SIZES)
def test_the_operations_are_those_that_pytorch_counts(name: str) -> None:
    """Attention to all tokens is counted as if it were not causal, by PyTorch on the meta device too."""
    size, tokens = SIZES[name], 128
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        scores = GPT(size)(torch.zeros(2, tokens, dtype=torch.int64))
        scores.sum().backward()
    assert counter.get_total_flops() / (2 * tokens) == pytest.approx(size.flops_per_token(tokens), rel=1e-6)


def test_no_token_sees_a_later_one() -> None:
    model = GPT(SMALL)
    tokens = torch.randint(256, (2, 32))
    later = tokens.clone()
    later[:, 20:] = torch.randint(256, (2, 12))
    assert torch.allclose(model(tokens)[:, :20], model(later)[:, :20], atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 20:], model(later)[:, 20:], atol=1e-3)


def test_products_of_rotated_vectors_depend_on_their_distance_alone() -> None:
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    tables = rotary_tables(50, 16, query.device, query.dtype)
    turned_query, turned_key = (rotated(x.expand(1, 50, 1, 16), tables)[0, :, 0] for x in (query, key))
    products = turned_query @ turned_key.T
    assert torch.allclose(products[10, 7], products[40, 37], atol=1e-4)
    assert not torch.allclose(products[10, 7], products[40, 30], atol=1e-4)


def test_weights_are_drawn_alike_after_the_meta_device() -> None:
    direct = GPT(SMALL)
    with torch.device("meta"):
        model = GPT(SMALL)
    model.to_empty(device="cpu")
    for one in (direct, model):
        torch.manual_seed(0)
        one.reset_parameters()
    assert all(map(torch.equal, direct.parameters(), model.parameters()))
    loss = F.cross_entropy(model(torch.randint(256, (4, 64))).flatten(0, 1), torch.randint(256, (4 * 64,)))
    assert loss.item() == pytest.approx(math.log(256), rel=0.01)  # it knows nothing yet


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A text of ten files, and one that is none."""
    source = tmp_path / "mine"
    source.mkdir()
    for number in range(10):
        (source / f"{number}.txt").write_text(f"This is file {number}. " * (20 + number))
    (source / "none.png").write_bytes(b"\x89PNG\x00\xff")
    collect(tmp_path / "data", source)
    return tmp_path / "data"


def test_no_file_is_in_both_splits(data_dir: Path) -> None:
    train, val = (text.tokens(data_dir, split).numpy().tobytes().decode() for split in ("train", "val"))
    numbers = [{line.partition("file ")[2][:1] for line in content.split(". ") if line} for content in (train, val)]
    assert numbers[0] and numbers[1] and not numbers[0] & numbers[1] and len(numbers[0] | numbers[1]) == 10
    assert 0.1 * (len(train) + len(val)) <= len(val) < 0.3 * (len(train) + len(val))


def test_samples_are_where_seed_epoch_and_number_say(data_dir: Path) -> None:
    first, again, other = (TextDataset(data_dir, "train", 16, seed=seed) for seed in (1, 1, 2))
    inputs, targets = first[3, 5]
    assert torch.equal(inputs[1:], targets[:-1]) and inputs.dtype == torch.int64
    assert torch.equal(again[3, 5][0], inputs)
    assert not torch.equal(first[4, 5][0], inputs) and not torch.equal(other[3, 5][0], inputs)
    val = TextDataset(data_dir, "val", 16)
    joined = torch.cat([val[1, index][0] for index in range(len(val))])
    assert (
        torch.equal(joined, text.tokens(data_dir, "val")[: len(joined)].long()) and len(val.tokens) - len(joined) < 18
    )


def test_a_run_says_bits_per_byte_and_writes_a_text(run_script: Script, data_dir: Path, tmp_path: Path) -> None:
    flags = ["--width", 64, "--depth", 2, "--data_dir", data_dir, "--run_dir", tmp_path / "run"]
    flags += ["--sequence_length", 16, "--batch_size", 2, "--limit_train", 8, "--sample", 5, "--num_workers", 0]
    result = run_script("05_fully_sharded/train.py", *flags)
    assert result.status == 0, result.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["bits_per_byte"] == pytest.approx(summary["epochs"][-1]["val_loss"] / math.log(2))
    assert 0 < summary["xz_bits_per_byte"] < 8
    assert "the model writes:\n" in result.stdout
    (epoch,) = summary["epochs"]
    assert epoch["tokens_per_second"] == pytest.approx(16 * epoch["samples_per_second"])
    assert re.search(r"tokens/s .*peak memory \d", result.stdout)


def test_a_users_mistake_is_one_line(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sequence_length 100000 needs 100001 bytes"):
        TextDataset(data_dir, "train", 100_000)
    with pytest.raises(UserError, match="has other data"):
        collect(data_dir)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has 0 file\(s\) of text"):
        collect(tmp_path / "elsewhere", tmp_path / "empty")
    with pytest.raises(UserError, match="is no folder"):
        collect(tmp_path / "elsewhere", tmp_path / "nowhere")
    assert not (tmp_path / "elsewhere" / "text").exists()
    text.file_of(data_dir, "val").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"not as long as when it was written; to prepare text move .* away and run"):
        text.check(data_dir)
