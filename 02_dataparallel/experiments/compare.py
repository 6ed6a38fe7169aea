"""The same work by one device, by DataParallel and by DistributedDataParallel (DDP), side by side.

    python experiments/compare.py

You should see one table: samples per second, and the ratio to the first row. All take the same samples in steps of the
same global batch, and are measured alternately. Without two GPUs DataParallel cannot be measured, and its row says so.
Without any GPU the threads of the CPU are the devices: DDP then runs two ranks of one thread each. Flags that are not
listed here go to the train.py of all three lessons.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.timing import alternately, mean_std
from workshop.errors import UserError, run_reporting_user_errors
from workshop.hardware import available_cpus

LESSONS = Path(__file__).resolve().parents[2]
KINDS = ("SYNTHETIC", "FULL")
DATA_PARALLEL = "DataParallel"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to do the work."""

    lesson: str
    ranks: int | None = None
    """None: one process without a launcher"""
    threads: int = 1
    """CPU threads of each process"""


def ways_of(gpus: int, cpus: int) -> dict[str, Way]:
    """Return what a machine can compare, by name; the first is what the others are compared with."""
    one, two, three = "01_single_gpu", "02_dataparallel", "03_ddp"
    if gpus == 0:
        threads = {f"one process, {count} thread{'s' if count > 1 else ''}": count for count in sorted({1, cpus})}
        ways = {name: Way(lesson=one, threads=count) for name, count in threads.items()}
        return ways | {"DDP, 2 ranks of 1 thread": Way(lesson=three, ranks=2)}
    ways = {"one GPU": Way(lesson=one, threads=cpus)}
    if gpus > 1:
        ways[f"{DATA_PARALLEL}, {gpus} GPUs"] = Way(lesson=two, threads=cpus)
    return ways | {f"DDP, {gpus} rank(s) of one GPU": Way(lesson=three, ranks=gpus, threads=max(1, cpus // gpus))}


def measure(way: Way, flags: tuple[object, ...], global_batch_size: int) -> dict[str, list[float]]:
    """Return three trials of each kind, in samples/s."""
    batch = ("--global_batch_size" if way.lesson == "03_ddp" else "--batch_size", global_batch_size)
    found = train(LESSONS / way.lesson, *flags, *batch, "--benchmark", "true", ranks=way.ranks, threads=way.threads)
    return {kind: found[kind]["trials"] for kind in KINDS}


def main() -> None:
    """Measure all ways alternately and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--global_batch_size", type=int, default=64, help="samples per step, over all devices")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 3 trials of each (default: %(default)s)")
    arguments, more_flags = parser.parse_known_args()
    gpus, batch = torch.cuda.device_count(), arguments.global_batch_size
    if batch < 1 or batch % max(2, gpus):
        raise UserError(f"--global_batch_size must be a multiple of the {max(2, gpus)} ranks of DDP, got {batch}")
    # Unless asked for otherwise: all samples in memory and no loader processes, which would take CPUs from the ranks.
    flags = ("--loader", "memory", "--num_workers", 0, *more_flags)
    ways = ways_of(gpus, available_cpus())
    trials = alternately({name: partial(measure, way, flags, batch) for name, way in ways.items()}, arguments.rounds)
    cells = {
        name: [mean_std([value for one in rounds for value in one[kind]]) for kind in KINDS]
        for name, rounds in trials.items()
    }
    base = next(iter(cells.values()))
    rows: list[list[results.Cell]] = [
        [name, synthetic, synthetic[0] / base[0][0], full, full[0] / base[1][0]]
        for name, (synthetic, full) in cells.items()
    ]
    if gpus < 2:
        rows.insert(-1, [DATA_PARALLEL, f"not measured: needs two GPUs, found {gpus}", None, None, None])
    results.store(
        "compare",
        title="Threads, DataParallel and DistributedDataParallel",
        columns=["", "SYNTHETIC", "ratio of SYNTHETIC", "FULL", "ratio of FULL"],
        rows=rows,
        formats=dict.fromkeys(KINDS, ",.0f") | {f"ratio of {kind}": ",.2f" for kind in KINDS},
        unit=f"samples/s, {batch} per step over all devices",
        spread=f"mean ± standard deviation of {3 * arguments.rounds} trials; the ratio is that to the first row",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
