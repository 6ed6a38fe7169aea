"""Run a training script on several numbers of ranks, with the same global batch, and compare each update.

    rankdoctor parity --ranks 1,2,4 train.py --batch_size '{64/ranks}'

An argument of the script may contain expressions of `ranks` in braces: numbers, ranks, + - * / // and parentheses. The
script must train on the same samples on any number of ranks, so seed its shuffling. Dropout is switched off, because
ranks draw other random numbers for their parts of a batch. The first number of ranks runs twice, to see whether a run
can be repeated at all; and once more, if the first updates are equal and later ones differ, from weights that are a
rounding error away, to see how far rounding alone would have led.
Exit status: 0 if all updates are equal within rounding, 1 if one differs, 2 if they cannot be compared.
"""

import argparse
import contextlib
import json
import re
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

from . import cli, report
from .agreement import BEFORE_ROUNDING, TIMES_ROUNDING, WEIGHTS, Comparison, compare
from .launch import NoNullGPU, Plan
from .placeholders import WrongPlaceholder, filled
from .runs import Run
from .series import run_once, usual_run

SHOWN = 6
"""first updates in the table; the others that it shows are the last one and those that differ first"""


def text(found: Comparison, runs: list[Run]) -> str:
    """Return the report: how the runs went, a table of updates, and the first difference."""
    lines = [f"rankdoctor: {report.heading(run)}" for run in runs]
    lines += ["  Dropout is off in these runs."]
    if found.runs:
        lines += ["", *table(found)]
    for ranks, one in found.differences.items():
        where = f"\nDIFFERS  {report.place(one.at)}  ({ranks} ranks, update {one.update})"
        lines += [where, f"         {one.what}: {one.text}.", f"         Likely: {one.likely}."]
    lines.append("")
    if found.reason:
        return "\n".join([*lines, f"Cannot be compared: {found.reason}."])
    half = found.runs[0].half
    if found.rounding:
        lines.append(
            f"From update {found.rounding} on, rounding decides: with {found.runs[0].ranks} ranks, weights that begin "
            f"a rounding error away lead to differences above {found.tolerance:.0e}, too. From there on, a difference "
            f"is one if it is {TIMES_ROUNDING} times as large. (With SGD, or in float64, rounding grows less.)"
        )
    lines.append(
        f"Equal within rounding means: losses and norms within {found.tolerance:.0e}, weights at the end within "
        f"{WEIGHTS[half]:.0%} of the distance that they have moved{' (computed in 16 bits)' if half else ''}."
    )
    for ranks, far in found.distances.items():
        same = "differs" if ranks in found.differences else "equal"
        lines.append(f"{found.runs[0].ranks} and {ranks} ranks: {same}; weights at the end differ by {far:.1e}.")
    return "\n".join(lines)


def table(found: Comparison) -> list[str]:
    """Return the lines of a table: of each update its samples, loss and norm, on each number of ranks."""
    runs = found.runs
    count = max(len(run.updates) for run in runs)
    shown = set(range(min(SHOWN, count))) | {count - 1} | {one.update - 1 for one in found.differences.values()}
    names = ", ".join(str(run.ranks) for run in runs)
    width = 9 * len(runs) + 2
    head = [f"samples ({names} ranks)".ljust(width), f"loss ({names})".ljust(width), f"gradient norm ({names})"]
    lines = [" ".join(["update", *head])]
    for k in sorted(k for k in shown if k < count):
        cells: list[list[str]] = [[], [], []]
        for run in runs:
            if k >= len(run.updates):
                for cell in cells:
                    cell.append("-".ljust(8))
                continue
            one = run.updates[k]
            same = k < len(runs[0].updates) and one.samples == runs[0].updates[k].samples
            cells[0].append(f"{one.samples.total()}{'' if same else ' other'}".ljust(8))
            cells[1].append(f"{one.loss:.5g}".ljust(8))
            cells[2].append(f"{one.norm:.4g}".ljust(8))
        lines.append(" ".join([str(k + 1).rjust(6), *(" ".join(cell).ljust(width) for cell in cells)]).rstrip())
    return lines


def as_json(found: Comparison) -> str:
    """Return the comparison for programs."""
    runs = [
        {
            "ranks": run.ranks,
            "updates": [
                {"samples": u.samples.total(), "loss": u.loss, "norm": u.norm, "learning_rates": u.rates}
                for u in run.updates
            ],
        }
        for run in found.runs
    ]
    return json.dumps(
        {
            "status": found.status,
            "reason": found.reason,
            "tolerance": found.tolerance,
            "rounding": found.rounding,
            "differences": [asdict(one) | {"ranks": ranks} for ranks, one in found.differences.items()],
            "distances": found.distances,
            "runs": runs,
        },
        indent=1,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments; those after the script are the script's own."""
    it = cli.Parser(
        prog="rankdoctor parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="rankdoctor parity [options] SCRIPT [its arguments]",
    )
    add = it.add_argument
    add("--ranks", default="1,2", metavar="N,N,...", help="numbers of ranks to compare (default: 1,2)")
    add("--tolerance", type=float, help="relative difference of equal losses and norms (default: 1e-3; 16 bits: 5e-2)")
    cli.add_runs(it)
    add("--format", choices=("text", "json"), default="text", help="format of the report (default: text)")
    add("--keep", metavar="FOLDER", help="new folder for the events, the output and the files of the runs")
    return it


def main(arguments: list[str]) -> int:
    """Run, compare, report; return the exit status."""
    options = parser().parse_args(arguments)
    counts = counts_of(options.ranks)
    cli.see_environment()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        try:
            plans = [plan_for(options, count) for count in counts]
            folder = cli.working_folder(options, stack)
            plans, runs = run_all(options, plans, folder)
            found = compare(runs, options.tolerance)
            later = [one.what for one in found.differences.values() if one.update > BEFORE_ROUNDING]
            if {"loss", "gradient", "weights"} & set(later):
                nudged = replace(plans[0], settings=plans[0].settings | {"nudged": True})
                found = compare(runs, options.tolerance, run_once(nudged, folder / f"ranks{nudged.ranks}_nudged"))
            print(as_json(found) if options.format == "json" else text(found, runs))
            return found.status
        except KeyboardInterrupt:
            print("\nrankdoctor: interrupted; all ranks are ended", file=sys.stderr)
            return 130
        except (OSError, NoNullGPU, WrongPlaceholder) as error:
            cli.refuse(str(error))


def counts_of(text: str) -> list[int]:
    """Return the numbers of ranks of a list such as 1,2,4."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", text):
        cli.refuse(f"--ranks {text}: give at least two numbers of ranks with commas between them, such as 1,2,4")
    counts = [int(one) for one in text.split(",")]
    if len(set(counts)) < len(counts):
        cli.refuse(f"--ranks {text}: each number may stand there once")
    return counts


def plan_for(options: argparse.Namespace, ranks: int) -> Plan:
    """Return the run on a number of ranks. Raises WrongPlaceholder."""
    own = argparse.Namespace(**vars(options) | cli.NO_CHECKS | {"nproc": ranks, "nodes": 1})
    plan = cli.make_plan(own)
    args = [filled(arg, ranks) for arg in plan.args]
    return replace(plan, args=args, name=f"on {ranks}", settings=plan.settings | {"parity": True})


def run_all(options: argparse.Namespace, plans: list[Plan], folder: Path) -> tuple[list[Plan], list[Run]]:
    """Return the plans and their runs, the first one twice, all started in the way that fits the first."""
    largest = max(plans, key=lambda plan: plan.ranks)
    way, run = usual_run(options, largest, folder / f"ranks{largest.ranks}")
    runs = {largest.ranks: run}
    plans = [replace(plan, launcher=way.launcher, local_rank_flag=way.local_rank_flag, gpus=way.gpus) for plan in plans]
    for plan in plans:
        if plan.ranks not in runs:
            runs[plan.ranks] = run_once(plan, folder / f"ranks{plan.ranks}")
    again = run_once(plans[0], folder / f"ranks{plans[0].ranks}_again")
    return plans, [runs[plans[0].ranks], again, *(runs[plan.ranks] for plan in plans[1:])]
