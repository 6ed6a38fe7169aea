"""Checks that compare two runs: resumed with stopped, one rank with several, workers with none."""

import re
from collections.abc import Iterator

from ..events import Event
from ..runs import Run, passes_with_batches
from .apart import differing, several_models
from .base import CannotJudge, Check, Finding, fault, hint, need, need_none, seen
from .same_validation import same_validation
from .updates import planned_steps

RESUME = "forgetful_resume"


def resumed(usual: Run, stopped: Run, again: Run) -> Iterator[Finding]:
    """A checkpoint must hold all that the rest of the training depends on, or the loss jumps at each restart."""
    saves = [e for rank in stopped.ranks for e in rank.all("save")]
    failures = list(_failure(again, "when it is started again"))
    yield from failures
    if failures:
        return
    need(again.ranks and again.any("update"), "the resumed run made no update")
    seen(len(again.first.all("update")), "updates after the resume")
    after = again.first.all("gradients")[0]
    earlier = stopped.first.all("gradients", optimizer=after["optimizer"])
    before = next((e for e in earlier if not differing((e, after), "weights")), None)
    if before is None and (ended := _at_the_end(stopped, after)):
        if ended["state"] and not after["state"]:
            yield fault(
                saves[0]["at"] if saves else after["at"],
                f"resumed from the end of the first run, the optimizer has no state: it had that of {ended['state']} "
                "weights there",
                "save optimizer.state_dict(), and load it",
            )
            return
        need(False, "the first run ended by itself, so there is no run without a stop to compare with")
    if before is None or before["step"] == 0:
        loaded = [e for e in again.first.all("load")]
        need(loaded, "the second run loaded no checkpoint: say with --resume which arguments make it resume")
        raise CannotJudge("no update of the stopped run began with the weights of the resumed one")
    at = saves[0]["at"] if saves else after["at"]
    where = f"resumed after update {before['step']}"
    if before["state"] and not after["state"]:
        yield fault(
            at,
            f"{where}, the optimizer has no state: it had that of {before['state']} weights when it was stopped",
            "save optimizer.state_dict(), and load it",
        )
    if any(abs(a - b) > 1e-9 + 1e-6 * abs(a) for a, b in zip(before["lr"], after["lr"], strict=False)):
        yield fault(
            at,
            f"{where}, the learning rate is {after['lr'][0]:.6g}; without the stop it was {before['lr'][0]:.6g}",
            "save scheduler.state_dict(), and load it",
        )
    elif stopped.launch.compared != "resumed" and (rates := _later_rates(usual, again, before, after)):
        update, with_stop, without = rates
        yield fault(
            at,
            f"{where}, the learning rate of update {update} is {with_stop:.6g}; without the stop it was {without:.6g}",
            "save scheduler.state_dict(), and load it",
        )
    old, new = before.get("scaler"), after.get("scaler")
    if old and new and old["_growth_tracker"] > 0 == new["_growth_tracker"]:
        yield fault(
            at,
            f"{where}, the GradScaler begins anew: it counted {old['_growth_tracker']} good steps when it was stopped "
            f"(factor {old['scale']:.6g}), and none now (factor {new['scale']:.6g})",
            "save scaler.state_dict(), and load it",
        )
    wrong_epoch = list(_same_epoch_again(stopped, again, before))
    yield from wrong_epoch or _other_samples(usual, stopped, again, after)


def _at_the_end(stopped: Run, after: Event) -> Event | None:
    """Return what the first run has saved at last if the resumed one begins with these weights."""
    ends = stopped.first.all("saved_weights", optimizer=after["optimizer"])
    return next((e for e in ends if e["weights"] and not differing((e, after), "weights")), None)


def _other_samples(usual: Run, stopped: Run, again: Run, after: Event) -> Iterator[Finding]:
    """After a resume, the samples must go on where the checkpoint was made: none again, none left out.

    This can be seen if the order of the samples does not change from start to start, as with DistributedSampler.
    """
    whole, part, rest = map(samples_of_updates, (usual, stopped, again))
    same_start = min(len(whole), len(part), 4)
    is_first = stopped.launch.compared != "resumed"
    same = [
        e for e in usual.first.all("gradients", optimizer=after["optimizer"]) if not differing((e, after), "weights")
    ]
    if not same or not rest or not rest[0] or (is_first and whole[:same_start] != part[:same_start]):
        need(False, "weights and states are those of the checkpoint; the samples come in a new order in each start")
    at_update = same[0]["step"]
    expected = whole[at_update : at_update + 4]
    compared = min(len(expected), len(rest))
    if rest[:compared] == expected[:compared]:
        if compared:
            seen(compared, "updates after the resume, with the samples that they have without a stop")
        return
    begun = _first_trained_pass(again)
    at = begun["at"] if begun else after["at"]
    known = [n for n, samples in enumerate(whole) if samples == rest[0] and n != at_update]
    if not known:
        need(False, "after the resume, the samples come in an order that the whole run does not have")
    text = f"resumed after update {at_update}, the run trains on the samples of update {known[0] + 1} first"
    if known[0] < at_update:
        text += f", so those of {at_update - known[0]} updates come again"
        yield hint(at, text, "save how many batches of the epoch are done, and leave them out after the resume")
    else:
        text += f", so those of {known[0] - at_update} updates are left out"
        yield hint(at, text, "go on in the epoch in which the checkpoint was made, or save it at the end of one")


def samples_of_updates(run: Run) -> list[tuple[int, ...]]:
    """Return for each update of rank 0 the numbers of the samples of its batches, or hashes of them in a stream."""
    passes = passes_with_batches(run.first)
    most = max((given for _, given in passes), default=0)
    taken = {id(event): given for event, given in passes}
    found: list[tuple[int, ...]] = []
    now: list[int] = []
    begun: Event | None = None
    number = 0
    for e in run.first.events:
        if e["e"] == "pass" and e["loader"] in run.training:
            begun, number = e, 0
        elif e["e"] == "batch" and e["loader"] in run.training:
            number += 1
        elif e["e"] == "forward" and e["train"] and e["grad"]:
            size = run.made(begun["loader"])["batch_size"] if begun else None
            if begun and begun.get("file") and size:
                cut = most < begun["batches"] and number == taken[id(begun)] == most  # then the last one is given
                place = begun["batches"] if cut else number
                now += run.numbers(begun)[(place - 1) * size : place * size]
            else:
                now += e.get("rows", [])
        elif e["e"] == "update":
            found.append(tuple(now))
            now = []
    return found


def _later_rates(usual: Run, again: Run, before: Event, after: Event) -> tuple[int, float, float] | None:
    """Return the first later update with another learning rate than without the stop: its number and both rates.

    A schedule that begins anew can have the right rate in the first update, which the optimizer's state holds. Not
    compared are schedules that follow a loss, and runs that were resumed for more steps.
    """
    arguments = set(again.first.all("process")[0]["argv"]) - set(usual.first.all("process")[0]["argv"])
    if usual.any("metric") or any(re.search("epoch|step|iter", word) for word in arguments):
        return None
    wanted = {e["step"]: e["lr"] for e in usual.first.all("gradients", optimizer=after["optimizer"])}
    compared = [
        (update, e["lr"][0], wanted[update][0])
        for e in again.first.all("gradients", optimizer=after["optimizer"])
        if (update := e["step"] - after["step"] + before["step"]) in wanted
    ]
    wrong = [(n, new, old) for n, new, old in compared if abs(new - old) > 1e-9 + 1e-4 * abs(old)]
    return wrong[0] if len(wrong) > 1 else None


def _same_epoch_again(stopped: Run, again: Run, before: Event) -> Iterator[Finding]:
    """After a whole epoch, the order of the samples must go on with that of the next one."""
    passes = passes_with_batches(stopped.first)  # also one of which only the first batch was taken before the stop
    old = [event for event, given in passes if given and event["loader"] in stopped.training]
    new = _first_trained_pass(again)
    if new is None or len(old) < 2 or old[1]["step"] > before["step"]:
        return  # it was stopped in the first epoch
    first, second = (stopped.numbers(event) for event in old[:2])
    if len(first) > 3 and again.numbers(new) == first != second and sorted(first) != first:
        yield fault(
            new["at"],
            f"resumed after update {before['step']}, the samples come in the order of the first epoch "
            "before the stop again",
            "save the number of the epoch; call sampler.set_epoch(epoch) with it",
        )


def _first_trained_pass(run: Run) -> Event | None:
    """Return the pass of which the first batch is the first one that is trained on; None if batches are skipped."""
    begun, batches = None, 0
    for e in run.first.events:
        if e["e"] == "pass" and e["loader"] in run.training:
            begun, batches = e, 0
        elif e["e"] == "batch" and e["loader"] in run.training:
            batches += 1
        elif e["e"] == "forward" and e["train"] and e["grad"]:
            return begun if batches == 1 else None
    return None


def _failure(run: Run, when: str) -> Iterator[Finding]:
    """Yield a finding if the script fails before its first update, in a run that differs from the usual one."""
    errors = [e for e in [e for rank in run.ranks for e in rank.events] + run.others if e["e"] == "error"]
    if errors and not run.any("update"):
        said = " ".join(errors[0]["text"].split())[:200]
        fix = "if it is meant to run in this way: see the error"
        yield hint(errors[0]["at"], f"{when} the script fails: {errors[0]['type']}: {said}", fix)


def other_ranks(usual: Run, other: Run) -> Iterator[Finding]:
    """The number of ranks must change how fast an epoch is, not how many samples it has."""
    failures = list(_failure(other, f"on {other.launch.world_size} rank(s)"))
    yield from failures
    if failures:
        return
    need(usual.any("update") and other.any("update"), "one of the two runs made no update")
    need(not usual.model_parallel, "ranks of a model-parallel group read the same samples")
    need_none(several_models(usual))
    compared = 0
    doubts: list[str] = []
    for kind, passes in usual.epochs(usual.training).items():
        same = [p for k, p in other.epochs(other.training).items() if k[0] == kind[0] and k[2] == kind[2]]
        sizes = [
            sum(len(run.numbers(e)) for e in p[0].values()) for run, p in ((usual, passes), *((other, p) for p in same))
        ]
        if len(sizes) > 1 and min(sizes) and max(sizes) > 1.2 * min(sizes):
            yield fault(
                kind[0],
                f"an epoch has {sizes[0]} samples on {usual.world} ranks, and {sizes[1]} on {other.world}",
                "share the samples by the rank and the world size of the job",
            )
        here, there = (
            {n for p in found for e in p[0].values() for n in run.numbers(e)}
            for run, found in ((usual, [passes]), (other, same[:1]))
        )
        if same and (min(map(len, (here, there))) < 0.95 * min(sizes) or len(here ^ there) > 0.2 * len(here | there)):
            doubts.append("the samples of an epoch are drawn, some of them several times, or others in each run")
        else:
            compared += sizes[0] if len(sizes) > 1 and min(sizes) else 0
    for a, b in zip(usual.first.all("schedule"), other.first.all("schedule"), strict=False):
        (more, number), (fewer, _) = planned_steps(other), planned_steps(usual)
        per_step = a["steps"] > number + 1 and more > 1.5 * fewer > 0
        if a["length"] and a["length"] == b["length"] and per_step and abs(a["length"] - more) <= number:
            text = f"{a['cls']} is made for {a['length']} steps on any number of ranks, but {usual.world} take {fewer}"
            yield fault(a["at"], text, "count the steps with the global batch: len(loader) of a rank times epochs")
    need_none(doubts)
    need(compared, "the samples of the epochs have no numbers, or come from another loader")
    seen(compared, "samples of an epoch, as many on either number of ranks")


def other_workers(usual: Run, other: Run) -> Iterator[Finding]:
    """The number of workers must change how fast batches come, not how many there are."""
    need(usual.any("update") and other.any("update"), "one of the two runs made no update")
    compared = 0
    for kind, passes in usual.epochs(usual.training).items():
        same = [p for k, p in other.epochs(other.training).items() if k == kind]
        counts = [p[0][0].get("batches") for p in (passes, *same) if 0 in p[0]]
        compared += counts[0] or 0 if len(counts) > 1 else 0
        if len(counts) > 1 and counts[0] != counts[1]:
            yield fault(
                kind[0],
                f"an epoch has {counts[0]} batches, and {counts[1]} with another number of workers",
                "let the samples of an epoch not depend on the workers",
            )
    need(compared, "a stream does not say how many batches it has")
    seen(compared, "batches of an epoch in either run")


AFTER_RESULTS = ("results_combined", "validation_statistics", "validation_mode")
"""checks whose findings can be why a validation has other results on one rank"""
COMPARISONS = {
    "resumed": Check(resumed, "A resumed run goes on where the stopped one was.", RESUME, ("weights_agree",)),
    "other_ranks": Check(other_ranks, "An epoch has as many samples on another number of ranks.", "", ()),
    "frozen": Check(same_validation, "A validation has the same results on one rank.", "", AFTER_RESULTS),
    "other_workers": Check(other_workers, "An epoch has as many batches with other workers.", "", ()),
}
"""by the field of `Launch` that says what a run is compared for"""
