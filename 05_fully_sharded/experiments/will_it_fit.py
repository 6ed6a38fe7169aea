"""Will it fit? How many bytes of tensors each rank needs, for any number of ranks, without a GPU.

    python experiments/will_it_fit.py --model vit --ranks 2,8                       # every way of sharing the model
    python experiments/will_it_fit.py --model gpt_7b --ranks 8,64,1024              # minutes: 6.7 billion weights
    python experiments/will_it_fit.py --model vit --ranks 8 --budget_gb 0.1,1       # what fits into so much memory?
    python experiments/will_it_fit.py --check true                                  # is that what two ranks allocate?

You should see that DDP needs as much on any number of ranks, that sharding per block needs least, and that from some
number of ranks on more ranks save nothing: activations are not sharded. The seconds of a step are bounds: nothing but
communication and matrix products, at the speeds of a data sheet.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import step_time
from alpha_beta import Network
from lab import memory_tables
from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import run_and_read, torchrun
from lab.machine_facts import ask
from lab.results import write_results
from lab.tables import format_table
from memory_model import (
    LESSON,
    NOT_COUNTED,
    UPDATES,
    WAYS,
    WORKLOADS,
    Setup,
    build,
    cached,
    estimate,
    private_tools,
    workload,
)
from memory_on_ranks import setups as checked_setups
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError, nearest

GB = 1e9
LESSON_FOLDER = Path(__file__).resolve().parent.parent
MOST_RANKS = 1024
"""the most ranks that are tried when the smallest number of ranks is looked for"""
LARGEST = 2**20
"""the largest batch or number of blocks that is tried"""


def numbers(kind: type) -> Callable[[str], list[Any]]:
    """Return what reads positive numbers that are separated by commas."""

    def read(text: str) -> list[Any]:
        try:
            found = [kind(word) for word in text.split(",")]
        except ValueError:
            found = [0]
        if not all(number > 0 and math.isfinite(number) for number in found):
            raise argparse.ArgumentTypeError(f"takes positive numbers, separated by commas, got '{text}'")
        return found

    return read


def words(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return what reads some of these words, separated by commas."""

    def read(text: str) -> list[str]:
        for word in text.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"does not know '{word}'; {nearest(word, known)}")
        return text.split(",")

    return read


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument("--model", default="vit", help=f"one of {', '.join(WORKLOADS)} (default: %(default)s)")
    parser.add_argument(
        "--num_blocks", dest="depth", type=int, default=0, help="number of blocks, if not that of the model"
    )
    parser.add_argument("--ranks", type=numbers(int), default=[8], metavar="N,...", help="default: 8")
    parser.add_argument("--batch_size", type=int, default=1, help="samples per rank (default: %(default)s)")
    parser.add_argument("--ways", type=words(WAYS), default=list(WAYS), help=f"some of {','.join(WAYS)} (default: all)")
    checkpointing = {"both": (False, True), "true": (True,), "false": (False,)}
    parser.add_argument("--checkpointing", choices=checkpointing, default="both", help="activation checkpointing")
    parser.add_argument("--replicas", type=int, default=1, help="HSDP: groups of ranks that each hold the whole model")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="default: %(default)s")
    parser.add_argument("--update", choices=UPDATES, default="foreach", help="the optimizer's (default: %(default)s)")
    parser.add_argument("--budget_gb", type=numbers(float), metavar="GB,...", help="what fits into so much memory?")
    parser.add_argument("--reserve_gb", type=float, default=2.0, help="of a budget, not for tensors (%(default)s)")
    parser.add_argument("--tflops", default="", metavar="N", help="10^12 operations per second of a rank, or: measure")
    parser.add_argument("--gb_per_second", type=float, default=step_time.GB_PER_SECOND, help="default: %(default)s")
    parser.add_argument("--alpha_us", type=float, default=step_time.ALPHA_US, help="per message (default: %(default)s)")
    parser.add_switch("--check", "compare the forecast with two real ranks on this machine instead")
    parser.add_out("will_it_fit.json")
    arguments = parser.parse_args()
    require_positive(arguments, "batch_size", "replicas", "gb_per_second")
    if arguments.depth < 0 or arguments.alpha_us < 0 or arguments.reserve_gb < 0:
        raise UserError("--num_blocks, --alpha_us and --reserve_gb must be 0 or more")
    arguments.checkpointing = checkpointing[arguments.checkpointing]
    arguments.tflops = tflops_of(arguments.tflops, arguments.precision)
    for ranks in arguments.ranks:
        for way in arguments.ways:
            setup = setup_of(arguments, ranks, way, arguments.checkpointing[-1])
    check_blocks(setup, arguments.ways)
    return arguments


def tflops_of(text: str, precision: str) -> float:
    """Return the 10^12 operations per second that ``--tflops`` names; that of an H100 if it was not given."""
    if text == "measure":
        return float(ask("peak", precision))
    try:
        found = float(text or step_time.TFLOPS[precision])
    except ValueError:
        found = 0.0
    if not found > 0:
        raise UserError(f"--tflops takes a positive number, or the word measure, got '{text}'")
    return found


def setup_of(arguments: argparse.Namespace, ranks: int, way: str, checkpointing: bool) -> Setup:
    """Return what the flags ask, for one number of ranks and one way of sharing the model."""
    return Setup(
        model=arguments.model,
        depth=arguments.depth,
        batch_size=arguments.batch_size,
        ranks=ranks,
        way=way,
        checkpointing=checkpointing,
        replicas=1 if way == "ddp" else arguments.replicas,
        precision=arguments.precision,
        update=arguments.update,
    )


def check_blocks(setup: Setup, ways: list[str]) -> None:
    """Raise `UserError` if blocks are needed, and the model has none."""
    with private_tools().FakeTensorMode():
        model = build(replace(setup, depth=1 if workload(setup.model).depth else 0))
    if {"blocks", "keep"} & set(ways) and not LESSON.blocks_of(model):
        build(replace(setup, checkpointing=True))  # says so


def forecast(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the most bytes per rank and the bounds of a step's time, for each way, choice and number of ranks."""
    network = Network(arguments.alpha_us * 1e-6, 1e-9 / arguments.gb_per_second)
    rows = []
    for way in arguments.ways:
        for checkpointing in arguments.checkpointing:
            for ranks in arguments.ranks:
                setup = setup_of(arguments, ranks, way, checkpointing)
                # DDP needs as much on any number of ranks, so that is computed once
                found = cached(replace(setup, ranks=1) if way == "ddp" else setup)
                rows.append(
                    {"way": way, "checkpointing": checkpointing, "ranks": ranks, "replicas": setup.replicas}
                    | {"peak": found.peak, "parts": found.parts, "moment": found.moment, "parameters": found.parameters}
                    | {"cpu_seconds": found.seconds, "step": step_time.step_bounds(setup, arguments.tflops, network)}
                )
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def print_forecast(rows: list[dict[str, Any]]) -> None:
    """Print the tables of the rows of `forecast`."""
    print("What a rank holds at the moment of the step when it holds most\n")
    header, cells = memory_tables.forecast(rows)
    print(format_table(header, cells, left=(0, len(header) - 1)))
    print("\nBounds of the time of a step\n")
    print(format_table(*memory_tables.times(rows)))


def largest(peak: Callable[[int], float], budget: float) -> int:
    """Return the largest whole number whose peak is within the budget; 0 if that of 1 is above.

    A peak is the highest of several moments, and the bytes of each moment grow evenly with the batch or the number of
    blocks. So the curve bends upwards only, and the chord between a number that fits and one that does not is above it.
    """
    fits, above = 0, 0
    known: dict[int, float] = {}
    number = 1
    while number <= LARGEST:
        known[number] = peak(number)
        if known[number] <= budget:
            fits = number
        else:
            above = number
        if above == fits + 1:
            break
        if not above:
            number = 2 * fits
            before = [other for other in known if other < fits]
            if before:
                slope = (known[fits] - known[max(before)]) / (fits - max(before))
                number = min(LARGEST, fits + 1 + int((budget - known[fits]) / slope)) if slope > 0 else number
                number = max(number, fits + 1)
        elif not fits:
            break
        else:
            chord = fits + int((above - fits) * (budget - known[fits]) / (known[above] - known[fits]))
            number = min(max(chord, fits + 1), above - 1)
    return fits


def verified(setup: Setup, name: str, number: int, budget: float, step: Callable[[int], int]) -> dict[str, Any]:
    """Return the number and the peak of the whole model with it, after ``step`` was called until that peak fits."""
    while number > 0:
        found = cached(replace(setup, **{name: number}))
        if found.peak <= budget:
            return {"number": number, "peak": found.peak}
        number = step(number)
    return {"number": 0, "peak": None}


def inverse(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each budget and way the fewest ranks, the largest batch and the most blocks that fit.

    Each is found on estimates from shallow models; then the whole model is computed with it, and the number is made
    smaller (of ranks: larger) until that fits. A model of more than twice as many blocks is estimated only.

    Raises:
        UserError: nothing fits into any of the budgets.
    """
    rows = []
    ways = [way for way in arguments.ways if way != "ddp"] if len(arguments.ranks) > 1 else arguments.ways
    for budget_gb in arguments.budget_gb:
        budget = (budget_gb - arguments.reserve_gb) * GB
        for way in ways:
            for checkpointing in arguments.checkpointing:
                setup = setup_of(arguments, arguments.ranks[0], way, checkpointing)
                row = {"budget_gb": budget_gb, "way": way, "checkpointing": checkpointing, "ranks": setup.ranks}
                row["fewest_ranks"] = fewest_ranks(setup, budget)
                row["largest_batch"] = largest_of(setup, "batch_size", budget)
                row["most_blocks"] = largest_of(setup, "depth", budget) if workload(setup.model).depth else None
                rows.append(row)
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if not any(row["fewest_ranks"]["number"] or row["largest_batch"]["number"] for row in rows):
        most = max(arguments.budget_gb)
        least = min(estimate(setup_of(arguments, most_ranks(arguments), "blocks", True)), LARGEST * GB) / GB
        raise UserError(
            f"--budget_gb {most:g}: no number of ranks up to {MOST_RANKS:,} is enough for --model {arguments.model}; "
            f"they need about {least + arguments.reserve_gb:.3g} GB each, {arguments.reserve_gb:g} GB of it in reserve"
        )
    return rows


def most_ranks(arguments: argparse.Namespace) -> int:
    """Return the largest number of ranks that is tried and can form the groups that were asked for."""
    return MOST_RANKS // arguments.replicas * arguments.replicas or arguments.replicas


def alone_if_ddp(setup: Setup) -> Setup:
    """Return the setup with one rank if it is DDP's, which needs as much on any number of ranks."""
    return replace(setup, ranks=1) if setup.way == "ddp" else setup


def fewest_ranks(setup: Setup, budget: float) -> dict[str, Any]:
    """Return the fewest ranks, a power of two times the number of groups, whose peak is within the budget."""
    counts = [setup.replicas * 2**power for power in range(MOST_RANKS.bit_length())]
    counts = [count for count in counts if count <= MOST_RANKS] if setup.way != "ddp" else [1]
    low, high = 0, len(counts)
    while low < high:
        middle = (low + high) // 2
        if estimate(replace(setup, ranks=counts[middle])) <= budget:
            high = middle
        else:
            low = middle + 1
    if low == len(counts):
        return {"number": 0, "peak": None}

    def more(number: int) -> int:
        return 2 * number if 2 * number <= counts[-1] else 0

    return verified(setup, "ranks", counts[low], budget, more)


def largest_of(setup: Setup, name: str, budget: float) -> dict[str, Any]:
    """Return the largest ``batch_size`` or ``depth`` whose peak is within the budget."""
    setup = alone_if_ddp(setup)
    found = largest(lambda number: estimate(replace(setup, **{name: number})), budget)
    if name == "depth" and found > 2 * workload(setup.model).depth:  # computing so deep a model takes minutes
        return {"number": found, "peak": int(estimate(replace(setup, depth=found))), "estimated": True}
    return verified(setup, name, found, budget, lambda number: number - max(1, number // 50))


def print_inverse(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print a table of the rows of `inverse`."""

    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return "-"
        about = "about " if found.get("estimated") else ""
        return f"{about}{found['number']:,} ({found['peak'] / GB:.4g} GB)" if found["number"] else "none"

    cells = [
        [
            f"{row['budget_gb']:g}",
            row["way"],
            "yes" if row["checkpointing"] else "no",
            *(cell(row[name]) for name in ("fewest_ranks", "largest_batch", "most_blocks")),
        ]
        for row in rows
    ]
    ranks = f"on {arguments.ranks[0]} ranks"
    header = ["GB", "way", "checkpointing", f"fewest ranks, batch {arguments.batch_size}"]
    print(format_table([*header, f"largest batch {ranks}", f"most blocks {ranks}"], cells, left=(1, 2)))
    print(f"\nOf each budget, {arguments.reserve_gb:g} GB (--reserve_gb) are left for what is not counted.")


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start two ranks that measure what they allocate; return the rows with what was predicted for them."""
    script = Path(__file__).resolve().with_name("memory_on_ranks.py")
    found = run_and_read([*torchrun(2), script], LESSON_FOLDER, threads=1)
    rows = []
    for setup, row in zip(checked_setups(found["ranks"], found["rows"][0]["update"]), found["rows"], strict=True):
        predicted = cached(alone_if_ddp(setup)).peak
        rows.append(row | {"predicted": predicted, "ratio": row["measured"] / predicted})
    cells = [
        [
            row["way"],
            "yes" if row["checkpointing"] else "no",
            f"{row['predicted'] / 1e6:.2f}",
            f"{row['measured'] / 1e6:.2f}",
            f"{row['ratio'] - 1:+.1%}",
        ]
        for row in rows
    ]
    print(format_table(["way", "checkpointing", "predicted, MB", "measured, MB", ""], cells, left=(0, 1)))
    return {"model": workload(checked_setups(2, "loop")[0].model).what, "ranks": found["ranks"], "rows": rows}


def main() -> None:
    """Forecast, or check the forecast; print and save."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    if arguments.check:
        figures = check(arguments)
    else:
        what = workload(arguments.model).what
        print(f"{what}\nbatch {arguments.batch_size} per rank, {arguments.precision}, AdamW ({arguments.update})\n")
        asked = {name: getattr(arguments, name) for name in ("batch_size", "precision", "update", "replicas", "depth")}
        figures = {"model": arguments.model, "what": what} | asked
        if arguments.budget_gb:
            figures |= {"reserve_gb": arguments.reserve_gb, "rows": inverse(arguments)}
            print_inverse(figures["rows"], arguments)
        else:
            names = ("tflops", "gb_per_second", "alpha_us")
            figures |= {name: getattr(arguments, name) for name in names} | {"rows": forecast(arguments)}
            print_forecast(figures["rows"])
        print(f"\n{NOT_COUNTED}")
    file = arguments.out / "will_it_fit.json"
    write_results(file, torch.device("cpu"), figures)
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
