"""Tensor cores need multiples of 8: the throughput of matrix products whose sizes differ by one.

    python experiments/tensor_cores.py --quick true      # seconds
    python experiments/tensor_cores.py                   # a minute

A tensor core multiplies small blocks of fixed size, and rows of a matrix are read in pieces of 16 bytes: eight numbers
of 16 bits. On a GPU you should see sizes that are multiples of 8 stand out in the 16-bit formats, and products that are
slightly smaller take longer. A CPU has no tensor cores but vector registers, of 16 numbers of 32 bits where it has
AVX-512, and its library pads what does not fit: there you should see much less of it.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from lab.flags import Parser, make_output_folder
from lab.results import write_results
from lab.tables import format_table
from matrix_peak import matmul_tflops
from workload import LESSON, training_device
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError

CENTRE = {"cuda": 4096, "cpu": 768}
"""the sizes lie around this one"""
FORMATS = {"cuda": ("fp32", "tf32", "bf16", "fp16"), "cpu": ("fp32", "bf16")}
ALIGNMENTS = (1, 2, 4, 8, 16)


def alignment(size: int) -> int:
    """Return the largest of `ALIGNMENTS` that divides ``size``."""
    return max(number for number in ALIGNMENTS if size % number == 0)


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument("--centre", type=int, metavar="N", help="middle of the sizes (4096 on a GPU, 768 on a CPU)")
    parser.add_argument("--around", type=int, default=16, metavar="K", help="sizes from N-K to N+K (%(default)s)")
    parser.add_switch("--quick", "256, plus or minus 8")
    parser.add_out("tensor_cores.json and tensor_cores.png")
    arguments = parser.parse_args()
    if arguments.around < 8:
        raise UserError(f"--around must be at least 8, so that there are multiples of 8, got {arguments.around}")
    if arguments.centre is not None and arguments.centre <= arguments.around:
        raise UserError(f"--centre must be above --around, {arguments.around}; got {arguments.centre}")
    return arguments


def sweep(precision: str, sizes: range, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Measure square products of all sizes, three times each and in turn; the median of each counts."""
    rates = {size: [] for size in sizes}
    for _ in range(3):
        for size in sizes:
            rates[size].append(matmul_tflops((size, size, size), precision, device, seconds))
    return [
        {"precision": precision, "size": size, "alignment": alignment(size), "tflops": statistics.median(found)}
        for size, found in rates.items()
    ]


def by_alignment(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Return the mean of the TFLOP/s of the sizes of each alignment."""
    return {
        number: statistics.mean(row["tflops"] for row in rows if row["alignment"] == number) for number in ALIGNMENTS
    }


def plot(rows: list[dict[str, Any]], conclusions: dict[str, str], file: Path) -> None:
    """Plot TFLOP/s over size, one panel for each number format; multiples of 8 are marked."""
    figure = Figure(figsize=(4.5 * len(conclusions), 3.8), layout="constrained")
    panels = figure.subplots(1, len(conclusions), squeeze=False)[0]
    for axes, (precision, conclusion) in zip(panels, conclusions.items(), strict=True):
        found = [row for row in rows if row["precision"] == precision]
        axes.plot([row["size"] for row in found], [row["tflops"] for row in found], color="tab:gray", linewidth=1)
        for label, colour, marked in (("multiple of 8", "tab:green", True), ("other", "tab:red", False)):
            chosen = [row for row in found if (row["alignment"] >= 8) == marked]
            sizes, rates = [row["size"] for row in chosen], [row["tflops"] for row in chosen]
            axes.plot(sizes, rates, "o", color=colour, label=label)
        axes.set_ylim(0, 1.1 * max(row["tflops"] for row in found))
        axes.set(xlabel="rows and columns", ylabel="TFLOP/s")
        axes.set_title(conclusion.replace(" are ", "\nare "), fontsize=10, fontweight="bold")
        axes.legend(fontsize=9)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measure, print, save and plot."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    device = training_device()
    centre = arguments.centre or (256 if arguments.quick else CENTRE[device.type])
    around = 8 if arguments.quick else arguments.around
    sizes, seconds = range(centre - around, centre + around + 1), 0.002 if arguments.quick else 0.05
    rows, conclusions = [], {}
    for precision in FORMATS[device.type]:
        try:
            LESSON.check_options(LESSON.Config(precision=precision), device)
        except UserError as error:
            print(f"not measured: {error}")
            continue
        found = sweep(precision, sizes, device, seconds)
        rates = by_alignment(found)
        eights = statistics.mean(row["tflops"] for row in found if row["alignment"] >= 8)
        others = statistics.mean(row["tflops"] for row in found if row["alignment"] < 8)
        conclusions[precision] = f"{precision}: multiples of 8 are {eights / others:.2f} times as fast as others"
        print(f"\n{precision}, sizes from {sizes[0]} to {sizes[-1]}")
        lines = [[str(number), f"{rate:.3g}"] for number, rate in rates.items()]
        print(format_table(["largest power of 2 in the size (16: or more)", "TFLOP/s"], lines))
        print(f"=> {conclusions[precision]}", flush=True)
        rows += found
    if device.type == "cpu":
        print("\nThis is a CPU, without tensor cores: what differs here is how well sizes fit its vector registers.")
    figures = {
        "conclusions": conclusions,
        "rows": rows,
    }
    json_file, plot_file = arguments.out / "tensor_cores.json", arguments.out / "tensor_cores.png"
    write_results(json_file, device, figures)
    plot(rows, conclusions, plot_file)
    print(f"\nwritten: {json_file}, {plot_file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
