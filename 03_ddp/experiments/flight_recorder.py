"""Which rank waits for which? Two ranks that hang on purpose, and what PyTorch's flight recorder saw of them.

    torchrun --standalone --nproc-per-node 2 experiments/flight_recorder.py

Each rank validates its share and calls an all-reduce in each batch. Rank 0 has three batches and rank 1 only two. So
rank 0 waits in its third all-reduce, while rank 1 has gone on to a barrier. After --timeout seconds both give up. You
should see the last collectives of each rank: up to the fourth they are the same, and the fifth is not.
"""

import os
import pickle
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

from lab.flags import default_folder, make_output_folder
from lab.tables import format_table
from workshop.commandline import run_with_config
from workshop.distributed import int_from_env
from workshop.errors import UserError

BATCHES = (3, 2)
"""of each rank"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags."""

    timeout: float = 5.0
    """seconds after which a collective is given up; PyTorch's default is 30 minutes for gloo, 10 for NCCL"""
    out: Path = field(default_factory=default_folder)
    """folder for the recording of each rank, flight_recorder_0 and flight_recorder_1"""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise UserError(f"--timeout must be above 0, got {self.timeout}")


def train_step(gradient: torch.Tensor) -> None:
    """Average a gradient over the ranks, as DDP does in every step."""
    dist.all_reduce(gradient)


def validate(batches: int) -> None:
    """Add up the loss of each batch over the ranks: the mistake, because the ranks have not equally many batches."""
    for _ in range(batches):
        loss = torch.ones(())
        dist.all_reduce(loss)


def finish_epoch() -> None:
    """Wait until all ranks have finished."""
    dist.barrier()


def collectives_of(recording: bytes) -> list[dict[str, Any]]:
    """Return the collectives of one rank in the order in which it called them."""
    return [entry for entry in pickle.loads(recording)["entries"] if not entry["is_p2p"]]


def cells_of(entry: dict[str, Any]) -> list[str]:
    """Return what the table shows of a collective: number, what it was, of which shape, and where."""
    here = [frame for frame in entry["frames"] if Path(frame["filename"]).name == Path(__file__).name]
    where = f"{here[0]['name']}, line {here[0]['line']}" if here else "elsewhere"
    shapes = str(entry["input_sizes"][0]) if entry["input_sizes"] else ""
    name = entry["profiling_name"].partition(":")[2]
    return [str(entry["collective_seq_id"]), name, shapes, where]


def wait_for(file: Path, seconds: float) -> bytes:
    """Return what another rank writes into a file.

    Raises:
        UserError: it has not been written within so many seconds.
    """
    until = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > until:
            raise UserError(f"{file} was not written within {seconds:g} s")
        time.sleep(0.05)
    return file.read_bytes()


def main(config: Config) -> None:
    """Hang, give up, and write what the flight recorder has seen; rank 0 prints the recordings of both."""
    rank = int_from_env("RANK") if "RANK" in os.environ else 0
    if os.environ.get("WORLD_SIZE") != str(len(BATCHES)):
        raise UserError(
            "this needs two ranks: torchrun --standalone --nproc-per-node 2 experiments/flight_recorder.py",
            already_reported=rank > 0,
        )
    files = [config.out / f"flight_recorder_{number}" for number in range(len(BATCHES))]
    make_output_folder(config.out)
    files[rank].unlink(missing_ok=True)  # of an earlier run
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the default of PyTorch 2.15
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout))
    try:
        for _ in range(2):
            train_step(torch.ones(1000))
        validate(BATCHES[rank])
        finish_epoch()
    except RuntimeError as error:  # the timeout
        reason = str(error).splitlines()[0].rpartition("] ")[2]  # without the place in the sources of gloo
    recording = _dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    unfinished = files[rank].with_suffix(".unfinished")
    unfinished.write_bytes(recording)
    unfinished.rename(files[rank])
    if rank == 0:
        print(f"rank 0 has given up: {reason}")
        for number, file in enumerate(files):
            entries = collectives_of(wait_for(file, 2 * config.timeout + 10))
            print(f"\nrank {number}")
            print(format_table(["number", "collective", "shape", "called in"], list(map(cells_of, entries))))


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
