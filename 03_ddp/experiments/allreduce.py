"""How fast do the ranks add up? The all-reduce that DDP does in every step, timed alone, from small to large.

    torchrun --standalone --nproc-per-node 2 allreduce.py    # two ranks on this machine
    sbatch -N 2 allreduce.slurm                              # two nodes under Slurm

You should see that a small message takes about as long as one a hundred times its size (latency), and that beyond
some size time grows with the bytes (bandwidth). Two numbers, alpha and beta, fitted to the times, say both.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from allreduce_plot import plot
from alpha_beta import bus_bandwidth_factor, fit
from workshop.commandline import run_with_config
from workshop.distributed.agreement import slowest
from workshop.distributed.process_group import process_group
from workshop.distributed.ranks import Ranks
from workshop.errors import UserError
from workshop.measuring.flags import default_folder, make_output_folder
from workshop.measuring.records import write_record
from workshop.measuring.tables import format_seconds, format_table

TRIALS = 5


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags."""

    min_kib: int = 4
    """smallest message, in KiB; each further one is four times as large"""
    max_mib: float = 64
    """largest message, in MiB"""
    seconds: float = 0.1
    """length of a trial; there are five for each size"""
    out: Path = field(default_factory=default_folder)
    """folder for allreduce.json and allreduce.png"""

    def __post_init__(self) -> None:
        if self.min_kib < 1 or self.max_mib * 1024 < 4 * self.min_kib:
            raise UserError("--min_kib must be at least 1, and --max_mib at least four times that size")
        if not self.seconds > 0:
            raise UserError(f"--seconds must be above 0, got {self.seconds}")


def seconds_for(repeats: int, message: torch.Tensor, ranks: Ranks) -> float:
    """Return how long the slowest rank takes for so many all-reduces."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(message)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return slowest(time.perf_counter() - started, ranks.device)


def measure(nbytes: int, seconds: float, ranks: Ranks) -> dict[str, float]:
    """Return the median time of one all-reduce of so many bytes, its spread, and the bandwidths that follow."""
    message = torch.ones(nbytes // 4, device=ranks.device)
    dist.all_reduce(message)  # also the warm-up: the first one makes connections
    assert message[-1] == ranks.world_size, "the all-reduce did not add up"
    message.zero_()  # stays zero however often it is added up
    repeats = 1
    while (taken := seconds_for(repeats, message, ranks)) < seconds / 3:
        repeats *= 2
    repeats = max(1, round(repeats * seconds / taken))
    times = [seconds_for(repeats, message, ranks) / repeats for _ in range(TRIALS)]
    median = statistics.median(times)
    return {
        "bytes": nbytes,
        "seconds": median,
        "spread": max(times) - min(times),
        "algorithm_gb_per_second": nbytes / median / 1e9,
        "bus_gb_per_second": nbytes / median / 1e9 * bus_bandwidth_factor(ranks.world_size),
    }


def report(rows: list[dict[str, float]], ranks: Ranks, out: Path) -> None:
    """Print the table, fit the model, and write record and plot."""
    cells = [
        (
            f"{row['bytes'] / 1024:,.0f}",
            format_seconds(row["seconds"]),
            f"{row['spread'] / row['seconds']:.0%}",
            f"{row['algorithm_gb_per_second']:.3f}",
            f"{row['bus_gb_per_second']:.3f}",
        )
        for row in rows
    ]
    backend = dist.get_backend()
    print(f"all-reduce over {ranks.world_size} ranks, {backend}; GB are 1e9 bytes\n")
    print(format_table(["KiB", "time", "spread", "algorithm GB/s", "bus GB/s"], cells, left=()))
    network = fit([(row["bytes"], ranks.world_size, row["seconds"]) for row in rows])
    bandwidth = f"{1e-9 / network.beta:.3f} GB/s" if network.beta else "no limit in sight"
    print(f"\nfitted: {format_seconds(network.alpha)} per message (alpha), {bandwidth} (1 / beta)")
    figures = {
        "world_size": ranks.world_size,
        "backend": backend,
        "alpha": network.alpha,
        "beta": network.beta,
        "rows": rows,
    }
    write_record(out / "allreduce.json", ranks.device, figures)
    plot(rows, ranks.world_size, network, out / "allreduce.png")
    print(f"\nwritten: {out / 'allreduce.json'}, {out / 'allreduce.png'}")


def main(config: Config) -> None:
    """Meet the other ranks, measure each size together, and let rank 0 tell."""
    with process_group() as ranks:
        if ranks.world_size == 1:
            raise UserError("one rank has nobody to talk to: torchrun --standalone --nproc-per-node 2 allreduce.py")
        if ranks.is_main:
            make_output_folder(config.out)
        rows = []
        nbytes = config.min_kib * 1024
        while nbytes <= config.max_mib * 2**20:
            rows.append(measure(nbytes, config.seconds, ranks))
            nbytes *= 4
        if ranks.is_main:
            report(rows, ranks, config.out)


if __name__ == "__main__":
    run_with_config(main, Config)
