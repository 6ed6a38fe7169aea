"""Whether runs on several numbers of ranks make the same updates, and if not, what differs first and why.

Used by parity.py, which runs the script and prints what is found here.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from . import report
from .runs import Run

TOLERANCE = {False: 1e-3, True: 5e-2}
"""relative difference of losses and norms that rounding explains, in 32 bits and in 16"""
WEIGHTS = {False: 0.1, True: 0.5}
"""the same of the weights, relative to how far the training has moved them: Adam makes steps out of rounding where a
gradient is zero"""
BEFORE_ROUNDING = 3
"""updates in which rounding cannot have grown: what differs in them is a fault"""
TIMES_ROUNDING = 10
"""how many times as large as the difference that rounding leads to another one may be"""


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
                targets=[sum(count for _, count, *_ in ones) for ones in factors] if all(factors) else [],
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
