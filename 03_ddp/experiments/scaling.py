"""How far does it scale? Weak and strong scaling of this lesson's train.py over 1, 2, 4, ... ranks.

    python experiments/scaling.py                        # ranks of this machine: one per GPU, else one per CPU
    sbatch -N 2 experiments/scaling.slurm                # ranks of two nodes

You should see samples/s for loading alone (IO), training alone (SYNTHETIC), both (FULL) and training without
communication (COMPUTE). The efficiency of N ranks is their FULL, divided by N times that of one rank. The overhead is
the share by which FULL is below COMPUTE of the same ranks. On CPUs, which the ranks share, only the overhead says
something about communication. Flags that are not listed here go to train.py.
"""

import math
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lab import results
from lab.flags import Parser
from lab.launching import PYTHON, torchrun, train
from lab.plots import COLORS, panels
from lab.timing import alternately, mean_std, median_range
from workshop.errors import UserError, run_reporting_user_errors
from workshop.hardware import available_cpus

LESSON = Path(__file__).resolve().parents[1]
KINDS = ("IO", "SYNTHETIC", "FULL", "COMPUTE")
Trials = dict[str, list[float]]
"""samples/s over all ranks, by kind"""


@dataclass(frozen=True)
class Setting:
    """A configuration that is measured."""

    scaling: str
    """weak: each rank keeps its batch; strong: all ranks share one batch"""
    ranks: int
    batch_size: int
    """samples per step of each rank"""


def settings(max_ranks: int, batch_size: int) -> list[Setting]:
    """Return the configurations of both kinds; strong scaling ends where the ranks cannot share the batch evenly."""
    counts = [2**power for power in range(max_ranks.bit_length())]
    strong = [Setting("strong", ranks, batch_size // ranks) for ranks in counts if batch_size % ranks == 0]
    return [Setting("weak", ranks, batch_size) for ranks in counts] + strong[1:]  # one rank is the first of both


def in_slurm() -> bool:
    """Return whether this is a Slurm job, so that srun starts the ranks, on all of its nodes."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def tasks() -> int:
    """Return the number of ranks for which this job or this machine has room."""
    return int(os.environ.get("SLURM_NTASKS", "1")) if in_slurm() else torch.cuda.device_count() or available_cpus()


def launcher(ranks: int) -> list[str]:
    """Return the command words that start ``ranks`` Python processes."""
    if not in_slurm():
        return torchrun(ranks)
    per_node = tasks() // int(os.environ.get("SLURM_NNODES", "1"))
    layout = [
        f"--nodes={math.ceil(ranks / per_node)}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={min(ranks, per_node)}",
    ]
    return ["srun", "--relative=0", *layout, "--kill-on-bad-exit=1", PYTHON]  # from the first node on: rank 0 is there


def measure(setting: Setting, flags: list[object]) -> Trials:
    """Return three trials of each kind."""
    gpus = torch.cuda.device_count()
    threads = max(1, available_cpus() // (1 if in_slurm() else setting.ranks)) if gpus else 1
    batch = ("--batch_size", setting.batch_size, "--benchmark", "true")
    found = train(LESSON, *flags, *batch, start=launcher(setting.ranks), threads=threads, quiet=True)
    trials = {kind: found[kind]["trials"] for kind in KINDS}
    speeds = ", ".join(f"{kind} {mean_std(found)[0]:,.0f}" for kind, found in trials.items())
    print(f"{setting.scaling} scaling, {setting.ranks} rank(s): {speeds} samples/s", flush=True)
    return trials


def shares(setting: Setting, trials: Trials, one_rank: Trials) -> list[results.Cell]:
    """Return efficiency and overhead: median, lowest and highest over trials that were measured in the same round."""
    efficiency = [full / setting.ranks / one for full, one in zip(trials["FULL"], one_rank["FULL"], strict=True)]
    overhead = [1 - full / alone for full, alone in zip(trials["FULL"], trials["COMPUTE"], strict=True)]
    return [median_range(efficiency), median_range(overhead)]


def plot(measured: dict[Setting, Trials]) -> Figure:
    """Return a plot of each kind of throughput, with the ideal line, and of efficiency, both by number of ranks."""
    figure, (left, right) = panels(2, (11, 4.4))
    first = next(iter(measured))
    highest = max(setting.ranks for setting in measured)
    one = mean_std(measured[first]["FULL"])[0]
    left.plot([1, highest], [one, highest * one], ":", color="black", label="ideal")
    right.axhline(1, linestyle=":", color="black", label="ideal")
    for scaling, color in zip(("weak", "strong"), COLORS, strict=False):
        chosen = [setting for setting in measured if setting.scaling == scaling or setting == first]
        ranks = [setting.ranks for setting in chosen]
        means, deviations = zip(*(mean_std(measured[setting]["FULL"]) for setting in chosen), strict=True)
        left.errorbar(ranks, means, deviations, fmt="o-", capsize=4, color=color, label=f"FULL, {scaling} scaling")
        medians, low, high = zip(*(shares(s, measured[s], measured[first])[0] for s in chosen), strict=True)
        lengths = [
            [m - x for m, x in zip(medians, low, strict=True)],
            [x - m for m, x in zip(medians, high, strict=True)],
        ]
        right.errorbar(ranks, medians, lengths, fmt="o-", capsize=4, color=color, label=f"{scaling} scaling")
    weak = [setting for setting in measured if setting.scaling == "weak"]
    for kind, style in (("IO", "--"), ("SYNTHETIC", "-."), ("COMPUTE", ":")):
        speeds = [mean_std(measured[setting][kind])[0] for setting in weak]
        left.plot([setting.ranks for setting in weak], speeds, style, color="gray", label=f"{kind}, weak scaling")
    left.set(title="Samples/s", xlabel="ranks", yscale="log")  # IO can be many times the others
    right.set(title="Efficiency", xlabel="ranks", ylim=(0, None))
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axis in (left, right):
        axis.set_xticks(sorted({setting.ranks for setting in measured}))
        axis.legend()
    return figure


def main() -> None:
    """Measure all configurations alternately; store the table and the plot."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--max_ranks", type=int, help="largest number of ranks (default: GPUs, else CPUs; tasks of a job)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=64, help="batch size per rank; in strong scaling of all (default: 64)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 3 trials of each (default: %(default)s)")
    arguments, more_flags = parser.parse_known_args()
    max_ranks = arguments.max_ranks or tasks()
    if min(max_ranks, arguments.batch_size, arguments.rounds) < 1:
        raise UserError("--max_ranks, --batch_size and --rounds must be at least 1")
    # Unless asked for otherwise: all samples in memory and no loader processes, which would take CPUs from the ranks.
    flags = ["--loader", "memory", "--num_workers", 0, *more_flags]
    chosen = settings(max_ranks, arguments.batch_size)
    rounds = alternately({setting: partial(measure, setting, flags) for setting in chosen}, arguments.rounds)
    measured = {s: {kind: [x for one in found for x in one[kind]] for kind in KINDS} for s, found in rounds.items()}
    one_rank = measured[chosen[0]]
    rows: list[list[results.Cell]] = [
        [s.scaling, s.ranks, s.batch_size, *(mean_std(trials[kind]) for kind in KINDS), *shares(s, trials, one_rank)]
        for s, trials in measured.items()
    ]
    results.store(
        "scaling",
        title="Weak and strong scaling",
        columns=["scaling", "ranks", "batch per rank", *KINDS, "efficiency", "overhead"],
        rows=rows,
        formats=dict.fromkeys(KINDS, ",.0f") | {"efficiency": ".0%", "overhead": ".0%"},
        unit="samples/s over all ranks",
        spread=f"mean ± standard deviation of {3 * arguments.rounds} trials; shares: median of pairs, range",
        figure=plot(measured),
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
