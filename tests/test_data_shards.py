"""Shards run no code, and damage to them is reported in one line and repaired."""

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import sources
from conftest import Script
from data_helpers import assert_one_line
from data_helpers import prepare as prepare
from sources import generate, pack
from test_data_files import edit
from test_data_pickles import RunsCode
from workshop.config import TrainConfig
from workshop.datasets import shards
from workshop.errors import UserError
from workshop.loaders import build_loader

CPU = torch.device("cpu")


@pytest.fixture
def digits_dir(tmp_path: Path) -> Path:
    generate("mnist", tmp_path, train_samples=128, val_samples=64)
    return tmp_path


def shard(data_dir: Path) -> Path:
    return shards.shard_path(shards.folder_of("mnist", data_dir), "train", 3)


def read_all(data_dir: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(build_loader(TrainConfig(data_dir=data_dir, loader="shards", num_workers=0), "train", CPU))


def pack_adding(members: dict[str, bytes], data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = sources.write_shards

    def write_more(folder: Path, split: str, *arrays: torch.Tensor) -> None:
        write(folder, split, *arrays)
        with tarfile.open(shards.shard_path(folder, split, 0), "a") as tar:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

    monkeypatch.setattr(sources, "write_shards", write_more)
    pack("mnist", data_dir)


@pytest.mark.parametrize("member", ["00000000.pyd", "00000000.pickle", "00000000.pkl", "stray.pkl", "stray.npy"])
def test_no_member_runs_code(member: str, digits_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = pickle.dumps(RunsCode(digits_dir / "run"))
    image = io.BytesIO()
    np.save(image, np.zeros((1, 28, 28), np.uint8))
    sample = {"00000000.npy": image.getvalue(), "00000000.cls": b"0"}
    pack_adding({**sample, member: evil}, digits_dir, monkeypatch)
    batches = read_all(digits_dir)
    assert not (digits_dir / "run").exists()
    assert sum(len(targets) for _, targets in batches) == 128


def test_an_image_that_is_a_pickle_is_refused(digits_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = io.BytesIO()
    np.save(image, np.array([RunsCode(digits_dir / "run")], dtype=object))
    pack_adding({"00000000.npy": image.getvalue(), "00000000.cls": b"0"}, digits_dir, monkeypatch)
    with pytest.raises(UserError, match=r"train-000\.tar: sample 00000000 is no image with a class"):
        read_all(digits_dir)
    assert not (digits_dir / "run").exists()


def test_a_flipped_bit_is_reported_and_repaired(digits_dir: Path, run_script: Script, prepare: Callable) -> None:
    pack("mnist", digits_dir)
    whole = shard(digits_dir).read_bytes()
    edit(shard(digits_dir), 700, whole[700] ^ 1)
    result = run_script("01_single_gpu/train.py", "--loader", "shards", "--data_dir", digits_dir)
    assert result.status == 2
    assert_one_line(result.stderr)
    assert f"{shard(digits_dir)}: damaged" in result.stderr
    assert f"`python ../data/prepare.py mnist --shards --data_dir {digits_dir}`" in result.stderr
    status, stdout, _ = prepare("mnist", "--shards", "--data_dir", digits_dir)
    assert status == 0 and f"{shard(digits_dir)}: damaged" in stdout and "replacing" in stdout
    assert shard(digits_dir).read_bytes() == whole


def test_a_shard_removed_while_it_is_needed_is_reported(digits_dir: Path) -> None:
    pack("mnist", digits_dir)
    train = build_loader(TrainConfig(data_dir=digits_dir, loader="shards", num_workers=0), "train", CPU)
    shard(digits_dir).unlink()
    with pytest.raises(UserError, match=r"cannot read .*train-003\.tar: No such file or directory; to pack"):
        list(train)


@pytest.mark.parametrize("text", [None, "half a {", "[]", '"files"', {"files": []}, {"files": {"a": 1}}, {"files": 0}])
def test_shards_of_which_nothing_is_known(text: object, digits_dir: Path) -> None:
    pack("mnist", digits_dir)
    origin = shard(digits_dir).with_name("ORIGIN.json")
    before = json.loads(origin.read_text())
    os.unlink(origin) if text is None else origin.write_text(
        json.dumps(before | text) if isinstance(text, dict) else text
    )
    with pytest.raises(UserError, match=r"no shards in .*; to pack the shards run"):
        shards.check("mnist", digits_dir)


def test_shards_packed_before_there_were_checksums_are_packed_again(digits_dir: Path, prepare: Callable) -> None:
    pack("mnist", digits_dir)
    origin = shard(digits_dir).with_name("ORIGIN.json")
    before = json.loads(origin.read_text())
    origin.write_text(json.dumps({key: value for key, value in before.items() if key != "files"}))
    status, stdout, _ = prepare("mnist", "--shards", "--data_dir", digits_dir)
    assert status == 0 and "replacing" in stdout
    assert json.loads(origin.read_text()) == before
    assert len(read_all(digits_dir)) == 2
