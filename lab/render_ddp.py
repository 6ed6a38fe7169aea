"""Turn what was measured for lesson 03 into parts of its pages; cog calls this.

`python lab/render_ddp.py` draws the plots that are made of figures in results/ and of formulas, and the schematic ones.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lab.example_output import COMMANDS, FOLDER
from lab.render import MACHINE, RESULTS, figure, load, machine_of, not_measured, source, table
from workshop.paths import REPOSITORY

LESSON = REPOSITORY / "03_ddp"
RING = RESULTS / "ring_all_reduce.png"
LEARNING_RATES = RESULTS / "learning_rates.png"
PREDICTED = RESULTS / "predicted_scaling.png"
REQUEUE = RESULTS / "requeue.json"
REQUEUE_PLOT = RESULTS / "requeue.png"
CONVERGENCE = RESULTS / f"{MACHINE}_large_batches.png"
MANY_BATCHES = RESULTS / f"{MACHINE}_many_batches.png"
COLOURS = {
    "cifar10_b64": "black",
    "cifar10_b512_naive": "tab:red",
    "cifar10_b512_sqrt": "tab:orange",
    "cifar10_b512_sqrt_long": "tab:blue",
    "cifar10_b256_sqrt_long": "tab:green",
    "cifar10_b2048_sqrt_long": "tab:purple",
}
LABELS = {
    "cifar10_b64": "batch 64",
    "cifar10_b512_naive": "512, nothing else changed",
    "cifar10_b512_sqrt": "512, higher learning rate (sqrt)",
    "cifar10_b512_sqrt_long": "512, sqrt and 3x the epochs",
    "cifar10_b256_sqrt_long": "256, sqrt and 1.6x the epochs",
    "cifar10_b2048_sqrt_long": "2048, sqrt and 12x the epochs",
}
FOUR = ("cifar10_b64", "cifar10_b512_naive", "cifar10_b512_sqrt", "cifar10_b512_sqrt_long")
LONG = ("cifar10_b64", "cifar10_b256_sqrt_long", "cifar10_b512_sqrt_long", "cifar10_b2048_sqrt_long")


def output(name: str) -> str:
    """Return what a command of the page printed when it was run for the page."""
    command, _, text = (FOLDER / f"03_ddp_{name}.txt").read_text().partition("\n")
    if command != f"$ {COMMANDS[name]}":
        raise ValueError(f"python lab/example_output.py {name}: the command has changed")
    for pattern in SPEEDS:
        text = re.sub(pattern, "  ...", text, flags=re.MULTILINE)
    return f"```text\n{text}```"


SPEEDS = (r"  [\d,]+ samples/s  load .* ms$", r"  [\d.]+ s  [\d,]+ samples/s$")
"""of a line of training and of an epoch: left out, because they differ from run to run"""

JOB_FILE = {
    "#SBATCH --job-name": "the name that `squeue` shows",
    "#SBATCH --nodes": "how many nodes; `sbatch -N 2 job.slurm` asks for two",
    "#SBATCH --ntasks-per-node": "how many tasks `srun` starts on each node. A task is a rank, so this is the number "
    "of GPUs",
    "#SBATCH --gres": "GPUs *per node*. All tasks of a node see all of them; the local rank chooses one",
    "#SBATCH --cpus-per-task": "CPUs *per rank*, for its threads and its loader processes",
    "#SBATCH --mem": "memory of the host per node (the memory of a GPU is not asked for, it is part of the GPU)",
    "#SBATCH --time": "the time limit. A short one starts earlier",
    "#SBATCH --output": "the log; `%j` is the number of the job",
    "#SBATCH --open-mode": "a requeued job writes into the same log",
    "#SBATCH --requeue": "the job may go back into the queue",
    "#SBATCH --signal": "60 s before the time limit, Slurm sends SIGUSR1 to the ranks, which then save",
    "source ../slurm/setup.sh": "loads the environment of the site, sets the number of threads, prints the first "
    "lines of the "
    "log. It also passes `--cpus-per-task` on to `srun`, which does not inherit it since Slurm 22.05",
    "MASTER_ADDR=": "the address at which the ranks join: the first node of the job",
    "MASTER_PORT=": "a port that other jobs on this node do not use, computed from the number of the job",
    "export MASTER_ADDR": "makes `MASTER_ADDR` and `MASTER_PORT` visible to all ranks",
    "run=(bash -c": "what each rank runs: the script under the line profiler, with a file of its own",
    "if [[ ${NSYS-} ]]": "`NSYS=1 sbatch job.slurm` runs it under Nsight Systems instead",
    "srun --kill-on-bad-exit": "starts all ranks on all nodes, and ends all of them if one fails. `--resume true` "
    "continues "
    'from a checkpoint if there is one; `"$@"` are the flags that you typed after `job.slurm`',
}
"""what each line of job.slurm means, by its beginning"""


def job_file() -> str:
    """Render the lines of job.slurm and what each of them means.

    Raises:
        ValueError: a line is not explained, or an explained line is not there.
    """
    lines = (LESSON / "job.slurm").read_text().splitlines()
    options = [line.partition("#SBATCH ")[2].split("#")[0].strip() for line in lines if line.startswith("#SBATCH")]
    explained = [start.removeprefix("#SBATCH ") for start in JOB_FILE if start.startswith("#SBATCH")]
    if [option.partition("=")[0] for option in options] != explained:
        raise ValueError(f"job.slurm has the options {options}, and these are explained: {explained}")
    rows = []
    for start, meaning in JOB_FILE.items():
        line = next((line for line in lines if line.startswith(start)), None)
        if line is None:
            raise ValueError(f"job.slurm has no line that begins with {start!r}")
        shown = line.split("  #")[0].strip() if start.startswith("#SBATCH") else start.rstrip("(= ")
        rows.append((f"`{shown}`", meaning))
    return table(["line", "what it means"], rows)


# --- plots ------------------------------------------------------------------------------------------------------------


def learning_rates() -> str:
    """Show the plot of the learning rate by step."""
    what = (
        "Learning rate by step: it rises for a fifth of the steps, then falls to zero along a cosine. One rank: 50 "
        "steps, up to 1. Two ranks: 25 steps, up to 1 without scaling, 1.41 with sqrt, 2 with linear"
    )
    how = "*Computed with `lr_factor` for the command above, for the other values of `--lr_scaling`, and for one rank.*"
    return f"![{what}](../results/{LEARNING_RATES.name})\n\n{how}"


def draw_learning_rates(file: Path) -> None:
    """Draw the factor on --lr by step, as train.py computes it for 3,200 samples, for one rank and for two."""
    from lab.launching import load_script

    lr_factor = load_script(LESSON).lr_factor
    plot = Figure(figsize=(8, 3.8), layout="constrained")
    axis = plot.subplots()
    for label, ranks, scaling, style in (
        ("1 rank: 50 steps of 64", 1, "none", "k-"),
        ("2 ranks: 25 steps of 128, none", 2, "none", "b:"),
        ("2 ranks: 25 steps of 128, sqrt", 2, "sqrt", "b-"),
        ("2 ranks: 25 steps of 128, linear", 2, "linear", "b--"),
    ):
        config = SimpleNamespace(base_batch_size=64, lr_scaling=scaling, warmup=0.2)
        steps = 3200 // (64 * ranks)
        factors = [lr_factor(config, 64 * ranks, step, steps) for step in range(steps)]
        axis.plot(range(1, steps + 1), factors, style, marker=".", label=label)
    axis.set(xlabel="training step", ylabel="learning rate, in units of --lr", ylim=(0, 2.1), xlim=(0, 51))
    axis.grid(alpha=0.25)
    axis.legend()
    plot.savefig(file, dpi=110)


def convergence_figure() -> str:
    """Show the plot of the four runs that the lesson compares."""
    what = (
        "Validation loss by epoch and by training step. By epoch, batch 64 falls fastest; by step, it "
        "falls slowest. Batch 512 with a higher learning rate and a longer schedule ends lowest"
    )
    return f"![{what}](../results/{CONVERGENCE.name})\n\n{source(load('batches'))}"


def many_batches_figure() -> str:
    """Show the plot of batches from 64 to 2048."""
    what = (
        "Validation loss by training step and by samples, for batches of 64, 256, 512 and 2048. By step, 512 falls"
        " fastest, and 2048 not faster than that; by samples, the small batches need fewest"
    )
    return f"![{what}](../results/{MANY_BATCHES.name})"


def draw_curves(curves: dict[str, list[dict[str, Any]]], names: Sequence[str], by: Sequence[str], file: Path) -> None:
    """Draw validation losses into a PNG: medians over the seeds as lines, the range as a band.

    Args:
        curves: one for each seed, by the name of the run.
        names: the runs to draw.
        by: the horizontal axis of each panel: "epochs", "training steps" or "samples".
        file: to write.
    """
    plot = Figure(figsize=(11, 4.6), layout="constrained")
    panels = plot.subplots(1, len(by), sharey=True)
    for axis, unit in zip(panels, by, strict=True):
        for name in names:
            losses = np.array([curve["val_loss"] for curve in curves[name]])
            first = curves[name][0]
            steps = np.array(first["steps"])
            x = {
                "epochs": np.arange(1, len(steps) + 1),
                "training steps": steps,
                "samples": steps * first["global_batch_size"],
            }[unit]
            label = f"{LABELS[name]} ({len(losses)} seeds)"
            axis.plot(x, np.median(losses, axis=0), color=COLOURS[name], marker=".", label=label)
            axis.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=COLOURS[name], alpha=0.13, linewidth=0)
        axis.set(title=f"by {unit}", xlabel=unit, ylim=(0, 2.4))
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.grid(alpha=0.25)
    panels[0].set_ylabel("validation loss")
    handles, labels = panels[0].get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    plot.suptitle("Lines: median over the seeds. Bands: from the lowest to the highest seed.", fontsize=11)
    plot.savefig(file, dpi=110)


def predicted_figure() -> str:
    """Show the plot of the predicted efficiency up to 1,024 GPUs, with the published points."""
    what = (
        "Predicted efficiency from 2 to 1,024 ranks: for each batch a band between no overlap and full overlap. The two"
    )
    what += " published points at 128 GPUs, 78% and 89%, are inside their bands"
    return f"![{what}](../results/{PREDICTED.name})"


def draw_predicted(file: Path) -> None:
    """Draw the bounds that the alpha-beta model predicts for the published study, with its points."""
    import prediction
    from alpha_beta import Network
    from predict import plot

    network = Network(prediction.ALPHA_US * 1e-6, 1e-9 / prediction.GB_PER_SECOND)
    counts = [2**i for i in range(1, 11)]
    steps = prediction.published_steps().items()
    curves = {f"batch {batch}": prediction.curve(step, network, counts) for batch, step in steps}
    points = [(f"batch {p.batch_size}", prediction.GPUS_PUBLISHED, p.efficiency) for p in prediction.PUBLISHED]
    plot(curves, points, file)


RANKS = 3
"""of the schematic ring"""


def ring() -> str:
    """Show the schematic plot of a ring all-reduce."""
    what = (
        "Four frames of three ranks with three chunks each. At the start each rank has its own numbers; after two "
        "messages each rank has the complete sum of one chunk; after four messages all ranks have all sums"
    )
    return f"![{what}](../results/{RING.name})\n\n*Schematic. The letters say whose numbers a chunk contains.*"


def ring_frames() -> list[tuple[str, list[list[frozenset[int]]], list[tuple[int, int]]]]:
    """Return the frames of a ring all-reduce: title, [rank][chunk] whose numbers are in it, (rank, chunk) sent next."""
    state = [[frozenset({rank}) for _ in range(RANKS)] for rank in range(RANKS)]
    frames = []
    for number in range(2 * (RANKS - 1) + 1):
        gathering = number >= RANKS - 1
        shift = number - (RANKS - 1) if gathering else number
        sent = [(rank, (rank + gathering - shift) % RANKS) for rank in range(RANKS)] if number < 2 * (RANKS - 1) else []
        title = "at the start" if number == 0 else f"after message {number}"
        frames.append((title, [list(chunks) for chunks in state], sent))
        before = [list(chunks) for chunks in state]
        for rank, chunk in sent:
            right = (rank + 1) % RANKS
            arrived = before[rank][chunk]
            state[right][chunk] = arrived if gathering else before[right][chunk] | arrived
    return frames


LABELLED = 1.26
"""how wide the first frame is, which has the names of the chunks, if the others are 1"""


def draw_ring(file: Path) -> None:
    """Draw the ring all-reduce in four frames: the start, after one message, after two, and after the last."""
    frames = ring_frames()
    chosen = [frames[0], frames[1], frames[RANKS - 1], frames[-1]]
    notes = (
        "each rank sends one\nchunk to the right",
        "the right rank has added it,\nand sends on the sum",
        "each rank has one complete\nchunk, and passes it on",
        "all ranks have\nall sums",
    )
    plot = Figure(figsize=(11, 3.2), layout=ConstrainedLayoutEngine(wspace=0.06))
    frames_with_labels = (LABELLED, 1, 1, 1)
    panels = plot.subplots(1, 4, width_ratios=frames_with_labels)
    for axis, (title, state, sent), note, width in zip(panels, chosen, notes, frames_with_labels, strict=True):
        axis.set_title(f"{title}:\n{note}", fontsize=10)
        _draw_frame(axis, state, sent)
        right = axis.get_xlim()[1]
        axis.set_xlim(right - width * (right + 0.1), right)
    for chunk in range(RANKS):
        panels[0].text(-0.15, RANKS - 1 - chunk + 0.45, f"chunk {chunk}", ha="right", va="center", fontsize=9.5)
    plot.savefig(file, dpi=110)


def _draw_frame(axis: Axes, state: list[list[frozenset[int]]], sent: list[tuple[int, int]]) -> None:
    shades = {1: "#DCE9F5", 2: "#8FBFE6", 3: "#0072B2"}
    for rank, chunks in enumerate(state):
        axis.text(1.6 * rank + 0.5, RANKS + 0.15, f"rank {rank}", ha="center", fontsize=10)
        for chunk, whose in enumerate(chunks):
            place = (1.6 * rank, RANKS - 1 - chunk)
            axis.add_patch(Rectangle(place, 1, 0.9, facecolor=shades[len(whose)], edgecolor="black", linewidth=0.8))
            text = "+".join("abc"[one] for one in sorted(whose))
            color = "white" if len(whose) == RANKS else "black"
            axis.text(place[0] + 0.5, place[1] + 0.45, text, ha="center", va="center", fontsize=9, color=color)
    for rank, chunk in sent:
        height = RANKS - 1 - chunk + 0.45
        if rank < RANKS - 1:
            start, end, curve = (1.6 * rank + 1, height), (1.6 * (rank + 1), height), "arc3,rad=0"
        else:  # from the last rank to the first one, below the others
            start, end, curve = (1.6 * rank + 0.5, height - 0.45), (0.5, height - 0.45), "arc3,rad=-0.3"
        look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 14, "color": "tab:red", "linewidth": 1.8}
        axis.add_patch(FancyArrowPatch(start, end, connectionstyle=curve, **look))
    axis.set(xlim=(-0.1, 1.6 * RANKS - 0.4), ylim=(-0.6, RANKS + 0.5))
    axis.axis("off")


def step() -> str:
    """Show the time line of one training step on two ranks."""
    results = load("ddp_step", STEP_MACHINE)
    if not results:
        return not_measured("ddp_step")
    what = (
        "Time line of one training step on two ranks: forward, then backward, then the optimizer; below, the "
        "all-reduces of the buckets, which begin while backward is running and end at the same time on both ranks"
    )
    about = (
        f"One training step of a {results['model']} on two CPU ranks with {results['batch_size']} images each, and "
        f"with {results['buckets']} buckets: the shortest of {results['steps']} steps that were recorded. The machine "
        "was busy with other work, so a step took long, and the ranks are not equally fast. Look at the order of "
        "things, not at their lengths."
    )
    return f"{figure('ddp_step', what, STEP_MACHINE)}\n\n{about}\n{source(results)}"


STEP_MACHINE = "amd_epyc_avx2_2cpu"
"""where the time line was measured"""


def backward_milliseconds() -> str:
    """Say how long backward took with each number of buckets."""
    rows = load("bucket_timelines")["rows"]
    times = [f"{row['backward_milliseconds']:.0f} ms with {row['buckets']}" for row in rows]
    return (
        f"On average over the steps of its run, backward took {', '.join(times[:-1])} and {times[-1]} buckets. How "
        "much single steps differ was not kept, so these figures do not say which number of buckets is faster here."
    )


STATES = {
    "PD": ("waits in the queue", "#E69F00"),
    "R": ("runs", "#56B4E9"),
    "CG": ("ends", "#999999"),
    "CF": ("starts", "#009E73"),
}
"""Slurm's short names of a job's states, what they mean, and a colour"""


def requeue() -> str:
    """Show the time line of a job that is asked to stop and goes back into the queue."""
    if not REQUEUE.exists():
        return "*Not measured yet: `python lab/requeue_timeline.py`.*"
    what = (
        "Time line of a job: it trains, gets SIGUSR1, saves a checkpoint, waits in the queue, starts again, and "
        "resumes from the checkpoint"
    )
    about = (
        "A job of two ranks on the [cluster on one machine](../slurm/README.md#at-home). It got SIGUSR1 from "
        "`scancel --signal=USR1 <jobid>`, which only sends a signal and does not cancel the job. Before the time "
        "limit, Slurm would send the same signal. After the checkpoint, the ranks write their line profiles and end. "
        "In the thin grey part, Slurm ends the job (its state is *completing*). The machine was busy with other "
        "work, so all of this took long. Only the wait in the queue is short here: on a real cluster it can be "
        "minutes or hours."
    )
    return f"![{what}](../results/{REQUEUE_PLOT.name})\n\n{about}\n{source(json.loads(REQUEUE.read_text()))}"


SHOWN = ("SIGUSR1", "checkpoint saved", "starts again")
"""the events in the plot; it begins and ends half a minute before and after them"""


def draw_requeue(seen: dict[str, Any], file: Path) -> None:
    """Draw the states of the job around the signal as bars, and above them what happened, into a PNG."""
    plot = Figure(figsize=(9, 2.6), layout="constrained")
    axis = plot.subplots()
    events = {name: seen["events"][name] for name in SHOWN}
    first, last = min(events.values()) - 30, max(events.values()) + 30
    ends = [start for start, _ in seen["states"][1:]]
    labelled = set()
    for (start, name), stop in zip(seen["states"], ends, strict=False):
        if stop < first or start > last:
            continue
        label, colour = STATES[name]
        if stop - start < (last - first) / 200:  # a thin line
            label += f" ({stop - start:.1f} s)"
        axis.broken_barh([(start, stop - start)], (0, 1), color=colour, label=None if label in labelled else label)
        labelled.add(label)
    for number, (name, at) in enumerate(events.items()):
        height = 1.4 + 0.5 * number
        axis.plot([at, at], [0, height], color="black", linewidth=1)
        side = "right" if number == 0 else "left"
        axis.text(at, height, f" {name} ", ha=side, va="top", fontsize=10)
    end = next(stop for (_, name), stop in zip(seen["states"], ends, strict=False) if name == "R")
    ending = (events["checkpoint saved"] + end) / 2
    for at, text in ((first + 12, "trains"), (ending, "profiles, end of ranks"), (last - 15, "resumes and trains")):
        axis.text(at, 0.5, text, ha="center", va="center", fontsize=10)
    axis.set(xlim=(first, last), ylim=(0, 3.1), yticks=())
    axis.set_xlabel(f"seconds since sbatch; the first {first:.0f} s are not shown")
    axis.spines[["top", "right", "left"]].set_visible(False)
    plot.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=9.5)
    plot.savefig(file, dpi=110)


def redraw_allreduce(file: Path) -> None:
    """Draw the all-reduce of the pages' machine from its results."""
    from allreduce import plot
    from alpha_beta import Network

    results = load("allreduce")
    network = Network(results["alpha"], results["beta"])
    plot(results["rows"], results["world_size"], results["backend"], network, file)


def main() -> None:
    """Draw all plots, or those that are named on the command line."""
    sys.path.append(str(LESSON / "experiments"))  # whose functions draw two of them
    curves = load("batches")["curves"]
    plots: dict[str, Callable[[], None]] = {
        "ring": lambda: draw_ring(RING),
        "learning_rates": lambda: draw_learning_rates(LEARNING_RATES),
        "predicted": lambda: draw_predicted(PREDICTED),
        "convergence": lambda: draw_curves(curves, FOUR, ("epochs", "training steps"), CONVERGENCE),
        "many_batches": lambda: draw_curves(curves, LONG, ("training steps", "samples"), MANY_BATCHES),
        "requeue": lambda: draw_requeue(json.loads(REQUEUE.read_text()), REQUEUE_PLOT),
        "allreduce": lambda: redraw_allreduce(RESULTS / f"{machine_of('allreduce')}_allreduce.png"),
    }
    for name in sys.argv[1:] or plots:
        plots[name]()


if __name__ == "__main__":
    main()
