"""How far would it scale? Predicts weak scaling from the time of a step, its gradients, and two numbers of a network.

    python experiments/predict.py                                                  # a published study on 128 GPUs
    python experiments/predict.py --allreduce allreduce.json --scaling scaling.json  # what was measured here

You should see the predicted efficiency beside the published or the measured one. The lower bound is for communication
that does not overlap with backward, the upper bound for one of which all but the last bucket overlaps. The flags'
defaults describe that study: the same U-Net and GPUs, and the network of its nodes at that time, as far as it is known.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, PercentFormatter

import prediction
from alpha_beta import Network
from lab.flags import Parser, make_output_folder, require_positive
from lab.results import write_results
from lab.tables import format_seconds, format_table
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.hardware import pick_device


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)

    def number(flag: str, default: float, text: str) -> None:
        parser.add_argument(flag, type=float, default=default, help=f"{text} (default: %(default)s)")

    number("--samples_per_second", prediction.SAMPLES_PER_SECOND, "of one GPU that trains alone")
    number("--parameters", prediction.PARAMETERS, "of the model; their gradients have 4 bytes each")
    text = "all-reduces per step (default: %(default)s)"
    parser.add_argument("--buckets", type=int, default=prediction.BUCKETS, help=text)
    number("--gb_per_second", prediction.GB_PER_SECOND, "from a node into the network")
    number("--alpha_us", prediction.ALPHA_US, "microseconds per message")
    parser.add_argument("--max_ranks", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--allreduce", type=Path, metavar="FILE", help="allreduce.json of this machine")
    parser.add_argument("--scaling", type=Path, metavar="FILE", help="scaling.json of this machine")
    parser.add_out("predict.json and predict.png")
    arguments = parser.parse_args()
    require_positive(arguments, "samples_per_second", "parameters", "buckets", "gb_per_second")
    if arguments.alpha_us < 0 or arguments.max_ranks < 2:
        raise UserError("--alpha_us must be 0 or more, --max_ranks 2 or more")
    if bool(arguments.allreduce) != bool(arguments.scaling):
        raise UserError("give both --allreduce FILE and --scaling FILE, or neither")
    return arguments


def read(file: Path) -> dict[str, Any]:
    """Return the results that another script wrote.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None


def predict_published(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print and plot the prediction for the published study; return it."""
    network = Network(arguments.alpha_us * 1e-6, 1e-9 / arguments.gb_per_second)
    steps = prediction.published_steps(arguments.samples_per_second, arguments.parameters, arguments.buckets)
    counts = [2**i for i in range(1, arguments.max_ranks.bit_length())]
    curves = {f"batch {batch}": prediction.curve(step, network, counts) for batch, step in steps.items()}
    header = ["ranks", *(f"{name}: {bound}" for name in curves for bound in ("no overlap", "full overlap"))]
    cells = [[f"{n:,}", *(f"{value:.0%}" for found in curves.values() for value in found[n])] for n in counts]
    print("Predicted weak-scaling efficiency, without and with full overlap of communication and backward\n")
    print(format_table(header, cells, left=()))

    rows = prediction.against_published(steps, network)
    print(f"\nBeside the published figures, {prediction.GPUS_PUBLISHED} GPUs; off by: percentage points\n")
    print(format_table(prediction.published_header(), [prediction.published_cells(row) for row in rows]))
    print("\nWith the bandwidth at which the model gives the published figure of batch 64; batch 128 is the test\n")
    print(format_table(prediction.calibrated_header(), [prediction.calibrated_cells(row) for row in rows]))
    points = [(f"batch {p.batch_size}", prediction.GPUS_PUBLISHED, p.efficiency) for p in prediction.PUBLISHED]
    plot(curves, points, arguments.out / "predict.png")
    assumed = {name: getattr(arguments, name) for name in ("samples_per_second", "parameters", "buckets")}
    assumed |= {"gb_per_second": arguments.gb_per_second, "alpha_us": arguments.alpha_us}
    return {"assumed": assumed, "curves": curves, "published": rows}


def plot(curves: dict[str, dict[int, tuple[float, float]]], published: Sequence[Any], file: Path) -> None:
    """Draw predicted weak-scaling efficiency by number of ranks into a PNG, with the published points on it.

    Args:
        curves: by name, (efficiency without overlap, with overlap) by number of ranks; a band is drawn between them.
        published: (name of its curve, ranks, efficiency) of each point.
        file: to write.
    """
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axis: Axes = figure.subplots()
    colours = dict(zip(curves, ("tab:orange", "tab:blue", "tab:green", "tab:red"), strict=False))
    for name, found in curves.items():
        ranks = list(found)
        none, full = zip(*found.values(), strict=True)
        axis.fill_between(ranks, none, full, color=colours[name], alpha=0.2, linewidth=0)
        axis.plot(ranks, full, "-", color=colours[name], label=f"{name}: full overlap")
        axis.plot(ranks, none, "--", color=colours[name], label=f"{name}: no overlap")
    for name, count, efficiency in published:
        axis.plot(count, efficiency, "*", markersize=16, markeredgecolor="black", color=colours[name])
        text = axis.annotate(f"published {efficiency:.0%}", (count, efficiency), (12, -4), textcoords="offset points")
        text.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})  # lines pass behind it
    axis.set(title="Weak scaling: predicted bounds", xscale="log", ylim=(0, 1.05))
    axis.set(xlabel="ranks, one per GPU", ylabel="efficiency: speed over ranks times one rank's")
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.xaxis.set_major_locator(FixedLocator(ranks))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,g}"))
    axis.xaxis.set_minor_locator(FixedLocator([]))
    axis.grid(alpha=0.25)
    axis.legend(loc="lower left")
    figure.savefig(file, dpi=110)


def predict_measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the prediction for this machine's own study beside what was measured; return it.

    Raises:
        UserError: the files are not those of the study.
    """
    allreduce, scaling = read(arguments.allreduce), read(arguments.scaling)
    try:
        rows = prediction.against_measured(scaling, allreduce)
    except (KeyError, TypeError) as error:
        files = f"{arguments.allreduce} and {arguments.scaling}"
        raise UserError(f"{files} are not what allreduce.py and scaling.py write: {error} is missing") from None
    cells = [
        [
            str(row["ranks"]),
            format_seconds(row["compute_seconds"]),
            format_seconds(row["all_reduce_seconds"]),
            *(f"{row[name]:.0%}" for name in prediction.OVERLAPS),
            str(row["measured"]),
        ]
        for row in rows
    ]
    print("Throughput with communication over that without, weak scaling on this machine\n")
    header = ["ranks", "step without communication", "all-reduces", *prediction.OVERLAPS, "measured"]
    print(format_table(header, cells, left=()))
    return {"measured": [row | {"measured": asdict(row["measured"])} for row in rows]}


def main() -> None:
    """Predict; write the results."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    found = predict_measured(arguments) if arguments.allreduce else predict_published(arguments)
    file = arguments.out / "predict.json"
    write_results(file, pick_device(), found)
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
