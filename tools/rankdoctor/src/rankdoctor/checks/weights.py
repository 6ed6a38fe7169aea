"""Gradients, weights, buffers and learning rates: the same on all ranks."""

from collections.abc import Iterator

from ..events import Event, model_and_name
from ..runs import Run
from .apart import (
    chosen_models,
    differing,
    equal,
    saves_apart,
    several_models,
    short_trainings,
    trains_several,
    why_apart,
)
from .base import Finding, check, fault, hint, need, need_none, need_use, seen, some


@check(
    "Gradients and weights are the same on all ranks.",
    exercise="bare_model",
    after=("learning_rates_agree",),
    ranks=True,
)
def weights_agree(run: Run) -> Iterator[Finding]:
    """Data parallel training is one model on all ranks: otherwise each rank trains its own, on its part of the data.

    Weights are compared before each update, so whatever averages them after an update counts as right.
    """
    need(not run.sharded and not run.model_parallel, "the ranks have different parts of the weights")
    need(not run.divides_optimizer, "the optimizer has this rank's part of the weights, which the script gathers")
    need(not run.any("join"), "the script uses Join, in which ranks may end at different updates")
    steps = run.aligned("gradients")
    need(steps, "no update was seen on all ranks")
    names = compared_weights(steps)
    need(names, "the ranks have no weights of the same names")
    need_none(chosen_models(run))
    if reason := why_apart(run):
        yield hint(
            where_made(run) or steps[0][0]["at"],
            f"the ranks exchange no gradients and no weights in training, so each has a model of its own; {reason}",
            "nothing, if you train several models; if it should be one, wrap it in DistributedDataParallel",
        )
        return
    need(not joined_later(steps), "the ranks train apart, and average some of the weights now and then")
    copies = short_trainings(run)
    steps = [events for events in steps if events[0]["optimizer"] not in copies]
    need(steps, "each rank trains copies of a model for a while, which all begin with equal weights again")
    parts = parts_of_ranks(run, steps, names)
    but = f", without {len(parts)} of which each rank has its own part" if parts else ""
    seen(len(steps), f"updates compared, with {len(names - parts)} weights{but}")
    for number in sorted({events[0]["optimizer"] for events in steps}):
        mine = [events for events in steps if events[0]["optimizer"] == number]
        unequal = [bool(set(differing(events, "weights")) - parts) for events in mine]
        if any(unequal) and all(unequal[unequal.index(True) :]):  # what is equal again later was averaged
            yield private_part(run, steps, names) or _cause_of_difference(run, mine[unequal.index(True)])
            return
    if len(steps) == 1 and differing(steps[0], "gradients") and not steps[0][0]["closure"]:
        yield _cause_of_difference(run, steps[0])


@check("Weights that are not sharded are the same on all ranks.", ranks=True)
def unsharded_agree(run: Run) -> Iterator[Finding]:
    """fully_shard averages the gradients of its groups; what is in no group is trained on each rank alone."""
    need_use(run.sharded, "sharded weights")
    need(not run.model_parallel, "the model is split over several dimensions of ranks")
    steps = [events for events in run.aligned("gradients") if events[0].get("unsharded")]
    need_use(steps, "a model of which only a part is sharded by fully_shard")
    for events in steps:
        whole = set(events[0]["unsharded"])
        if names := [name for name in differing(events, "weights") if name in whole]:
            text = (
                f"{len(names)} weights ({some(map(shown, names))}) are in no group of fully_shard, so nobody averages "
                f"their gradients; they differ between the ranks before update {events[0]['step'] + 1}"
            )
            yield fault(
                where_made(run) or events[0]["at"],
                text,
                "call fully_shard for the model itself, too, after its blocks",
            )
            return
    seen(len(steps), f"updates compared, with {len(steps[0][0]['unsharded'])} weights that are not sharded", 2)


def is_random(values: list[float] | None) -> bool:
    """Return whether a weight with this sum, and sum of absolute values, has positive and negative numbers."""
    return values is not None and abs(values[0]) < 0.9 * values[1]


def joined_later(steps: list[tuple[Event, ...]]) -> set[str]:
    """Return the weights that differ before some update, and are the same before a later one: somebody averages them.

    If all do, nothing else is said of them; if only some do, the others may be private, as in federated learning.
    """
    before: set[str] = set()
    joined: set[str] = set()
    for events in steps:
        now = set(differing(events, "weights"))
        joined |= (before - now) & events[0]["weights"].keys()
        before |= now
    return joined if before - joined else set()


def private_part(run: Run, steps: list[tuple[Event, ...]], names: set[str]) -> Finding | None:
    """Return a question if some weights differ, all others are the same, and each rank saves a file of its own.

    So it is in federated learning with a head, or with norms, of each site.
    """
    apart = {name for events in steps for name in differing(events, "weights")} & names
    if not saves_apart(run) or len(apart) == len(names):
        return None
    return hint(
        where_made(run) or steps[0][0]["at"],
        f"{len(apart)} of {len(names)} weights differ between ranks ({some(sorted(map(shown, apart)))}), the others "
        "are the same, and each rank saves a file of its own",
        "nothing, if each rank has a part of its own, such as the head of a site; if not, average these gradients too",
    )


def parts_of_ranks(run: Run, steps: list[tuple[Event, ...]], names: set[str]) -> set[str]:
    """Return the weights that the script divides among the ranks, such as the rows of a table.

    They differ before the first update of their optimizer, and so do their gradients, while all other weights and
    gradients are equal. (If a layer only began with other numbers on each rank, its gradients would be averaged like
    the others.) If they have an optimizer of their own, they may be a model that nobody has wrapped: then the ranks
    must exchange something within a model.
    """
    firsts = list({events[0]["optimizer"]: events for events in reversed(steps)}.values())
    found = {name for events in firsts for name in differing(events, "weights")}
    gradients = {name for events in firsts for name in differing(events, "gradients")}
    others = [values for events in firsts for name, values in events[0]["weights"].items() if name in names - found]
    are_random = any(map(is_random, others))
    mixed = any(
        found & events[0]["weights"].keys() and names & events[0]["weights"].keys() - found for events in firsts
    )
    if found and found == gradients & names and are_random and (mixed or run.any("inner") or run.any("functional")):
        return found
    return set()


def compared_weights(steps: list[tuple[Event, ...]]) -> set[str]:
    """Return the names of the weights of which all ranks have the values."""
    return {name for events in steps for name in events[0]["weights"] if all(e["weights"].get(name) for e in events)}


def _cause_of_difference(run: Run, events: tuple[Event, ...]) -> Finding:
    """Return the finding for weights that differ between ranks, with the most specific explanation."""
    names, total = differing(events, "weights"), len(events[0]["weights"])
    first = run.aligned("gradients")[0]
    evidence = (
        f"{len(names)} of {total} weights differ between ranks ({some(map(shown, names))}), first seen before update "
        f"{events[0]['step'] + 1}"
    )
    if finding := _state_of_some_ranks(run, first, evidence):
        return finding
    calls = run.first.all("forward", train=True, grad=True)
    bare = next((e for e in calls if "inside" in e), None)
    wrapped = [e for e in calls if e.get("ddp")]
    made = run.first.all("ddp")
    if bare and not wrapped:
        return fault(
            bare["at"],
            f"training calls the {bare['cls']} inside the DistributedDataParallel of {_line(bare['inside'])}, "
            f"so no gradients are exchanged: {evidence}",
            "call the wrapped model in training",
        )
    if wrapped and not any(e["sync"] for e in wrapped):
        return fault(
            wrapped[0]["at"],
            f"all backward passes are under no_sync, so no gradients are exchanged: {evidence}",
            "leave no_sync for the last backward pass before an update",
        )
    if alone := _never_synced(wrapped, events[0]["step"] - 1):
        return fault(
            alone["at"],
            f"no backward pass before update {events[0]['step']} exchanges gradients, such as in the last group of an "
            f"epoch that is shorter: {evidence}",
            "let the same condition decide about no_sync() and step()",
        )
    if wrapped and made and made[0]["frozen"] and not differing(first, "weights"):
        return fault(
            made[0]["at"],
            f"{made[0]['frozen']} parameters were frozen when the model was wrapped, so DDP never "
            f"exchanges their gradients: {evidence}",
            "unfreeze first, then wrap; or wrap again after unfreezing",
            exercise="two_stages",
        )
    model_at = where_made(run) or events[0]["at"]
    if not wrapped and differing(first, "weights"):
        return fault(
            model_at,
            f"each rank begins with other weights, and no wrapper gives all of them those of rank 0: {evidence}",
            "wrap the model in DistributedDataParallel and call the wrapped one",
        )
    if not wrapped and (mixed := _gradients_of_some_ranks(run, events[0]["step"])):
        names, at = mixed
        return fault(
            at or model_at,
            f"only some ranks have a gradient of {some(map(shown, names))} in a step, so what the script adds up over "
            f"the ranks one after the other are gradients of different weights: {evidence}",
            "give every weight a gradient on all ranks, of zeros if no sample needs it, or add them up by their names",
        )
    if not wrapped:
        return fault(
            model_at,
            f"the model is not wrapped, and its gradients are not averaged: {evidence}",
            "wrap the model in DistributedDataParallel and call the wrapped one, or average the gradients before the "
            f"update of {_line(events[0]['at'])}",
        )
    if not any(e["backwards"] for e in run.first.all("update")):
        return fault(
            events[0]["at"],
            f"no backward() was called, and DistributedDataParallel averages in backward() only, not what "
            f"torch.autograd.grad returns: {evidence}",
            "all_reduce the gradients that you put together yourself, and divide them by the number of ranks",
        )
    if outside := _outside_of_wrappers(run, names, events):
        return outside
    if unsynced := _last_pass_unsynced(wrapped):
        return fault(
            unsynced["at"],
            "gradients are exchanged in an earlier backward pass of an update and not in the last one, so what the "
            f"last ones add stays on its rank: {evidence}",
            "leave no_sync() in the last pass before step()",
        )
    if loaded := _loaded_alone(run):
        return fault(
            loaded["at"],
            f"only some ranks load a state here, after DistributedDataParallel was made, which copies weights only "
            f"when it is made: {evidence}",
            "load on all ranks, or before the model is wrapped",
        )
    shows = f"{evidence}; this line is where it shows"
    return fault(events[0]["at"], shows, "change weights and gradients in the same way on all ranks")


def _state_of_some_ranks(run: Run, first: tuple[Event, ...], evidence: str) -> Finding | None:
    """Return the finding if an optimizer has a state at its first update on some ranks only, which have loaded it."""
    loads = [rank.all("optimizer_loaded") for rank in run.ranks]
    with_state = [rank for rank, e in enumerate(first) if e.get("state")]
    if not any(loads) or len(with_state) in (0, len(first)) or not all(loads[rank] for rank in with_state):
        return None
    which = f"rank {with_state[0]} loads" if len(with_state) == 1 else f"ranks {some(map(str, with_state))} load"
    return fault(
        loads[with_state[0]][0]["at"],
        f"only {which} a state of the optimizer here, so the first updates of the ranks differ: {evidence}",
        "load it on all ranks: from the file, or with dist.broadcast_object_list from the rank that has read it",
        exercise="forgetful_resume",
    )


def _gradients_of_some_ranks(run: Run, before: int) -> tuple[list[str], str] | None:
    """Return weights that had a gradient on some ranks only before an update, and the line that adds gradients up."""
    for events in run.aligned("gradients"):
        if events[0]["step"] < before:
            named = set.intersection(*(set(e["gradients"]) for e in events))
            odd = sorted(n for n in named if len({e["gradients"][n] is None for e in events}) > 1)
            reduced = [e for e in run.first.all("collective", name="all_reduce") if e.get("gradient")]
            if odd and reduced:
                return odd, str(reduced[0]["at"])
    return None


def shown(key: str) -> str:
    """Return the name of a weight in its model, from its key."""
    return model_and_name(key)[1]


def _outside_of_wrappers(run: Run, names: list[str], events: tuple[Event, ...]) -> Finding | None:
    """Return the finding if all weights that differ are of models that are not wrapped, and others are wrapped."""
    calls = run.first.all("forward", train=True, grad=True)
    covered = {e["model"] for e in calls if e.get("ddp") or "inside" in e}
    alone = {model_and_name(name)[0] for name in names}
    if not covered or alone & covered or not alone <= {e["model"] for e in run.first.all("model")}:
        return None
    models = [e for e in run.first.all("model") if e["model"] in alone]
    same = len(events[0]["weights"]) - len(names)
    return fault(
        models[0]["made"],
        f"{some(map(shown, names))} of {models[0]['cls']} are trained on every rank alone, because they belong to no "
        f"DistributedDataParallel; the other {same} weights are the same on all ranks",
        "make them part of the wrapped model, or all_reduce their gradients before step()",
    )


def _last_pass_unsynced(wrapped: list[Event]) -> Event | None:
    """Return the last call before an update if it exchanges no gradients, although an earlier one did."""
    updates: dict[int, list[Event]] = {}
    for e in wrapped:
        updates.setdefault(e["step"], []).append(e)
    several = [calls for calls in updates.values() if len(calls) > 1]
    wrong = [calls[-1] for calls in several if not calls[-1]["sync"] and any(e["sync"] for e in calls)]
    return wrong[0] if len(wrong) > 1 and len(wrong) > len(several) / 2 else None


def _never_synced(wrapped: list[Event], step: int) -> Event | None:
    """Return the last call before an update, numbered from 0, if none before it exchanges gradients."""
    calls = [e for e in wrapped if e["step"] == step]
    return calls[-1] if calls and not any(e["sync"] for e in calls) else None


def _loaded_alone(run: Run) -> Event | None:
    """Return a load that not all ranks have made, after the model was wrapped."""
    loads = [rank.all("load") for rank in run.ranks]
    longest = max(loads, key=len)
    if len(longest) == min(map(len, loads)):
        return None
    wrapped = next((e["t"] for rank in run.ranks for e in rank.all("ddp")), None)
    return longest[0] if wrapped is not None and longest[0]["t"] > wrapped else None


def where_made(run: Run) -> str:
    """Return the line where the first model that is trained was made."""
    trained = {e["model"] for e in run.first.all("forward", train=True, grad=True)}
    return next((str(e.get("made", e["at"])) for e in run.first.all("model") if e["model"] in trained), "")


def _line(at: str) -> str:
    return at.rsplit("/", 1)[-1]


@check("Models that others learn from are the same on all ranks.", ranks=True, after=("weights_agree",))
def teachers_agree(run: Run) -> Iterator[Finding]:
    """A teacher or an average of the weights that only one rank updates gives the ranks different targets."""
    need(not run.sharded and not run.model_parallel, "the ranks have different parts of the weights")
    steps = [events for events in run.aligned("gradients") if all(e["others"] for e in events)]
    need_use(steps, "a model that is in no optimizer")
    need(any(e["backwards"] for e in run.first.all("update")), "no backward pass was seen, so no model learns from it")
    alike = 0
    for number in steps[0][0]["others"]:
        calls = [[e for e in rank.all("forward") if str(e["model"]) == number] for rank in run.ranks]
        if not all(calls):
            continue  # not every rank calls it
        taught = min(map(len, calls)) >= len(run.first.all("update")) / 2  # in training, on every rank
        sums = [[e["others"][number] for e in events] for events in steps if all(number in e["others"] for e in events)]
        unequal = [any(not equal(of_ranks[0], other) for other in of_ranks) for of_ranks in sums]
        moves = len({str(of_ranks[0]) for of_ranks in sums}) > 1
        since = unequal[unequal.index(True) :] if any(unequal) else []  # it may be updated now and then only
        if len(since) > 2 and sum(since) > len(since) / 2 and unequal[-1] and (taught or moves):
            text = (
                f"the {calls[0][0]['cls']} that is called here gets no gradients, and has other weights on each rank "
                f"in {sum(unequal)} of {len(unequal)} updates that were looked at"
            )
            yield (fault if taught else hint)(
                calls[0][0]["at"], text, "update it in the same way on every rank, or broadcast it from rank 0"
            )
        alike += len(unequal) if not any(unequal) else 0
    need(alike, "only some ranks call it, or its weights differ in a few updates")
    seen(alike, "comparisons of its weights over the ranks", 4)


@check("What models compute in forward and keep is the same on all ranks.", ranks=True, after=("weights_agree",))
def buffers_agree(run: Run) -> Iterator[Finding]:
    """A codebook or a running average that each rank updates from its own samples is another one on each rank.

    The statistics of batch norm have checks of their own.
    """
    need(not run.sharded and not run.model_parallel, "the ranks have different parts of the weights")
    wrapped = run.first.all("ddp")
    need_use(wrapped, "DistributedDataParallel")
    steps = [events for events in run.aligned("gradients") if all(e.get("kept_buffers") for e in events)]
    names = {name for events in steps for name in events[0]["kept_buffers"]}
    moving = sorted(n for n in names if len({str(events[0]["kept_buffers"].get(n)) for events in steps}) > 1)
    need_use(moving, "buffers that change in training, other than those of batch norm")
    seen(len(steps), f"updates compared, with {len(moving)} buffers that change", 3)
    apart = [
        name
        for name in moving
        if sum(
            not equal(events[0]["kept_buffers"].get(name), e["kept_buffers"].get(name))
            for events in steps
            for e in events[1:]
        )
        > len(steps) / 2
    ]
    if apart:
        kept = any(e.get("broadcast", True) for e in wrapped)
        what = (
            "DDP gives all ranks those of rank 0, so what the others computed is lost"
            if kept
            else ("and DDP does not exchange them (broadcast_buffers=False), so each rank trains with its own")
        )
        yield (hint if kept else fault)(
            where_made(run) or wrapped[0]["at"],
            f"{len(apart)} buffers differ between the ranks in most updates ({some(map(shown, apart))}); {what}",
            "all_reduce in forward what they are computed from, before they are updated",
        )


@check("All ranks use the same learning rate.", ranks=True, after=("equal_steps",))
def learning_rates_agree(run: Run) -> Iterator[Finding]:
    """With different learning rates, equal gradients lead to different weights."""
    steps = run.aligned("gradients")
    need(steps, "no update was seen on all ranks")
    need(not trains_several(run, steps), "each rank trains a model of its own")
    need_none(several_models(run))
    # with Join, a rank that has ended its pass is a schedule ahead of one that makes the same update in it
    compared = [] if run.any("join") else steps
    for events in compared:
        if len({tuple(e["lr"]) for e in events}) > 1:
            rates = ", ".join(f"{e['lr'][0]:.3g}" for e in events)
            if cause := _other_metric(run, events, rates) or _other_start(events):
                yield cause
                return
            schedules = [e for rank in run.ranks for e in rank.all("schedule") if "stepped_at" in e]
            yield fault(
                max(schedules, key=lambda e: e["steps"])["stepped_at"] if schedules else events[0]["at"],
                f"before update {events[0]['step'] + 1}, the learning rates of the ranks are {rates}",
                "call scheduler.step() on all ranks, equally often",
            )
            return
    for given in run.together("metric"):
        if len({e["value"] for e in given}) > 1:
            values = ", ".join(f"{e['value']:.4g}" for e in given)
            yield fault(
                given[0]["at"],
                f"{given[0]['cls']}.step() got {values} on ranks 0 to {run.world - 1}: as soon as one rank sees a "
                "plateau and another does not, their learning rates differ",
                "combine the value over the ranks first: dist.all_reduce",
            )
            return
    need(compared, "the script uses Join, in which ranks may end at different updates")
    seen(len(compared), "updates compared")


def _other_metric(run: Run, events: tuple[Event, ...], rates: str) -> Finding | None:
    """Return the finding if a schedule was given other values on other ranks."""
    for given in run.together("metric"):
        if given[0]["step"] <= events[0]["step"] and len({e["value"] for e in given}) > 1:
            values = ", ".join(f"{e['value']:.4g}" for e in given)
            text = (
                f"{given[0]['cls']}.step() got {values} on ranks 0 to {run.world - 1}; from update "
                f"{events[0]['step'] + 1} on, their learning rates are {rates}"
            )
            return fault(given[0]["at"], text, "combine the value over the ranks first: dist.all_reduce")
    return None


def _other_start(events: tuple[Event, ...]) -> Finding | None:
    """Return the finding if an optimizer began with other learning rates on other ranks."""
    made = [e.get("made_lr", []) for e in events]
    if not events[0].get("made") or len({tuple(one) for one in made}) == 1:
        return None  # a schedule has changed them since, on one rank more often than on another
    listed = ", ".join(f"{one[0]:.3g}" if one else "none" for one in made)
    text = f"this optimizer was made with the learning rates {listed} on the ranks"
    return fault(events[0]["made"], text, "choose the rate on rank 0, dist.broadcast it, then make the optimizer")
