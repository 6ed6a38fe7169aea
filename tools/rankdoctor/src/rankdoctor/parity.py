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
import ast
import contextlib
import json
import math
import operator
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import cli, report
from .launch import NoNullGPU, Plan
from .runs import Run
from .series import run_once, usual_run

TOLERANCE = {False: 1e-3, True: 5e-2}
"""relative difference of losses and norms that rounding explains, in 32 bits and in 16"""
WEIGHTS = {False: 0.1, True: 0.5}
"""the same of the weights, relative to how far the training has moved them: Adam makes steps out of rounding where a
gradient is zero"""
BEFORE_ROUNDING = 3
"""updates in which rounding cannot have grown: what differs in them is a fault"""
TIMES_ROUNDING = 10
"""how many times as large as the difference that rounding leads to another one may be"""
OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class WrongPlaceholder(ValueError):
    """An expression in braces that cannot be computed; the message says why."""


def filled(argument: str, ranks: int) -> str:
    """Return an argument of the script with its expressions of ``ranks`` computed. Raises WrongPlaceholder.

    Braces that do not name ``ranks`` stay as they are.
    """
    return re.sub(r"\{([^{}]*\branks\b[^{}]*)\}", lambda found: computed(found[1], ranks), argument)


def computed(text: str, ranks: int) -> str:
    """Return the value of an expression: a whole number if all of its numbers are whole. Raises WrongPlaceholder."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise WrongPlaceholder(f"{{{text}}} is no expression of ranks, such as {{64/ranks}}") from None
    try:
        result = value_of(tree, ranks)
    except ZeroDivisionError:
        raise WrongPlaceholder(f"{{{text}}} divides by zero with {ranks} ranks") from None
    whole = not any(isinstance(node, ast.Constant) and isinstance(node.value, float) for node in ast.walk(tree))
    if whole and result != int(result):
        raise WrongPlaceholder(
            f"{{{text}}} is {result:.4g} with {ranks} ranks, and no whole number: choose other --ranks, or write a "
            "number with a point if a fraction is meant"
        )
    return str(int(result) if whole else result)


def value_of(node: ast.expr, ranks: int) -> float:
    """Return the value of a part of an expression. Raises WrongPlaceholder."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value is not True:
        return node.value
    if isinstance(node, ast.Name) and node.id == "ranks":
        return ranks
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand, ranks)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left, ranks), value_of(node.right, ranks))
    raise WrongPlaceholder(
        f"an expression in braces may have numbers, ranks, + - * / //, but not {ast.unparse(node)!r}"
    )


@dataclass
class Update:
    """One update of the weights, over all ranks."""

    at: str
    samples: Counter
    """by the numbers of their contents"""
    shares: list[int]
    """samples of each rank"""
    targets: list[int]
    """targets that the loss of each rank counts; empty if that is not known"""
    loss: float
    """mean over the ranks"""
    norm: float
    """of the whole gradient, before it is clipped"""
    rates: list[float]
    sketch: list[float]
    """of the weights after it"""


@dataclass
class Trained:
    """A run, as far as it is compared."""

    ranks: int
    updates: list[Update]
    start: list[float]
    """sketch of the weights before the first update"""
    half: bool
    local_norms: int
    """layers of batch norm that take the statistics of one rank"""


@dataclass
class Difference:
    """The first difference between two runs."""

    update: int
    at: str
    what: str
    """samples, loss, gradient, learning rate, weights or updates"""
    text: str
    likely: str


@dataclass
class Comparison:
    """What was found."""

    status: int
    reason: str = ""
    """why nothing can be compared"""
    tolerance: float = 0.0
    differences: dict[int, Difference] = field(default_factory=dict)
    """by the number of ranks"""
    distances: dict[int, float] = field(default_factory=dict)
    """by the number of ranks: difference of the weights at the end, relative to how far they have moved"""
    rounding: int = 0
    """the update from which rounding alone leads to differences above the tolerance; 0: never, or not looked at"""
    runs: list[Trained] = field(default_factory=list)


def trained(run: Run) -> Trained:
    """Return what a run's updates used and did."""
    events = list(zip(*(rank.all("parity") for rank in run.ranks), strict=False))
    steps = {(e["step"], rank.number): e for rank in run.ranks for e in rank.all("update")}
    rates = {e["step"]: e["lr"] for e in run.first.all("gradients")}
    updates = []
    for ranks in events:
        parts = {(name, part): square for e in ranks for name, (part, square) in e["squares"].items()}
        step = ranks[0]["step"] - 1
        factors = [steps.get((step, rank.number), {}).get("factors", []) for rank in run.ranks]
        updates.append(
            Update(
                at=ranks[0]["at"],
                samples=Counter(number for e in ranks for number in e["samples"]),
                shares=[len(e["samples"]) for e in ranks],
                targets=[sum(count for _, count, _ in ones) for ones in factors] if all(factors) else [],
                loss=sum(e["loss"] for e in ranks) / len(ranks),
                norm=math.sqrt(sum(parts.values())),
                rates=rates.get(step, []),
                sketch=ranks[0]["sketch"],
            )
        )
    first = run.first.all("parity")
    norms = max((e["local_norms"] for e in run.first.all("model")), default=0)
    return Trained(run.world, updates, (first[0]["start"] or []) if first else [], any(e["half"] for e in first), norms)


def near(one: float, other: float, tolerance: float) -> bool:
    """Return whether two numbers are equal within a relative tolerance; NaN equals NaN."""
    return one == other or (one != one and other != other) or abs(one - other) <= tolerance * max(abs(one), abs(other))


def distance(one: list[float], other: list[float]) -> float:
    """Return the distance of two sketches."""
    return math.dist(one, other)


def relative(one: float, other: float) -> float:
    """Return the relative difference of two numbers."""
    return 0.0 if near(one, other, 0.0) else abs(one - other) / max(abs(one), abs(other))


def grown(usual: Trained, nudged: Trained | None) -> list[tuple[float, float]]:
    """Return for each update how far rounding alone has led the loss and the norm until then, relative to them."""
    if nudged is None:
        return [(0.0, 0.0)] * len(usual.updates)
    found, loss, norm = [], 0.0, 0.0
    for a, b in zip(usual.updates, nudged.updates, strict=False):
        loss, norm = max(loss, relative(a.loss, b.loss)), max(norm, relative(a.norm, b.norm))
        found.append((loss, norm))
    return found + found[-1:] * (len(usual.updates) - len(found))


def first_difference(
    usual: Trained, other: Trained, tolerance: float, nudged: Trained | None = None
) -> Difference | None:
    """Return the first difference between two runs, with its likely reason; None if they are equal.

    ``nudged`` is a run like ``usual`` that begins a rounding error away: what it leads to is no difference.
    """
    rounding = grown(usual, nudged)
    for number, (a, b) in enumerate(zip(usual.updates, other.updates, strict=False), 1):
        pair = f"{usual.ranks} and {other.ranks} ranks"
        found = None
        of_loss, of_norm = (max(tolerance, TIMES_ROUNDING * far) for far in rounding[number - 1])
        if a.samples != b.samples:
            found = "samples", *samples_differ(a, b, usual, other, number)
        elif not near(a.loss, b.loss, of_loss):
            found = "loss", f"{a.loss:.6g} and {b.loss:.6g} with {pair}", likely_loss(b, other)
        elif not near(a.norm, b.norm, of_norm):
            found = "gradient", f"norm {a.norm:.6g} and {b.norm:.6g} with {pair}", likely_gradient(a, b, other)
        elif a.rates != b.rates and a.rates and b.rates:
            found = (
                "learning rate",
                f"{a.rates[0]:.4g} and {b.rates[0]:.4g} with {pair}",
                ("it depends on the number of ranks, although the global batch does not"),
            )
        if found:
            what, text, likely = found
            return Difference(number, b.at, what, text, likely)
    if len(usual.updates) != len(other.updates):
        counts = f"{len(usual.updates)} and {len(other.updates)} updates with {usual.ranks} and {other.ranks} ranks"
        last = min(len(usual.updates), len(other.updates))
        likely = "the ranks' shares are unequal: look at drop_last, and at the samples that the sampler repeats"
        return Difference(last + 1, other.updates[-1].at, "updates", counts, likely)
    far = apart(usual, nudged) if nudged else 0.0
    if apart(usual, other) > max(WEIGHTS[usual.half], TIMES_ROUNDING * far):
        text = f"they differ by {apart(usual, other):.2g} of the distance that the training has moved them"
        likely = (
            "the same gradients were used in another way: look at clipping, at the optimizer and at weight averages"
        )
        return Difference(len(usual.updates), other.updates[-1].at, "weights", text, likely)
    return None


def apart(usual: Trained, other: Trained) -> float:
    """Return the difference of the weights at the end, relative to how far they have moved."""
    moved = distance(usual.updates[-1].sketch, usual.start)
    return distance(usual.updates[-1].sketch, other.updates[-1].sketch) / max(moved, 1e-30)


def samples_differ(a: Update, b: Update, usual: Trained, other: Trained, number: int) -> tuple[str, str]:
    """Return which samples differ, and the likely reason."""
    sizes = a.samples.total(), b.samples.total()
    only = (b.samples - a.samples).total()
    text = f"{sizes[0]} samples on {usual.ranks} ranks, {sizes[1]} on {other.ranks}; {only} of these are others"
    if sizes[0] != sizes[1] or number == min(len(usual.updates), len(other.updates)) > 1:
        return text, "the ranks' shares are unequal in the last batch: the sampler repeats samples, or drops some"
    if sizes[0] == sizes[1] and len(set(b.samples)) < len(set(a.samples)):
        return text, "ranks use the same samples: the loader has no sampler that shares them"
    return text, "the sampler: its order, or what it gives a rank, depends on the number of ranks"


BATCH_NORM = "batch norm takes the mean and variance of one rank's samples: SyncBatchNorm takes those of all ranks"


def likely_loss(update: Update, other: Trained) -> str:
    """Return the likely reason why the same samples have another loss."""
    if len(set(update.shares)) > 1:
        return f"a mean of means: the ranks have {numbers(update.shares)} samples, and each divides by its own number"
    if len(set(update.targets)) > 1:
        return f"a mean of means: the ranks count {numbers(update.targets)} targets, and each divides by its own number"
    if other.local_norms:
        return BATCH_NORM
    return "the loss is not a mean over the samples: divide a sum by the number of samples or tokens of all ranks"


def likely_gradient(a: Update, b: Update, other: Trained) -> str:
    """Return the likely reason why the same loss has another gradient."""
    ratio, ranks = b.norm / a.norm if a.norm else math.inf, other.ranks
    for factor, reason in (
        (float(ranks), "a sum over the ranks in place of a mean"),
        (1 / ranks, "divided by the number of ranks twice"),
        (math.sqrt(ranks), "the square root of the number of ranks: a norm of shards that were not combined"),
    ):
        if ranks > 1 and near(ratio, factor, 0.02):
            return f"{reason} (factor {ratio:.3g})"
    if other.local_norms:
        return BATCH_NORM
    return f"the exchange between the ranks (factor {ratio:.3g}): rankdoctor --reference names the weights"


def numbers(values: list[int]) -> str:
    """Return the values in words, such as "3, 5 and 8"."""
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"


def compare(runs: list[Run], tolerance: float | None, nudged: Run | None = None) -> Comparison:
    """Compare runs; the first two have the same number of ranks, and ``nudged`` has it, too."""
    for run in runs:
        if not run.ranks or not run.any("parity"):
            why = next(iter(report.failures(run)), "no update of weights was seen")
            return Comparison(2, f"with {run.launch.world_size} ranks: {why}")
        if run.world != run.launch.world_size:
            return Comparison(2, f"{run.launch.world_size} ranks were started, and {run.world} joined")
        if any(run.launch.statuses) or run.launch.ended in ("hang", "lost", "time"):
            why = next(iter(report.failures(run)), report.ENDINGS.get(run.launch.ended, ""))
            return Comparison(2, f"with {run.world} ranks: {why}")
    again, *all_runs = map(trained, [runs[1], runs[0], *runs[2:]])
    usual = all_runs[0]
    found = Comparison(0, tolerance=TOLERANCE[usual.half] if tolerance is None else tolerance, runs=all_runs)
    rounded = trained(nudged) if nudged and nudged.ranks and nudged.any("parity") else None
    far = [max(one) > found.tolerance for one in grown(usual, rounded)]
    found.rounding = 1 + far.index(True) if any(far) else 0
    if distance(usual.start, again.start) > 1e-6 * math.hypot(*usual.start):
        return replace(found, status=2, reason="two runs begin with other weights: seed them before the model is made")
    if repeated := first_difference(usual, again, found.tolerance):
        reason = (
            f"two runs on {usual.ranks} ranks differ in update {repeated.update} ({repeated.what}): seed the order of "
            "the samples, their augmentation, and whatever else is random"
        )
        return replace(found, status=2, reason=reason)
    for other in all_runs[1:]:
        if distance(usual.start, other.start) > 1e-5 * math.hypot(*usual.start):
            reason = (
                f"the weights before the first update differ with {usual.ranks} and {other.ranks} ranks: seed them "
                "with the same number on all ranks, before the model is made"
            )
            return replace(found, status=2, reason=reason)
        sizes = usual.updates[0].samples.total(), other.updates[0].samples.total()
        if sizes[0] != sizes[1]:
            reason = (
                f"the first update has {sizes[0]} samples on {usual.ranks} ranks, and {sizes[1]} on {other.ranks}: "
                f"keep the global batch, for example with --batch_size '{{{sizes[0]}/ranks}}'"
            )
            return replace(found, status=2, reason=reason)
        if difference := first_difference(usual, other, found.tolerance, rounded):
            found.differences[other.ranks] = difference
        found.distances[other.ranks] = apart(usual, other)
    found.status = int(bool(found.differences))
    return found


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
