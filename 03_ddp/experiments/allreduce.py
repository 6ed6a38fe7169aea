"""How fast do the ranks add up? The all-reduce that DDP does in every step, timed alone, from small to large.

    torchrun --standalone --nproc-per-node 2 experiments/allreduce.py    # two ranks on this machine
    sbatch -N 2 experiments/allreduce.slurm                              # two nodes under Slurm

You should see that a small message takes about as long as one a hundred times its size (latency), and that beyond
some size time grows with the bytes (bandwidth). Two numbers, alpha and beta, fitted to the times, say both.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from alpha_beta import Network, bus_bandwidth_factor, fit
from lab.flags import default_folder, make_output_folder
from lab.process_group import process_group
from lab.results import write_results
from lab.tables import format_seconds, format_table
from workshop.commandline import run_with_config
from workshop.errors import UserError
from workshop.profiling.calibration import repeats_for
from workshop.profiling.throughput import max_over_ranks

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


def seconds_for(repeats: int, message: torch.Tensor) -> float:
    """Return how long the slowest rank takes for so many all-reduces."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(message)
    if message.device.type == "cuda":
        torch.cuda.synchronize()
    return max_over_ranks(time.perf_counter() - started, message.device)


def measure(nbytes: int, seconds: float, world_size: int, device: torch.device) -> dict[str, float]:
    """Return the median time of one all-reduce of so many bytes, its spread, and the bandwidths that follow."""
    message = torch.ones(nbytes // 4, device=device)
    dist.all_reduce(message)  # also the warm-up: the first one makes connections
    assert message[-1] == world_size, "the all-reduce did not add up"
    message.zero_()  # stays zero however often it is added up
    repeats = repeats_for(seconds, lambda repeats: seconds_for(repeats, message), first=1)
    times = [seconds_for(repeats, message) / repeats for _ in range(TRIALS)]
    median = statistics.median(times)
    return {
        "bytes": nbytes,
        "seconds": median,
        "spread": max(times) - min(times),
        "algorithm_gb_per_second": nbytes / median / 1e9,
        "bus_gb_per_second": nbytes / median / 1e9 * bus_bandwidth_factor(world_size),
    }


def report(rows: list[dict[str, float]], world_size: int, device: torch.device, out: Path) -> None:
    """Print the table, fit the model, and write the results and the plot."""
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
    print(f"all-reduce over {world_size} ranks, {backend}; GB are 1e9 bytes\n")
    print(format_table(["KiB", "time", "spread", "algorithm GB/s", "bus GB/s"], cells, left=()))
    network = fit([(row["bytes"], world_size, row["seconds"]) for row in rows])
    bandwidth = f"{1e-9 / network.beta:.3f} GB/s" if network.beta else "no limit in sight"
    print(f"\nfitted: {format_seconds(network.alpha)} per message (alpha), {bandwidth} (1 / beta)")
    figures = {
        "world_size": world_size,
        "backend": backend,
        "alpha": network.alpha,
        "beta": network.beta,
        "rows": rows,
    }
    write_results(out / "allreduce.json", device, figures)
    plot(rows, world_size, backend, network, out / "allreduce.png")
    print(f"\nwritten: {out / 'allreduce.json'}, {out / 'allreduce.png'}")


def plot(rows: list[dict[str, float]], ranks: int, backend: str, network: Network, file: Path) -> None:
    """Draw time and bus bandwidth by message size into a PNG: measured as points, the fitted model as a line."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.suptitle(f"All-reduce over {ranks} ranks, {backend}", fontsize=14, fontweight="bold")
    sizes = np.array([row["bytes"] for row in rows])
    line = np.geomspace(sizes[0], sizes[-1], 100)
    times = network.all_reduce_seconds(line, ranks)
    left, right = figure.subplots(1, 2)
    left.plot(sizes, [row["seconds"] for row in rows], "o", color="tab:blue", label="measured")
    left.plot(line, times, color="tab:orange", label="fitted: alpha and beta")
    left.set(title="Time", ylabel="time of one all-reduce", yscale="log")
    left.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds)))
    left.yaxis.set_minor_formatter(NullFormatter())
    latency = 2 * (ranks - 1) * network.alpha
    messages = f"{2 * (ranks - 1)} messages of {format_seconds(network.alpha)} (alpha): {format_seconds(latency)}"
    left.axhline(latency, color="grey", linestyle="--", label=messages)
    right.plot(sizes, [row["bus_gb_per_second"] for row in rows], "o", color="tab:blue", label="measured")
    right.plot(line, line / times / 1e9 * bus_bandwidth_factor(ranks), color="tab:orange", label="fitted")
    if network.beta:
        limit = 1e-9 / network.beta
        right.axhline(limit, color="grey", linestyle="--", label=f"1 / beta = {limit:.2f} GB/s")
    right.set(title="Bus bandwidth", ylabel="GB/s", ylim=(0, None))
    for axis in (left, right):
        axis.set(xlabel="message size", xscale="log")
        axis.xaxis.set_major_locator(FixedLocator(sizes[:: 1 + len(sizes) // 6]))
        axis.xaxis.set_major_formatter(FuncFormatter(_size))
        axis.xaxis.set_minor_locator(FixedLocator([]))
        axis.grid(alpha=0.25)
        axis.legend(loc="best")
    figure.savefig(file, dpi=110)


def _size(nbytes: float, _: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


def main(config: Config) -> None:
    """Measure each size together with the other ranks; rank 0 prints and writes the results."""
    with process_group() as (rank, world_size, device):
        if world_size == 1:
            raise UserError("one rank has nothing to add up: torchrun --nproc-per-node 2 experiments/allreduce.py")
        if rank == 0:
            make_output_folder(config.out)
        rows = []
        nbytes = config.min_kib * 1024
        while nbytes <= config.max_mib * 2**20:
            rows.append(measure(nbytes, config.seconds, world_size, device))
            nbytes *= 4
        if rank == 0:
            report(rows, world_size, device, config.out)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
