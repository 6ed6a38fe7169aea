"""The same weights, validated on several ranks and on one: what the script prints must be the same.

The weights do not move in these runs, so what depends on the validation samples alone is printed alike after every
epoch, unlike losses of the training, times and speeds. If such a number is another one on one rank, several ranks have
put it together in a wrong way: a mean of medians, predictions in another order than the targets, or the result of one
rank's share.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..events import Event
from ..runs import Rank, Run
from .apart import differing
from .base import Finding, fault, hint, need, seen

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.]*\w)|(?<![\w.])[-+]?\d+\.\d+")
NO_RESULT = re.compile(r"lr|rate|time|sec|speed|second|per|mem|[gmk]i?b\b|world|rank|/s", re.IGNORECASE)
"""words before a number that say that it is no result of a validation"""
LEAST = 2e-3
"""relative difference; the order of sums, and the rounding of what is printed, change less"""
ROUNDING = 1e-5
"""relative difference that is called equal, or two and a half of the last printed digit"""
MOST_PADDING = 0.02
"""share of samples that a sampler repeats so that all ranks have equally many"""


@dataclass(frozen=True)
class Printed:
    """A number that is printed in the same way in every epoch."""

    word: str
    """what stands before it"""
    text: str
    at: str

    @property
    def step(self) -> float:
        """What the last digit stands for."""
        digits, _, power = self.text.lower().partition("e")
        return 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def same_validation(several: Run, halved: Run | None, one: Run) -> Iterator[Finding]:
    """The result of a validation must not depend on how many ranks share it.

    With half as many samples in a batch on one rank, a result that depends on which samples are together, as that of a
    contrastive loss, is told apart.
    """
    need(several.any("update") and one.any("update"), "one of the two runs made no update")
    need(several.world > 1 and one.world == 1, "there were not several ranks in one run, and one in the other")
    need(same_weights(one), "the weights of several ranks do not fit into those on one rank, as if they are sharded")
    need(
        several.sharded or not differing(several.aligned("gradients")[-1], "weights"),
        "each rank has weights of its own",
    )
    inputs, alone = evaluated(several), evaluated(one)
    need(inputs, "no model was called in evaluation")
    drew = any(e.get("drew") for run in (several, one) for e in evaluations(run))
    need(not drew, "an evaluation draws random numbers")
    padding = (inputs - alone).total() / alone.total() if alone else 1.0
    need(inputs.keys() == alone.keys() and not alone - inputs, "on one rank other samples are validated")
    need(padding < MOST_PADDING, "on several ranks, some samples are validated more often")
    found, expected = constants(several.first), constants(one.first)
    names = [key for key in found if key in expected and not trivial(found[key].text, expected[key].text)]
    need(names, "no result was printed alike after two validations")
    smaller = constants(halved.first) if halved and halved.any("update") else None
    least = max(LEAST, 20 * padding)
    wrong: dict[str, list[str]] = {}
    equal, nearly = 0, ""
    for key in names:
        here, there = found[key], expected[key]
        if not differs(here, there, least):
            equal += not differs(here, there, ROUNDING)
            if differs(here, there, ROUNDING):
                nearly = f"{here.word} {here.text} on {several.world} ranks, and {there.text} on one"
        elif smaller is None or (key in smaller and not differs(smaller[key], there)):
            at = combining(several.first, here) or here.at
            wrong.setdefault(at, []).append(
                f"{here.word} {here.text} on {several.world} ranks, and {there.text} on one (printed by line "
                f"{here.at.rpartition(':')[2]})"
            )
    for at, results in wrong.items():
        text = f"the same weights and the same validation samples give {'; '.join(results[:3])}"
        fix = (
            "gather sums and counts, or all predictions with their targets, and compute the result once: a mean over "
            "ranks is right for means of equally many samples only"
        )
        yield hint(at, text, fix) if padding or smaller is None else fault(at, text, fix)
    need(equal and not padding, "samples that are repeated, or the size of a batch, can change what is printed")
    need(not nearly, f"{nearly}: below {LEAST:.1%} of it, a result can also differ by the order of sums")
    seen(equal, "printed results, equal on several ranks and on one")


def differs(one: Printed, other: Printed, least: float = LEAST) -> bool:
    """Return whether two numbers differ by more than rounding, and by more than a share of the larger one."""
    a, b = float(one.text), float(other.text)
    return abs(a - b) > max(2.5 * max(one.step, other.step), least * max(abs(a), abs(b)))


def differing_results(several: Run, one: Run) -> bool:
    """Return whether there is anything that a third run, with smaller batches, has to tell apart."""
    if not several.ranks or not one.ranks:
        return False
    found, alone = constants(several.first), constants(one.first)
    return any(differs(found[key], alone[key]) for key in found if key in alone)


def evaluations(run: Run) -> Iterator[Event]:
    """Yield the calls of models in evaluation, of all ranks; not those for batches of the training, as of a teacher.

    If all calls are for samples of the loader that is trained on, these are what the script validates.
    """
    calls = [e for rank in run.ranks for e in rank.all("forward", train=False, grad=False) if "rows" in e]
    yield from [e for e in calls if e["loader"] not in run.training] or calls


def evaluated(run: Run) -> Counter[int]:
    """Return how often each input sample was evaluated."""
    return Counter(row for e in evaluations(run) for row in e["rows"])


def same_weights(one: Run) -> bool:
    """Return whether all models had the weights on one rank that they had on several."""
    got = one.first.all("stored_weights")
    return bool(got) and not any(e["missing"] for e in got)


def constants(rank: Rank) -> dict[tuple[str, str, int, int], Printed]:
    """Return the numbers with a fraction that a line prints alike each time, at least twice.

    They are known by the line of the script, the text around them, and their places; a line that prints several texts
    in turn, such as one for each metric, prints each of them more than once.
    """
    found: dict[tuple[str, str, int, int], list[Printed]] = {}
    for e in rank.all("printed"):
        text = re.sub(r"\x1b\[[0-9;]*m", "", e["text"])
        form = re.sub(r"\s+", " ", NUMBER.sub("#", text))
        for place, match in enumerate(NUMBER.finditer(text)):
            word = re.findall(r"[A-Za-z_][\w/@.]*", text[: match.start()])[-1:]
            one = Printed(word[0] if word else "", match[0], e["at"])
            found.setdefault((e["at"], form, place, 0), []).append(one)
    return {
        key: values[0]
        for key, values in found.items()
        if len(values) > 1
        and len({value.text for value in values}) == 1
        and ("." in values[0].text or "e" in values[0].text)
        and not NO_RESULT.search(values[0].word)
    }


def trivial(*texts: str) -> bool:
    """Return whether numbers are 0 or 1, all of them, which many things are."""
    return all(float(text) in (0.0, 1.0) for text in texts)


def combining(rank: Rank, printed: Printed) -> str:
    """Return the line of the last collective before a result was printed, after a model was evaluated; "" if none."""
    last = ""
    for e in rank.events:
        if e["e"] == "forward":
            last = "" if e["train"] else last
        elif e["e"] == "collective":
            last = str(e["at"])
        elif e["e"] == "printed" and e["at"] == printed.at and printed.text in e["text"]:
            return last
    return last
