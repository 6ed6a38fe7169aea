"""How long do the ranks take to add up? The all-reduce that DDP does in every step, timed alone, by message size.

    torchrun --standalone --nproc-per-node 2 experiments/allreduce.py    # two ranks on this machine
    sbatch -N 2 experiments/allreduce.slurm                              # two nodes under Slurm

You should see that small messages all take about the same time (latency), and that from some size on the time grows
with the bytes (bandwidth). Two numbers that are fitted to the times, alpha and beta, describe both.
"""

import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from alpha_beta import Network, bus_bandwidth_factor, fit
from lab import results
from lab.flags import Parser
from lab.plots import COLORS, panels
from lab.process_group import process_group
from workshop.errors import UserError, run_reporting_user_errors
from workshop.profiling.calibration import repeats_for
from workshop.profiling.throughput import max_over_ranks

TRIALS = 5


def seconds_for(repeats: int, message: torch.Tensor) -> float:
    """Return how long the slowest rank takes for so many all-reduces."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(message)
    if message.device.type == "cuda":
        torch.cuda.synchronize()
    return max_over_ranks(time.perf_counter() - started, message.device)


def measure(nbytes: int, seconds: float, device: torch.device) -> list[float]:
    """Return the seconds of one all-reduce of so many bytes in several trials, each of which lasts ``seconds``."""
    message = torch.ones(nbytes // 4, device=device)
    dist.all_reduce(message)  # also the warm-up: the first one makes connections
    assert message[-1] == dist.get_world_size(), "the all-reduce did not add up"
    message.zero_()  # stays zero however often it is added up
    repeats = repeats_for(seconds, lambda repeats: seconds_for(repeats, message), first=1)
    return [seconds_for(repeats, message) / repeats for _ in range(TRIALS)]


def plot(times: dict[int, float], ranks: int, network: Network) -> Figure:
    """Return a plot of time and bus bandwidth by message size: measured as points, fitted as a line."""
    figure, (left, right) = panels(2, (11, 4.4), sharex=True)
    sizes = np.array(list(times))
    line = np.geomspace(sizes[0], sizes[-1], 100)
    fitted = np.array([network.all_reduce_seconds(size, ranks) for size in line])
    factor = bus_bandwidth_factor(ranks)
    left.plot(sizes, list(times.values()), "o", color=COLORS[0], label="measured")
    left.plot(line, fitted, color=COLORS[1], label="fitted: alpha and beta")
    latency = 2 * (ranks - 1) * network.alpha
    left.axhline(latency, color="grey", linestyle="--", label=f"{2 * (ranks - 1)} messages of alpha")
    left.set(title="Time of one all-reduce", xscale="log", yscale="log")
    left.yaxis.set_major_formatter(EngFormatter("s"))
    right.plot(sizes, [size * factor / time / 1e9 for size, time in times.items()], "o", color=COLORS[0])
    right.plot(line, line * factor / fitted / 1e9, color=COLORS[1])
    if network.beta:
        right.axhline(1e-9 / network.beta, color="grey", linestyle="--", label="1 / beta")
    right.set(title="Bus bandwidth, GB/s", ylim=(0, None))
    for axis in (left, right):
        axis.xaxis.set_major_formatter(EngFormatter("B"))
        axis.set(xlabel="message size")
        axis.legend()
    return figure


def store(trials: dict[int, list[float]], ranks: int) -> None:
    """Fit the model to the median times; store both tables and the plot."""
    times = {nbytes: statistics.median(found) for nbytes, found in trials.items()}
    network = fit(list(times.items()), ranks)
    ms, spread, gb = "ms", "slowest - fastest, ms", "bus GB/s"
    results.store(
        "allreduce",
        title="All-reduce by size",
        columns=["KiB", ms, spread, gb],
        rows=[
            [
                f"{nbytes // 1024:,}",
                1e3 * times[nbytes],
                1e3 * (max(found) - min(found)),
                nbytes * bus_bandwidth_factor(ranks) / times[nbytes] / 1e9,
            ]
            for nbytes, found in trials.items()
        ],
        formats={ms: ",.2f", spread: ",.2f", gb: ",.3f"},
        spread=f"{ranks} ranks over {dist.get_backend()}; median of {TRIALS} trials",
        figure=plot(times, ranks, network),
    )
    results.store(
        "allreduce_fit",
        title="Line through the times",
        columns=["fit", "alpha, µs", "1 / beta, GB/s"],
        rows=[["fitted", 1e6 * network.alpha, 1e-9 / network.beta if network.beta else None]],
        formats={"alpha, µs": ".0f", "1 / beta, GB/s": ".2f"},
    )


def main() -> None:
    """Measure each size together with the other ranks; rank 0 stores the results."""
    parser = Parser(__doc__)
    parser.add_argument("--min_kib", type=int, default=4, help="smallest message; each further one is 4 times as large")
    parser.add_argument("--max_mib", type=float, default=64, help="largest message (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a trial (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.min_kib < 1 or arguments.max_mib * 1024 < 4 * arguments.min_kib or arguments.seconds <= 0:
        raise UserError("--min_kib must be at least 1, --max_mib at least four times that size, --seconds above 0")
    with process_group() as (rank, world_size, device):
        if world_size == 1:
            raise UserError("one rank has nothing to add up: torchrun --nproc-per-node 2 experiments/allreduce.py")
        trials = {}
        nbytes = 1024 * arguments.min_kib
        while nbytes <= arguments.max_mib * 2**20:
            trials[nbytes] = measure(nbytes, arguments.seconds, device)
            nbytes *= 4
        if rank == 0:
            store(trials, world_size)


if __name__ == "__main__":
    run_reporting_user_errors(main)
