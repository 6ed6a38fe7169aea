"""How far does it scale, and why not further? 1 to 8 ranks with emulated GPUs that really add up their gradients.

    python experiments/emulated_scaling.py                     # some minutes
    python experiments/emulated_scaling.py --rounds 1 --ranks 1 2

You should see that a step without communication takes equally long on any number of ranks, and that a step with
communication becomes longer with each rank. Each rank has an emulated GPU, whose computation takes time but no CPU.
DistributedDataParallel, the gradients and the all-reduces are real. The ranks are started again in every round, and in
each of them the kinds of step are measured alternately.
"""

import argparse
import json
import os
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allreduce import measure as measure_all_reduce
from alpha_beta import efficiency, fit
from lab import results
from lab.emulated_gpu import FORWARD_SHARE, PUBLISHED, EmulatedGPU
from lab.flags import Parser
from lab.launching import run, torchrun
from lab.plots import COLORS, panels
from lab.process_group import process_group
from workshop.errors import UserError, run_reporting_user_errors
from workshop.profiling.throughput import max_over_ranks

LESSON = Path(__file__).resolve().parents[1]
LAYERS = 8
"""of the model, all equal; with a bucket per layer there are as many all-reduces in a step"""
WEIGHTS_PER_LAYER = 150_000
"""each with a gradient of 4 bytes: 4.8 MB in all, as many as lesson 01's model has"""
GRADIENT_BYTES = 4 * LAYERS * WEIGHTS_PER_LAYER
TRIALS, STEPS = 3, 10
"""trials of each kind of step in a round, and training steps of each trial"""
KINDS = {"one_bucket": "one bucket", "many_buckets": "a bucket per layer"}


class _Layer(torch.autograd.Function):
    """Multiply by the mean of the weights, which costs the CPU next to nothing; the gradients are true.

    On a GPU the CPU runs ahead: it has queued all of backward long before the first gradient is ready. So all pieces of
    backward are queued when the first of them, that of the last layer, is waited for.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weights: torch.Tensor, layer: int, network: "Network") -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(inputs, weights)
        ctx.layer, ctx.network = layer, network
        return inputs * weights.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # noqa: ANN401
        (gradient,) = gradients
        inputs, weights = ctx.saved_tensors
        network = ctx.network
        if ctx.layer == LAYERS - 1:
            network.pieces = [network.gpu.launch("backward", network.backward_seconds) for _ in range(LAYERS)]
        of_weight = torch.full_like(weights, (gradient * inputs).sum().item() / weights.numel())
        # gloo reads the gradient from the memory of the CPU, so it must be there
        network.gpu.wait_for(network.pieces[LAYERS - 1 - ctx.layer], "a gradient is read")
        return gradient * weights.mean(), of_weight, None, None


class Network(nn.Module):
    """Equal layers with real weights; each takes its share of a step of ``step_seconds`` on an emulated GPU."""

    def __init__(self, step_seconds: float, gpu: EmulatedGPU) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(WEIGHTS_PER_LAYER) for _ in range(LAYERS))
        self.forward_seconds = FORWARD_SHARE * step_seconds / LAYERS
        self.backward_seconds = (1 - FORWARD_SHARE) * step_seconds / LAYERS
        self.gpu = gpu
        self.pieces: list[Any] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs (N,) to outputs (N,)."""
        for layer, weights in enumerate(self.weights):
            self.gpu.launch("forward", self.forward_seconds)
            inputs = _Layer.apply(inputs, weights, layer, self)
        return inputs


def train(model: DistributedDataParallel, steps: int, context: AbstractContextManager) -> None:
    """Take training steps, without an optimizer: its time is in the published figure."""
    inputs = torch.ones(8)
    with context:
        for _ in range(steps):
            model.zero_grad()
            model(inputs).sum().backward()


def measure_steps(step_seconds: float, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds per step of the slowest rank, in each trial, by kind."""
    gpu = EmulatedGPU(depth=4 * LAYERS)
    of_layer = 4 * WEIGHTS_PER_LAYER / 2**20
    # A bucket is complete when it has at least this size: one layer fills the small one, no layer the large one.
    one, many = (
        DistributedDataParallel(Network(step_seconds, gpu), bucket_cap_mb=cap)
        for cap in (2 * LAYERS * of_layer, of_layer / 2)
    )
    kinds: dict[str, tuple[DistributedDataParallel, Any]] = {
        "no_sync": (many, many.no_sync),
        "one_bucket": (one, nullcontext),
        "many_buckets": (many, nullcontext),
    }
    for model, context in reversed(kinds.values()):
        train(model, 2, context())  # DDP arranges its buckets after the first step
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(TRIALS):
        for kind, (model, context) in kinds.items():
            dist.barrier()
            started = time.perf_counter()
            train(model, STEPS, context())
            found[kind].append(max_over_ranks(time.perf_counter() - started, device) / STEPS)
    return found


def measure_as_rank(step_seconds: float) -> None:
    """Measure together with the other ranks; rank 0 prints what was found as JSON."""
    with process_group(on_cpu=True) as (rank, world_size, device):
        steps = measure_steps(step_seconds, device)
        sizes = sorted({4096, 4 * WEIGHTS_PER_LAYER, GRADIENT_BYTES}) if world_size > 1 else []
        all_reduces = [(nbytes, statistics.median(measure_all_reduce(nbytes, 0.2, device))) for nbytes in sizes]
        if rank == 0:
            print(json.dumps({"steps": steps, "all_reduces": all_reduces}))


def row_of(ranks: int, rounds: list[dict[str, Any]], step_seconds: float) -> list[results.Cell]:
    """Return the row of the table for a number of ranks.

    The trials are compared in pairs, each with the one without communication that was measured right before it.
    """
    steps = {kind: [time for one in rounds for time in one["steps"][kind]] for kind in ("no_sync", *KINDS)}
    all_reduces = [(nbytes, seconds) for one in rounds for nbytes, seconds in one["all_reduces"]]
    whole = [1e3 * seconds for nbytes, seconds in all_reduces if nbytes == GRADIENT_BYTES]
    row: list[results.Cell] = [str(ranks), _spread([1e3 * time for time in steps["no_sync"]])]
    row.append(_spread(whole) if whole else None)
    for kind, buckets in zip(KINDS, (1, LAYERS), strict=True):
        row.append(_spread([alone / time for alone, time in zip(steps["no_sync"], steps[kind], strict=True)]))
        network = fit(all_reduces, ranks) if all_reduces else None
        predicted = efficiency(step_seconds, GRADIENT_BYTES, buckets, network, ranks, overlap=True) if network else None
        row.append(predicted)
    return row


def _spread(values: list[float]) -> list[float]:
    return [statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def plot(rows: list[list[Any]]) -> Figure:
    """Return a plot of the rows of the table: efficiency by number of ranks, measured and predicted."""
    figure, (axis,) = panels(1, (7.5, 4.4))
    ranks = [int(row[0]) for row in rows]
    for place, (label, color) in enumerate(zip(KINDS.values(), COLORS, strict=False)):
        measured, predicted = ([row[3 + 2 * place + which] for row in rows] for which in (0, 1))
        means, deviations = zip(*measured, strict=True)
        beside = [count + 0.12 * place - 0.06 for count in ranks]  # so that none covers the other
        axis.errorbar(beside, means, deviations, fmt="o", color=color, capsize=4, label=f"{label}: measured")
        shares = [1.0 if value is None else value for value in predicted]
        axis.plot(ranks, shares, "--", color=color, label=f"{label}: predicted")
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":", label="ideal")
    axis.set(xlabel="ranks, each with an emulated GPU", ylabel="efficiency", ylim=(0, 1.08), xticks=ranks)
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="lower left", fontsize=9)
    return figure


def measure_all(arguments: argparse.Namespace, step_seconds: float) -> None:
    """Start all numbers of ranks, round by round; store the table and the plot."""
    command = ["experiments/emulated_scaling.py", "--batch_size", arguments.batch_size]
    found: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in arguments.ranks}
    for _ in range(arguments.rounds):
        for ranks, rounds in found.items():
            printed = run([*torchrun(ranks), *command], LESSON, on_cpu=True, threads=1, quiet=True)
            rounds.append(json.loads(printed))
            print(f"{ranks} rank(s): measured", flush=True)
    rows = [row_of(ranks, rounds, step_seconds) for ranks, rounds in found.items()]
    alone, all_reduce = "step without communication, ms", "all-reduce alone, ms"
    shares = [text for label in KINDS.values() for text in (label, f"{label}, predicted")]
    results.store(
        "emulated_scaling",
        title="Efficiency by number of ranks",
        columns=["ranks", alone, all_reduce, *shares],
        rows=rows,
        formats={alone: ",.1f", all_reduce: ",.1f"} | dict.fromkeys(shares, ".1%"),
        unit="emulated GPU, real communication over gloo",
        spread=f"mean ± standard deviation of {TRIALS * arguments.rounds} trials of {STEPS} steps, in "
        f"{arguments.rounds} rounds (all-reduce alone: of the rounds' medians)",
        figure=plot(rows),
    )


def main() -> None:
    """Measure as one of the ranks, or start them and compare."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="how often all are started (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per step and rank (default: %(default)s)")
    arguments = parser.parse_args()
    if min(*arguments.ranks, arguments.rounds, arguments.batch_size) < 1:
        raise UserError("--ranks, --rounds and --batch_size must be at least 1")
    step_seconds = arguments.batch_size * PUBLISHED["a100_optimized"].gpu
    if "RANK" in os.environ:
        measure_as_rank(step_seconds)
    else:
        measure_all(arguments, step_seconds)


if __name__ == "__main__":
    run_reporting_user_errors(main)
