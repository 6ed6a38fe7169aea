"""What happens in a step of DDP? One training step of train.py on a time line of two CPU ranks.

    python experiments/ddp_step.py

You should see that the all-reduces of the first buckets begin while backward is still running, and that each of them
ends at the same time on both ranks. Of the traced steps, the shortest is plotted.
"""

import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab import results
from lab.flags import Parser
from lab.launching import train
from workshop.errors import run_reporting_user_errors
from workshop.profiling.chrome_trace import CPU_RANGE, read_events
from workshop.profiling.timeline import COLORS

LESSON = Path(__file__).resolve().parents[1]
RANKS, STEPS = 2, 16
"""steps of the run: the first ones warm up the profiler, the last ones are traced"""
PARTS = ("forward", "backward", "optimizer")
REDUCED = "all-reduces"
Span = tuple[float, float]
"""start and length in milliseconds, on a clock that all ranks of a machine share"""
Step = dict[str, list[Span]]
"""one span of forward, backward and optimizer each, and the spans of the all-reduces"""


def read_steps(trace: Path) -> list[Step]:
    """Return the training steps of a trace."""
    events = read_events(trace)
    reduced = [_milliseconds(event) for event in events if event["name"] == "gloo:all_reduce"]
    parts = [
        [_milliseconds(event) for event in events if event.get("cat") == CPU_RANGE and event["name"] == name]
        for name in PARTS
    ]
    steps = []
    for forward, backward, optimizer in zip(*parts, strict=True):
        start, length = backward  # the ranks reduce other values too, but not during backward
        inside = [span for span in reduced if start <= span[0] <= start + length]
        steps.append({"forward": [forward], "backward": [backward], "optimizer": [optimizer], REDUCED: inside})
    return steps


def _milliseconds(event: dict) -> Span:
    return event["ts"] / 1000, event["dur"] / 1000


def plot(ranks: tuple[Step, ...]) -> Figure:
    """Return a plot of a step of all ranks, one below the other, on the same clock."""
    figure = Figure(figsize=(10, 0.8 + 1.5 * len(ranks)), layout="constrained")
    panels = figure.subplots(len(ranks), sharex=True, squeeze=False)[:, 0]
    first = min(step["forward"][0][0] for step in ranks)
    for rank, (axes, step) in enumerate(zip(panels, ranks, strict=True)):
        for name in PARTS:
            bars = [(start - first, length) for start, length in step[name]]
            axes.broken_barh(bars, (-0.4, 0.8), color=COLORS[name])
        for number, (start, length) in enumerate(step[REDUCED], start=1):
            top = 0.6 + 0.4 * ((number + 1) % 2)  # above and below in turn: a bucket may begin before the last one ends
            axes.broken_barh([(start - first, length)], (top, 0.4), color=COLORS[REDUCED], edgecolor="white")
            middle = start - first + length / 2
            axes.text(middle, top + 0.2, str(number), ha="center", va="center", fontsize=9, color="white")
        axes.set(ylim=(1.6, -0.6), xlim=(0, None), yticks=(0, 1), yticklabels=("train.py", REDUCED))
        axes.set_title(f"rank {rank}", loc="left", fontsize=11)
    panels[-1].set_xlabel("milliseconds; the numbers are those of the buckets, in the order in which they are ready")
    handles = [Patch(color=COLORS[name], label=name) for name in PARTS]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=9, frameon=False)
    return figure


def main() -> None:
    """Trace, choose the shortest step, store and plot it."""
    parser = Parser(__doc__)
    parser.add_argument("--model", default="resnet18", help="any classifier (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="images per rank (default: %(default)s)")
    arguments = parser.parse_args()
    samples = RANKS * arguments.batch_size
    flags: tuple[object, ...]
    flags = ("--config", "../configs/cifar10.yaml", "--loader", "memory", "--num_workers", 0, "--optimizer", "sgd")
    flags += ("--model", arguments.model, "--batch_size", arguments.batch_size, "--epochs", 1, "--trace", "true")
    flags += ("--limit_train", STEPS * samples, "--limit_val", samples)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder)
        train(LESSON, *flags, ranks=RANKS, on_cpu=True, quiet=True, keep="rank*.json.gz", keep_in=kept)
        steps = list(zip(*(read_steps(file) for file in sorted(kept.iterdir())), strict=True))
    shortest = min(steps, key=lambda ranks: ranks[0]["optimizer"][0][0] - ranks[0]["forward"][0][0])
    results.store(
        "ddp_step",
        title="One training step of DDP",
        columns=["rank", *PARTS, REDUCED],
        rows=[
            [str(rank), *(step[name][0][1] for name in PARTS), len(step[REDUCED])] for rank, step in enumerate(shortest)
        ],
        formats=dict.fromkeys(PARTS, ".0f") | {REDUCED: ".0f"},
        unit="milliseconds",
        spread=f"the shortest of {len(steps)} steps",
        figure=plot(shortest),
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
