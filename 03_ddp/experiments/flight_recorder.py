"""Which rank waits for which? Two ranks that hang on purpose, and what PyTorch's flight recorder saw of them.

    torchrun --standalone --nproc-per-node 2 experiments/flight_recorder.py

Each rank validates its share and calls an all-reduce in each batch. Rank 0 has three batches and rank 1 only two. So
rank 0 waits in its third all-reduce, while rank 1 has gone on to a barrier. After --timeout seconds both give up. You
should see the last collectives of each rank: up to the fourth they are the same, and the fifth is not. torchfrtrace,
which comes with PyTorch, finds this by itself in the files that the ranks write.
"""

import os
import pickle
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

from lab import results
from lab.flags import Parser
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import default_runs_dir

BATCHES = (3, 2)
"""of each rank"""


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


def write_recording(file: Path, ranks: int) -> None:
    """Write the last collectives of this rank; the file is complete as soon as it is there."""
    recording = pickle.loads(_dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False))
    # Over gloo, the group is listed without the name that the collectives refer to, and torchfrtrace does not find it.
    name, description = recording["entries"][0]["process_group"]
    group = {"name": name, "desc": description, "ranks": str(list(range(ranks)))}
    recording["pg_config"] = {name: group}
    temporary = file.with_name(f"unfinished_{file.name}")
    temporary.write_bytes(pickle.dumps(recording))
    temporary.rename(file)


def show_recording(rank: int, file: Path, seconds: float) -> None:
    """Print what a rank has written: of each collective its number, its kind, its shape, and where it was called.

    Raises:
        UserError: it has not been written within so many seconds.
    """
    until = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > until:
            raise UserError(f"{file} was not written within {seconds:g} s")
        time.sleep(0.05)
    rows = []
    for entry in pickle.loads(file.read_bytes())["entries"]:
        here = [frame for frame in entry["frames"] if Path(frame["filename"]).name == Path(__file__).name]
        where = f"{here[0]['name']}, line {here[0]['line']}" if here else "elsewhere"
        kind, shape = entry["profiling_name"].partition(":")[2], "".join(map(str, entry["input_sizes"][:1]))
        if not entry["is_p2p"]:
            rows.append([str(entry["collective_seq_id"]), kind, shape, where])
    columns = ["number", "collective", "shape", "called in"]
    print(f"\nrank {rank}\n{results.as_text({'columns': columns, 'rows': rows, 'formats': {}})}")


def main() -> None:
    """Hang, give up, and write what the flight recorder has seen; rank 0 prints the recordings of both."""
    parser = Parser(__doc__)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds after which a collective is given up")
    arguments = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != str(len(BATCHES)):
        raise UserError("this needs two ranks: torchrun --standalone --nproc-per-node 2 experiments/flight_recorder.py")
    rank = int(os.environ["RANK"])
    folder = default_runs_dir() / "03_ddp/flight_recorder"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"rank_{number}" for number in range(len(BATCHES))]
    files[rank].unlink(missing_ok=True)  # of an earlier run
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the default of PyTorch 2.15
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout))
    reason = "nothing hung"
    try:
        for _ in range(2):
            train_step(torch.ones(1000))
        validate(BATCHES[rank])
        finish_epoch()
    except RuntimeError as error:  # the timeout
        reason = str(error).splitlines()[0].rpartition("] ")[2]  # without the place in the sources of gloo
    write_recording(files[rank], len(BATCHES))
    if rank == 0:
        print(f"rank 0 has given up: {reason}")
        for number, file in enumerate(files):
            show_recording(number, file, 2 * arguments.timeout + 10)
        print(f"\nwritten to {folder}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
