"""A model that does not fit: DDP stops with "can't allocate memory", the same model trains with its state sharded.

    python experiments/limited_memory.py --quick true     # the limited runs alone, a minute
    python experiments/limited_memory.py                  # also how much lesson 04 needs, and lesson 05 on four ranks

Each rank may allocate as much for the training as --budget_mb says, as if it had a GPU with so little memory. You
should see that lesson 04 fails, and in which line of its script, and that lesson 05 trains the same model within this
limit. How the limit is set is explained by: python experiments/limited_train.py --help
"""

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import reason, torchrun
from lab.results import write_results
from lab.tables import format_table
from limited_train import MALLOC, check_system, read_peaks
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.models.vit import build_vit
from workshop.paths import REPOSITORY

LESSON_04, LESSON_05 = "04_mixed_precision", "05_fully_sharded"
PATCH = 7
UNLIMITED_MB = 10**6
ON_CPUS = MALLOC | {"CUDA_VISIBLE_DEVICES": ""}
BYTES_PER_PARAMETER = 16
"""in fp32 with AdamW: weight, gradient, and two numbers of optimizer state, of four bytes each"""
OUT_OF_MEMORY = r"DefaultCPUAllocator: can't allocate memory: you tried to allocate \d+ bytes"


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the command line, and the flags of train.py that follow from it."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--budget_mb", type=int, default=450, help="limit per rank, in 10^6 bytes (default: %(default)s)"
    )
    parser.add_argument("--vit_width", type=int, default=512, help="as in train.py (default: %(default)s)")
    parser.add_argument("--vit_depth", type=int, default=8, help="as in train.py (default: %(default)s)")
    parser.add_argument("--data_dir", help="as in train.py")
    parser.add_switch("--quick", "the two limited runs alone")
    parser.add_out("limited_memory.json")
    arguments = parser.parse_args()
    require_positive(arguments, "budget_mb", "vit_width", "vit_depth")
    check_system(arguments.budget_mb)
    flags = ["--model", "vit", "--vit_patch", PATCH, "--optimizer", "adamw", "--num_workers", 0, "--epochs", 1]
    flags += ["--vit_width", arguments.vit_width, "--vit_depth", arguments.vit_depth]
    flags += ["--limit_train", 16, "--limit_val", 8]
    flags += ["--data_dir", arguments.data_dir] if arguments.data_dir else []
    return arguments, [str(flag) for flag in flags]


def count_parameters(width: int, depth: int) -> int:
    """Return how many numbers the weights of the model are; `UserError` if train.py could not build it."""
    with torch.device("meta"):
        model = build_vit("mnist", 64, PATCH, width, depth)
    return sum(weights.numel() for weights in model.parameters())


def run(lesson: str, ranks: int, budget_mb: int, flags: list[str]) -> dict[str, Any]:
    """Train a lesson under a limit; return how much memory the ranks needed, or where they ran out of it.

    Raises:
        UserError: it failed for another reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *torchrun(ranks),
            str(Path(__file__).resolve().with_name("limited_train.py")),
            lesson,
            str(budget_mb),
            *flags,
        ]
        words += ["--batch_size", str(8 // ranks), "--run_dir", folder]
        lesson_folder = REPOSITORY / lesson
        result = subprocess.run(words, cwd=lesson_folder, env=os.environ | ON_CPUS, capture_output=True, text=True)
        row: dict[str, Any] = {"lesson": lesson, "ranks": ranks, "budget_mb": budget_mb}
        if result.returncode == 0:
            return row | {"peak_bytes": read_peaks(Path(folder))}
    if not (message := re.search(OUT_OF_MEMORY, result.stderr)):
        raise UserError(f"{lesson} failed for another reason than memory: {reason(result.stderr)}")
    # The traceback of the first rank that failed ends with the message; the last line of train.py in it is the place.
    before = result.stderr[: message.start()]
    places = re.findall(r'[/"]train\.py", line \d+, in (\w+)\n(?:\[rank\d+\]: *)?(.+)', before)
    function, line = places[-1] if places else ("train", "a line that the traceback does not show")
    return row | {"message": message[0], "function": function, "line": line.partition("  #")[0].strip()}


def describe(row: dict[str, Any]) -> list[str]:
    """Return the cells of a run for a table."""
    limit = "none" if row["budget_mb"] == UNLIMITED_MB else f"{row['budget_mb']} MB"
    if "message" in row:
        outcome, needed = f"out of memory in `{row['line']}`", f"> {row['budget_mb']} MB"
    else:
        outcome, needed = "trains", f"{max(row['peak_bytes']) / 1e6:.0f} MB"
    return [row["lesson"], str(row["ranks"]), limit, needed, outcome]


def main() -> None:
    """Run the lessons one after the other; print and save what they needed."""
    arguments, flags = parse_arguments()
    make_output_folder(arguments.out)
    parameters = count_parameters(arguments.vit_width, arguments.vit_depth)
    state = parameters * BYTES_PER_PARAMETER
    print(f"{parameters / 1e6:.1f} million parameters: {state / 1e6:.0f} MB of weights, gradients and optimizer state")
    runs = [(LESSON_04, 2, arguments.budget_mb), (LESSON_05, 2, arguments.budget_mb)]
    if not arguments.quick:
        runs += [(LESSON_04, 2, UNLIMITED_MB), (LESSON_05, 4, arguments.budget_mb)]
    rows = []
    for lesson, ranks, budget_mb in runs:
        rows.append(run(lesson, ranks, budget_mb, flags))
        if "message" in rows[-1]:
            print(f"{lesson} on {ranks} ranks: {rows[-1]['message']}", flush=True)
    print(format_table(["", "ranks", "limit", "needed by a rank", ""], [describe(row) for row in rows], left=(0, 4)))
    figures = {"parameters": parameters, "state_bytes": state, "budget_mb": arguments.budget_mb, "rows": rows}
    write_results(arguments.out / "limited_memory.json", torch.device("cpu"), figures)


if __name__ == "__main__":
    run_reporting_user_errors(main)
