"""Give each rank some of the layers (pipeline parallel), and see how long the ranks wait for each other.

    torchrun --standalone --nproc-per-node 2 experiments/pipeline.py    # two ranks with two blocks each
    torchrun --standalone --nproc-per-node 4 experiments/pipeline.py    # four ranks with one block each

The computation is emulated, the communication is real. Each rank computes its small blocks and then waits, without
using the CPU, for as long as a large block would compute. Four ranks can therefore "compute" at the same time on a
machine with two cores. You should see the losses of one process, and a share of idle time close to
(p - 1) / (m + p - 1) with p ranks and m micro-batches.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from lab.flags import default_folder, make_output_folder, require_positive
from lab.process_group import process_group
from lab.results import write_results
from lab.tables import format_table
from small_training import (
    BATCH_SIZE,
    LESSON,
    STEPS,
    about_run,
    batches,
    make_model,
    make_optimizer,
    train_one_process,
)
from workshop.commandline import run_with_config
from workshop.errors import UserError
from workshop.models.vit import VisionTransformer

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MICROBATCHES = (2, 4, 8, 16)
PLOTTED = (("GPipe", 4), ("1F1B", 4), ("GPipe", 8), ("1F1B", 8))
DEPTH = 4
Spans = Sequence[list[tuple[str, float, float]]]
"""for each rank, when it has worked: (kind, start, end)"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags."""

    milliseconds: float = 25
    """how long a forward pass of one micro-batch takes on each rank; backward takes twice as long"""
    out: Path = field(default_factory=default_folder)
    """folder for pipeline_2_ranks.json and .png, or pipeline_4_ranks.json and .png"""

    def __post_init__(self) -> None:
        require_positive(self, "milliseconds")


@dataclass
class Clock:
    """When this rank has worked, and on what: (kind, start, end) in seconds of a clock that all processes share."""

    seconds: float
    """how long a forward pass shall take"""
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def wait(self, kind: str, start: float) -> None:
        """Wait until the emulated work that began at ``start`` would be done, and note it."""
        length = self.seconds if kind == "forward" else 2 * self.seconds
        time.sleep(max(0.0, start + length - time.monotonic()))
        self.spans.append((kind, start, time.monotonic()))


class StartOfStage(torch.autograd.Function):
    """The identity, called before the layers of a stage: forward begins here, and backward ends here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: dict[str, float], clock: Clock) -> torch.Tensor:  # noqa: ANN401
        """Note when forward began."""
        ctx.times, ctx.clock = times, clock
        times["forward"] = time.monotonic()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        """Make backward as long as that of large blocks."""
        ctx.clock.wait("backward", ctx.times["backward"])
        return gradients[0].contiguous(), None, None


class EndOfStage(torch.autograd.Function):
    """The identity, called after the layers of a stage: forward ends here, and backward begins here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: dict[str, float], clock: Clock) -> torch.Tensor:  # noqa: ANN401
        """Make forward as long as that of large blocks."""
        ctx.times = times
        clock.wait("forward", times["forward"])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        """Note when backward began."""
        ctx.times["backward"] = time.monotonic()
        return gradients[0], None, None


class Stage(nn.Module):
    """The part of the vision transformer that one rank has: some blocks, and what stands before or after all blocks."""

    def __init__(self, model: VisionTransformer, rank: int, world_size: int, clock: Clock) -> None:
        super().__init__()
        count = len(model.blocks) // world_size
        self.blocks = model.blocks[rank * count : (rank + 1) * count]
        self.embed = model.embed if rank == 0 else None
        self.positions = model.positions if rank == 0 else None
        self.norm = model.norm if rank == world_size - 1 else None
        self.head = model.head if rank == world_size - 1 else None
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images, or what the rank before has computed, to what the next rank needs, or to outputs (N, 10)."""
        times: dict[str, float] = {}
        if self.embed is not None:
            x = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        x = StartOfStage.apply(x, times, self.clock)
        for block in self.blocks:
            x = block(x)
        x = EndOfStage.apply(x.contiguous(), times, self.clock)  # to be sent, it must be in one piece of memory
        return self.head(self.norm(x)).mean(dim=1) if self.head is not None and self.norm is not None else x


def train(
    name: str, microbatches: int, rank: int, world_size: int, seconds: float, losses_of_one: list[float]
) -> dict[str, Any]:
    """Train with this schedule and return the figures and the time line of its fastest step but for the first.

    Args:
        name: a schedule, GPipe or 1F1B.
        microbatches: how many parts the batch is divided into; they pass through the stages one after the other.
        rank: number of the stage that this process has.
        world_size: number of stages.
        seconds: how long a forward pass of one micro-batch takes on each rank.
        losses_of_one: the loss of each step of one process.
    """
    clock = Clock(seconds)
    module = Stage(make_model(DEPTH), rank, world_size, clock)
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = SCHEDULES[name](stage, microbatches, loss_fn=LESSON.loss_function)
    optimizer = make_optimizer(module)
    losses, spans_of_steps = [], []
    for images, classes in batches(STEPS, BATCH_SIZE):
        clock.spans = []
        dist.barrier()
        if rank == 0:
            schedule.step(images)  # the first stage has the images
        elif rank < world_size - 1:
            schedule.step()  # a stage in the middle gets its inputs from the one before
        else:
            parts: list[torch.Tensor] = []  # the last stage has the classes, and so the losses of the micro-batches
            schedule.step(target=classes, losses=parts)
            losses.append(torch.stack(parts).mean().item())
        optimizer.step()
        optimizer.zero_grad()
        spans_of_steps.append(clock.spans)
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, (spans_of_steps, losses))
    # The first step does not count: in it, the stages also find out the shapes of what they send. Of the others, take
    # the one that other work on this machine disturbed least.
    _, *steps = zip(*(spans for spans, _ in every), strict=True)
    spans = min(steps, key=step_seconds)
    return {
        "schedule": name,
        "microbatches": microbatches,
        "loss_difference": max(abs(a - b) for a, b in zip(every[-1][1], losses_of_one, strict=True)),
        **idle_shares(spans, microbatches),
        "stored_microbatches": [most_stored(spans_of_rank) for spans_of_rank in spans],
        "time_line": relative(spans),
    }


def step_seconds(spans: Spans) -> float:
    """Return the seconds from the begin of the first rank to the end of the last one."""
    return max(end for rank in spans for *_, end in rank) - min(start for rank in spans for _, start, _ in rank)


def idle_shares(spans: Spans, microbatches: int) -> dict[str, Any]:
    """Return the seconds of a step, and the measured and the predicted share of it in which a rank is idle."""
    ranks = len(spans)
    seconds = step_seconds(spans)
    busy = sum(end - start for rank in spans for _, start, end in rank) / ranks
    return {
        "step_seconds": seconds,
        "idle_share": 1 - busy / seconds,
        "predicted_idle_share": (ranks - 1) / (microbatches + ranks - 1),
    }


def most_stored(spans: list[tuple[str, float, float]]) -> int:
    """Return for how many micro-batches a rank stores activations at the most: forward done, backward not done."""
    stored = most = 0
    for kind, _, _ in spans:
        stored += 1 if kind == "forward" else -1
        most = max(most, stored)
    return most


def relative(spans: Spans) -> list[list[tuple[str, float, float]]]:
    """Return the spans of each rank in milliseconds since the first one began."""
    begin = min(start for rank in spans for _, start, _ in rank)
    return [
        [(kind, round(1e3 * (start - begin), 2), round(1e3 * (end - begin), 2)) for kind, start, end in rank]
        for rank in spans
    ]


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the time line of four configurations, one under the other, on the same scale of time."""
    chosen = [row for row in rows if (row["schedule"], row["microbatches"]) in PLOTTED]
    chosen.sort(key=lambda row: PLOTTED.index((row["schedule"], row["microbatches"])))
    figure = Figure(figsize=(11, 9), layout="constrained")
    panels = figure.subplots(len(chosen), 1, sharex=True)
    for axes, row in zip(panels, chosen, strict=True):
        plot_time_line(axes, row)
    panels[-1].set_xlabel("milliseconds since the step began (emulated computation, real communication)")
    figure.savefig(file, dpi=110)


def plot_time_line(axes: Axes, row: dict[str, Any]) -> None:
    """Draw one line for each rank: a box for each forward and each backward pass of a micro-batch."""
    colors = {"forward": "tab:blue", "backward": "tab:orange"}
    for rank, spans in enumerate(row["time_line"]):
        numbers = dict.fromkeys(colors, 0)
        for kind, start, end in spans:
            numbers[kind] += 1
            axes.barh(rank, end - start, left=start, height=0.8, color=colors[kind], edgecolor="white", linewidth=0.8)
            axes.text((start + end) / 2, rank, str(numbers[kind]), ha="center", va="center", fontsize=8, color="white")
    axes.set_yticks(range(len(row["time_line"])), [f"rank {rank}" for rank in range(len(row["time_line"]))])
    axes.invert_yaxis()
    for spine in ("top", "right", "left"):
        axes.spines[spine].set_visible(False)
    axes.set_title(
        f"{row['schedule']}, {row['microbatches']} micro-batches: idle {row['idle_share']:.0%}, "
        f"rank 0 stores the activations of {row['stored_microbatches'][0]}",
        loc="left",
        fontweight="bold",
    )
    handles = [axes.barh(0, 0, color=color, label=kind) for kind, color in colors.items()]
    axes.legend(handles=handles, loc="lower right", ncols=2, fontsize=9)


def main(config: Config) -> None:
    """Train with each schedule together with the other ranks; rank 0 prints, plots and writes the results."""
    with process_group() as (rank, world_size, device):
        if device.type != "cpu":
            raise UserError(
                "this experiment emulates computation on CPUs; hide the GPUs: CUDA_VISIBLE_DEVICES= torchrun"
            )
        if world_size not in (2, 4):
            raise UserError(
                f"{DEPTH} blocks are given to 2 or to 4 ranks: "
                "torchrun --standalone --nproc-per-node 2 experiments/pipeline.py",
                already_reported=rank > 0,
            )
        if rank == 0:
            make_output_folder(config.out)
        torch.set_num_threads(1)
        losses = train_one_process(make_model(DEPTH), STEPS, BATCH_SIZE)
        rows = [
            train(name, microbatches, rank, world_size, config.milliseconds / 1e3, losses)
            for microbatches in MICROBATCHES
            if microbatches >= world_size  # 1F1B demands it
            for name in SCHEDULES
        ]
        if rank == 0:
            report(rows, world_size, config, device)


def report(rows: list[dict[str, Any]], world_size: int, config: Config, device: torch.device) -> None:
    """Print the table, and write the results and the plot."""
    cells = [
        (
            row["schedule"],
            str(row["microbatches"]),
            f"{row['loss_difference']:.0e}",
            f"{1e3 * row['step_seconds']:.0f}",
            f"{row['idle_share']:.0%}",
            f"{row['predicted_idle_share']:.0%}",
            ", ".join(map(str, row["stored_microbatches"])),
        )
        for row in rows
    ]
    print(f"{world_size} ranks, emulated computation ({config.milliseconds:g} ms forward), real communication\n")
    header = ("", "micro-batches", "loss differs by", "ms per step", "idle", "predicted", "stored by rank 0, 1, ...")
    print(format_table(header, cells))
    print("\nloss: largest difference from one process over four steps; stored: activations of so many micro-batches")
    file = config.out / f"pipeline_{world_size}_ranks.json"
    figures = about_run("pipeline.py", world_size) | {"ranks": world_size, "milliseconds": config.milliseconds}
    write_results(file, device, figures | {"rows": rows})
    plot(rows, file.with_suffix(".png"))
    print(f"\nwritten: {file}, {file.with_suffix('.png')}")


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
