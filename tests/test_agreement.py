"""What two ranks send each other beside gradients: how it looks in a trace, and how they read one checkpoint."""

import json
import os
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY
from ranks import start_ranks
from workshop.config import TrainConfig
from workshop.distributed.ranks import ONE_PROCESS
from workshop.errors import UserError
from workshop.run import checkpoint
from workshop.run.checkpoint import GoodCheckpoint, checksum_of, read_checkpoint, save_checkpoint
from workshop.run.progress import Progress


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("run")
    results = start_ranks(2, REPOSITORY / "tests" / "control_facts.py", folder, cwd=REPOSITORY / "tests")
    assert [result.status for result in results] == [0, 0], results[0].stderr + results[1].stderr
    return [json.loads(result.stdout) for result in results]


def test_a_trace_tells_control_messages_from_gradients(facts: list[dict]) -> None:
    for rank in facts:
        collectives, smallest = rank["trace"]
        assert collectives == {"c10d::allreduce_": 1, "c10d::allgather_": 1}
        assert smallest == [0, -1, float("inf")]


def test_each_rank_reads_the_checkpoint_that_rank_0_has_found_good(facts: list[dict]) -> None:
    for rank, loads in zip(facts, (2, 1), strict=True):  # rank 0 once more, to see that it can be read
        said, largest_message, loaded, right = rank["resumed"]
        assert (said, right) == ("", True)
        assert largest_message < 2000  # bytes; the weights are 4 MB
        assert loaded == ["mmap True"] * loads


def test_a_rank_that_cannot_read_the_checkpoint_ends_all_with_the_same_line(facts: list[dict]) -> None:
    assert facts[0]["errors"] == facts[1]["errors"]
    missing, another, unreadable = facts[0]["errors"]
    shared = "the run folder must be on storage that all nodes share; give another --run_dir"
    assert missing == f"FOLDER/checkpoint.pt on NODE is not there, but rank 0 has found it: {shared}"
    assert another == f"FOLDER/checkpoint.pt on NODE is not the file that rank 0 has found good: {shared}"
    reason = "which rank 0 has found good: Permission denied"
    assert unreadable == f"cannot read FOLDER/checkpoint.pt on NODE, {reason}"


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adadelta])
def test_what_was_resumed_does_not_lie_in_the_checkpoint_file(tmp_path: Path, optimizer: type) -> None:
    """The file may be replaced, on another node too, while training goes on; here all of it is overwritten."""

    def build() -> tuple[Progress, torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))
        config = TrainConfig(run_dir=tmp_path, resume=True)
        progress = Progress(config, torch.device("cpu"), ONE_PROCESS, tmp_path / "checkpoint.pt", lambda _: None)
        progress._size = dict
        return progress, model, optimizer(model.parameters(), lr=0.1)

    def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*model.state_dict().values(), *(value for value in states if isinstance(value, torch.Tensor))]

    progress, model, optimizer_ = build()
    progress.resume(model=model, optimizer=optimizer_)
    model(torch.randn(8, 40)).square().sum().backward()
    optimizer_.step()
    saved = [value.clone() for value in tensors(model, optimizer_)]
    progress._write()

    progress, model, optimizer_ = build()
    progress.resume(model=model, optimizer=optimizer_)
    with (tmp_path / "checkpoint.pt").open("r+b") as file:
        file.write(b"\xff" * (tmp_path / "checkpoint.pt").stat().st_size)
    resumed = tensors(model, optimizer_)
    assert len(resumed) == len(saved) > 6
    assert all(map(torch.equal, resumed, saved))


def test_a_file_system_that_maps_no_files_is_read_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "checkpoint.pt"
    save_checkpoint(file, {"weights": torch.arange(5)})
    load = torch.load

    def refuse(*what: object, **how: object) -> object:
        if how.pop("mmap", False):
            raise RuntimeError(f"unable to mmap 40 bytes from file <{file}>: No such device (19)")
        return load(*what, **how)

    monkeypatch.setattr(torch, "load", refuse)
    state = read_checkpoint(GoodCheckpoint(file, str(file), checksum_of(file)))
    assert torch.equal(state["weights"], torch.arange(5))


def test_another_file_of_the_same_name_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    save_checkpoint(file, {"weights": torch.arange(5)})
    good = GoodCheckpoint(file, str(file), checksum_of(file))
    assert torch.equal(read_checkpoint(good)["weights"], torch.arange(5))
    save_checkpoint(file, {"weights": torch.arange(1, 6)})
    with pytest.raises(UserError, match=f"on {os.uname().nodename} is not the file that rank 0 has found good"):
        read_checkpoint(good)
    previous = checkpoint.previous(file)
    assert torch.equal(read_checkpoint(GoodCheckpoint(previous, "", good.checksum))["weights"], torch.arange(5))
