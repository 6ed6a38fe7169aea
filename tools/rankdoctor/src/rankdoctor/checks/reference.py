"""Reference: the first update beside the same update of a plain copy of the model."""

import math
from collections import defaultdict
from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .apart import drift, several_models
from .asked import asked
from .base import Finding, NotUsed, fault, hint, need, need_none, seen, some

OUTPUTS = {False: 1e-4, True: 0.1}
"""relative difference of outputs that rounding explains, in 32 bits and in 16"""
GRADIENTS = {False: 2e-3, True: 0.3}
SMALL = {False: 1e-4, True: 0.03}
"""the same, as a part of the norm of all gradients: a gradient far smaller than the others is mostly rounding"""


def compared(run: Run) -> bool:
    """Return whether the update was computed in 16 bits. Raises CannotJudge if it was not repeated on all ranks."""
    if run.world < 2:
        raise NotUsed("several ranks")
    failed = sorted({e["text"] for rank in run.ranks for e in rank.all("reference_failed")})
    need(not failed, failed[0] if failed else "")
    need(all(rank.all("reference_update") for rank in run.ranks), "not all ranks came to an update of the first model")
    return any(e["half"] for rank in run.ranks for e in rank.all("reference_update"))


def differing_calls(run: Run, half: bool) -> list[tuple[int, Event]]:
    """Return the calls whose outputs differ, with the numbers of their ranks."""
    return [
        (rank.number, e) for rank in run.ranks for e in rank.all("reference_call") if not e["error"] <= OUTPUTS[half]
    ]


@asked("reference", "The wrapped model computes what the model alone computes.")
def outputs_of_reference(run: Run) -> Iterator[Finding]:
    """Sharding and parallel layers change where a model is computed, and not what it computes."""
    half = compared(run)
    calls = [e for rank in run.ranks for e in rank.all("reference_call")]
    seen(len(calls), "calls repeated with a copy")
    wrong = differing_calls(run, half)
    if wrong:
        random = any(e["random_layers"] for _, e in wrong)
        need(not (random and run.model_parallel), "parallel layers draw other random numbers for dropout")
        e = wrong[0][1]
        yield fault(
            e["at"],
            f"the outputs of {e['cls']} differ from those of a copy for one process, with the same weights and inputs, "
            f"on {len({n for n, _ in wrong})} of {run.world} ranks (relative difference {e['error']:.2g})",
            "look at what shards or parallelizes the model: a layer may miss an all-reduce, or get a part of its input",
        )


@asked("reference", "The gradients are those of the model alone, averaged over the ranks.", after=("clip_local",))
def gradients_of_reference(run: Run) -> Iterator[Finding]:
    """A factor, or a part that is missing, does not stop the loss from falling; with Adam it is hard to notice."""
    half = compared(run)
    need_none(several_models(run))
    need(not run.divides_optimizer, "the script averages its gradients as parts, in tensors of no model")
    need(not differing_calls(run, half), "the outputs differ first")
    by_rank = {rank.number: {e["name"]: e for e in rank.all("reference")} for rank in run.ranks}
    lines = {rank.all("reference")[0]["at"] for rank in run.ranks if rank.all("reference")}
    need(len(lines) == 1, "the first updates of the ranks are in different lines, as if one trains alone before")
    names = list(by_rank[run.first.number])
    seen(len(names), "gradients compared with a copy")
    wanted = {name: mean([events[name]["wanted"] for events in by_rank.values() if name in events]) for name in names}
    floor = SMALL[half] * math.sqrt(sum(norm(one) ** 2 for one in wanted.values()))
    update = run.first.all("reference_update")[0]
    passes, averaged = update["passes"], update["averaged"]
    touched = {name for events in by_rank.values() for name, e in events.items() if e["touched"]}
    groups: dict[str, list[tuple[int, str]]] = defaultdict(list)
    ways: set[str] = set()
    for number, events in by_rank.items():
        for name in names:
            event = events.get(name)
            if event is not None and name in touched:  # also through its shard on another rank
                event["touched"] = True
            kind = what_differs(event, wanted[name], GRADIENTS[half], floor, run.world, passes)
            if kind and kind != OWN_WAY and name in touched and not averaged:
                kind = OWN_WAY  # a script that adds up the gradients itself may have divided its loss before
            if kind == OWN_WAY:
                ways.add(kind)
            elif kind:
                groups[kind].append((number, name))
    at = run.first.all("reference")[0]["at"]
    # a later tensor of this size may hold weights, such as those that neighbours on a ring average
    reduced = any(e.get("gradient") and e["step"] <= 1 for r in run.ranks for e in r.all("collective"))
    exchanged = run.sharded or run.any("ddp") or reduced
    if set(groups) == {OWN_SAMPLES}:
        need((exchanged or averaged) and not drift(run), "the script exchanges no gradients, as in local SGD")
    for kind, found in groups.items():
        ranks = sorted({number for number, _ in found})
        weights = list(dict.fromkeys(name for _, name in found))
        where = "all ranks" if len(ranks) == run.world else f"rank {', '.join(map(str, ranks))}"
        yield fault(
            at, f"the gradients of {len(weights)} of {len(names)} weights ({some(weights)}) {kind}, on {where}", FIX
        )
    if not groups:
        need(OWN_WAY not in ways, "the script changes its gradients after backward, in a way of its own")
        yield from divided_loss(run, at)


OWN_SAMPLES = "are those of this rank's own samples, not averaged over the ranks"
FIX = (
    "compare with the gradient of one process: DistributedDataParallel and fully_shard average over the ranks, so what "
    "the script adds, divides or leaves out itself has to go"
)


OWN_WAY = "are changed by the script"
"""such as by its own clipping, or by noise: this is no fault"""


def what_differs(
    event: Event | None, wanted: list[float], tolerance: float, floor: float, world: int, passes: int
) -> str:
    """Return in words how a gradient differs from the wanted one, both as sketches; "" if it does not."""
    size = norm(wanted)
    limit = tolerance * size + floor
    if event is None or event["got"] is None:
        return "are missing" if size > limit else ""
    got, own = event["got"], event["wanted"]
    if norm(minus(got, wanted)) <= limit:
        return ""
    if norm(minus(got, own)) <= tolerance * norm(own) + floor:
        return OWN_SAMPLES
    factor = sum(a * b for a, b in zip(got, wanted, strict=True)) / max(size * size, 1e-30)
    if norm(minus(got, [factor * one for one in wanted])) <= tolerance * norm(got) + floor:
        words = named(factor, world, passes)
        if words or not event["touched"]:
            return f"are {words or f'multiplied by {factor:.3g}'}"
    if event["touched"]:
        return OWN_WAY
    return f"differ from those of one process (relative difference {norm(minus(got, wanted)) / max(size, 1e-30):.2g})"


def named(factor: float, world: int, passes: int) -> str:
    """Return a factor in words if it is likely to come from a mistake; "" if not."""
    known = {
        0.0: "zero",
        float(world): f"{world} times too large: a sum over the {world} ranks, not their mean",
        1 / world: f"{world} times too small: divided by the number of ranks once more",
        float(
            passes
        ): f"{passes} times too large: a sum over the {passes} backward passes of the update, counted again",
        1 / passes: f"{passes} times too small: divided by the number of backward passes of the update once more",
    }
    for value, words in known.items():
        if abs(factor - value) <= 0.03 * max(value, 0.03) and value != 1:
            return words
    return ""


def divided_loss(run: Run, at: str) -> Iterator[Finding]:
    """Yield a finding if the loss itself is divided by the number of ranks, which the gradients then are as well."""
    shares = []
    for rank in run.ranks:
        first = next((e for e in rank.all("update") if e["factors"]), None)
        counted = rank.all("gradients")
        scaler = counted[0].get("scaler") if counted else None
        if first is None or (scaler and scaler.get("scale")) or any(first.get("of_terms", [])):
            return  # of several terms, a factor may be the weight of one
        shares.append(sum(count * weight for _, count, weight, _ in first["factors"]))
    if shares and all(abs(share * run.world - 1) < 0.01 for share in shares):
        yield hint(
            at,
            f"the mean loss of each rank counts 1/{run.world} in what is minimized, and the gradients are averaged "
            f"over the {run.world} ranks as well: they are 1/{run.world} of the gradient of the global batch",
            "leave the division to the average over the ranks",
        )


@asked("reference", "The norm of the gradients is the norm over all ranks.")
def norm_of_reference(run: Run) -> Iterator[Finding]:
    """A norm of one rank's shard is too small, and clips differently on each rank."""
    half = compared(run)
    norms = [(rank.number, e) for rank in run.ranks for e in rank.all("reference_norm")]
    if not norms:
        raise NotUsed("a norm of the gradients")
    seen(len(norms), "norms compared")
    tolerance = 0.05 if half else 1e-3
    wrong = [(n, e) for n, e in norms if not abs(e["value"] - e["true"]) <= tolerance * max(e["true"], 1e-12)]
    if wrong:
        number, e = wrong[0]
        yield fault(
            e["at"],
            f"the norm of the gradients is {e['value']:.4g} on rank {number}, and {e['true']:.4g} over all ranks",
            "give clip_grad_norm_ the sharded parameters themselves, and log its result after full_tensor()",
        )


@asked("reference", "Replicas of sharded weights are equal.", after=("unsharded_agree",))
def replicas_agree(run: Run) -> Iterator[Finding]:
    """fully_shard over two dimensions averages the gradients of its replicas; nothing makes them equal at the start."""
    half = compared(run)
    need(run.sharded, "no weight is sharded")
    one_input = run.model_parallel and run.launch.provocation in ("nan", "outliers")
    need(not one_input, "this run gives ranks that share a sample other inputs")
    need(not differing_calls(run, half), "the outputs differ first")
    places = [rank.all("parts") for rank in run.ranks]
    need(all(places), "not all ranks came to an update")
    for number, events in enumerate(zip(*places, strict=False)):
        replicas: dict[tuple[str, str], list[tuple[int, list[float]]]] = defaultdict(list)
        for rank, e in zip(run.ranks, events, strict=True):
            for name, (part, *values) in e["parts"].items():
                replicas[name, part].append((rank.number, values))
        compared_parts = {key: found for key, found in replicas.items() if len(found) > 1}
        need(compared_parts, "each weight, or part of one, is on one rank only")
        if not number:
            seen(len(compared_parts), "parts of weights that several ranks have")
        wrong = [
            key for key, found in compared_parts.items() if not all(near(found[0][1], one) for _, one in found[1:])
        ]
        if wrong:
            names = list(dict.fromkeys(name for name, _ in wrong))
            ranks = ", ".join(str(rank) for rank, _ in compared_parts[wrong[0]])
            yield fault(
                run.first.all("model")[0]["made"],
                f"{len(names)} weights ({some(names)}) differ between replicas, such as ranks "
                f"{ranks}, after update {events[0]['step']}",
                "build the model with the same seed on all ranks, or load the same checkpoint, before it is sharded",
            )
            return


def near(one: list[float], other: list[float]) -> bool:
    """Return whether two sums are equal up to the rounding of some updates, relative to the sums of absolute values."""
    return all(abs(a - b) <= 1e-3 * max(one[-1], other[-1], 1e-30) for a, b in zip(one, other, strict=True))


def mean(sketches: list[list[float]]) -> list[float]:
    """Return the mean of several sketches."""
    return [sum(values) / len(sketches) for values in zip(*sketches, strict=True)]


def minus(one: list[float], other: list[float]) -> list[float]:
    """Return the difference of two sketches."""
    return [a - b for a, b in zip(one, other, strict=True)]


def norm(values: list[float]) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(sum(value * value for value in values))
