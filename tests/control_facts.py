"""Run by test_agreement.py as two ranks: each prints, as JSON, what it found about control messages and resuming."""

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
from workshop.distributed.agreement import Agreement
from workshop.distributed.process_group import process_group
from workshop.distributed.ranks import Ranks
from workshop.errors import UserError
from workshop.run import checkpoint
from workshop.run.progress import Progress

MEGABYTE = 2**20


def collectives_of_a_step(agreement: Agreement, rank: int) -> tuple[dict[str, int], list[float]]:
    """What a trace shows of one all-reduce of gradients and one control message; and what the message said."""
    gradients = torch.ones(3)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(gradients)
        smallest = agreement.minimum([rank, -rank, float("inf")])
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d")}, smallest


def resumed(ranks: Ranks, folder: Path) -> tuple[str, int, list[str], bool]:
    """What resuming said; the largest message in it, in bytes; how files were read; whether the weights are right."""
    messages, loads = [0], []
    config = TrainConfig(run_dir=folder, resume=True)
    model = torch.nn.Linear(MEGABYTE, 1)
    progress = Progress(config, torch.device("cpu"), ranks, folder / "checkpoint.pt", lambda _: None)
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

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast_object_list", spied_broadcast)
        patch.setattr(dist, "all_gather_object", spied_gather)
        patch.setattr(torch, "load", spied_load)
        try:
            progress.resume(model=model)
        except UserError as error:
            said = str(error)
    return said, max(messages), loads, bool((model.weight == 3).all())


def save(ranks: Ranks, folder: Path) -> None:
    """Write a checkpoint with 4 MB of weights."""
    config = TrainConfig(run_dir=folder)
    progress = Progress(config, torch.device("cpu"), ranks, folder / "checkpoint.pt", lambda _: None)
    model = torch.nn.Linear(MEGABYTE, 1)
    torch.nn.init.constant_(model.weight, 3.0)
    progress.resume(model=model)
    progress._size = dict
    progress._write()


def facts(agreement: Agreement, ranks: Ranks, folder: Path) -> dict:
    found = {"trace": collectives_of_a_step(agreement, ranks.rank), "errors": []}
    save(ranks, folder)
    found["resumed"] = resumed(ranks, folder)
    for problem in ("missing", "another", "unreadable"):
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 1 and problem == "another":
                patch.setattr(checkpoint, "checksum_of", lambda _: 1)
            elif ranks.rank == 1:
                error = FileNotFoundError() if problem == "missing" else PermissionError(13, "Permission denied")

                def fail(_: Path, error: OSError = error) -> int:
                    raise error

                patch.setattr(checkpoint, "checksum_of", fail)
            said, *_ = resumed(ranks, folder)
        found["errors"].append(said.replace(os.uname().nodename, "NODE").replace(str(folder), "FOLDER"))
    return found


if __name__ == "__main__":
    with process_group() as (ranks, _):
        print(json.dumps(facts(Agreement(ranks), ranks, Path(sys.argv[1]))))
