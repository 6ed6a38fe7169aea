"""Run by test_control_group.py as two ranks: each prints, as JSON, its findings on control messages and resuming."""

import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from workshop.config import TrainConfig
from workshop.distributed import failure_detector, rendezvous
from workshop.errors import UserError
from workshop.run import checkpoint
from workshop.run.control_group import ControlGroup
from workshop.run.position import Position

MEGABYTE = 2**20
CPU = torch.device("cpu")


def collectives_of_a_step(control: ControlGroup, rank: int) -> tuple[dict[str, int], list[float]]:
    """What a trace shows of one all-reduce of gradients and one control message; and the result of the message."""
    gradients = torch.ones(3)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(gradients)
        smallest = control.minimum([rank, -rank, float("inf")])
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d")}, smallest


def position_in(folder: Path, rank: int, **flags: bool) -> Position:
    config = TrainConfig(run_dir=folder, **flags)
    return Position(config, CPU, rank, 2, folder / "checkpoint.pt", lambda _: None)


def state_of(model: torch.nn.Module) -> dict:
    return {"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters()).state_dict()}


def resumed(rank: int, folder: Path) -> tuple[str, int, list[str], bool]:
    """The error of resuming; the largest message in bytes; how files were read; whether the weights are right."""
    messages, loads = [0], []
    model = torch.nn.Linear(MEGABYTE, 1)
    position = position_in(folder, rank, resume=True)
    broadcast, gather, load = dist.broadcast_object_list, dist.all_gather_object, torch.load

    def spied_broadcast(values: list, **how: object) -> None:
        broadcast(values, **how)
        messages.append(len(pickle.dumps(values)))

    def spied_gather(values: list, value: object, **how: object) -> None:
        messages.append(len(pickle.dumps(value)))
        gather(values, value, **how)

    def spied_load(*what: object, **how: object) -> object:
        loads.append(f"mmap {how.get('mmap')}")
        return load(*what, **how)

    mistake = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast_object_list", spied_broadcast)
        patch.setattr(dist, "all_gather_object", spied_gather)
        patch.setattr(torch, "load", spied_load)
        try:
            model.load_state_dict(position.load(matching=state_of(model))["model"])
        except UserError as error:
            mistake = str(error)
    return mistake, max(messages), loads, bool((model.weight == 3).all())


def save(rank: int, folder: Path) -> None:
    """Write a checkpoint with 4 MB of weights."""
    position = position_in(folder, rank)
    model = torch.nn.Linear(MEGABYTE, 1)
    torch.nn.init.constant_(model.weight, 3.0)
    position.loader = torch.utils.data.DataLoader(range(8))
    position.save(state_of(model), None)


def facts(control: ControlGroup, rank: int, folder: Path) -> dict:
    found = {"trace": collectives_of_a_step(control, rank), "errors": []}
    save(rank, folder)
    found["resumed"] = resumed(rank, folder)
    for problem in ("missing", "another", "unreadable"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and problem == "another":
                patch.setattr(checkpoint, "checksum_of", lambda _: 1)
            elif rank == 1:
                error = FileNotFoundError() if problem == "missing" else PermissionError(13, "Permission denied")

                def fail(_: Path, error: OSError = error) -> int:
                    raise error

                patch.setattr(checkpoint, "checksum_of", fail)
            mistake, *_ = resumed(rank, folder)
        found["errors"].append(mistake.replace(os.uname().nodename, "NODE").replace(str(folder), "FOLDER"))
    return found


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    store = rendezvous(rank, 2, CPU)
    with failure_detector(store, rank, 2):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        print(json.dumps(facts(ControlGroup(rank, 2), rank, Path(sys.argv[1]))))
        dist.destroy_process_group()
