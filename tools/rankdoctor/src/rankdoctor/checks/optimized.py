"""Weights that are trained: in an optimizer, with gradients, finite, and really updated."""

import math
from collections.abc import Iterator

from ..runs import Rank, Run
from .base import Finding, check, fault, hint, need, need_none, need_updates, need_use, seen, shows, some
from .weights import where_made


@check("The optimizer has the weights of the model that is called.", after=("sharded_orphans",))
def foreign_weights(run: Run) -> Iterator[Finding]:
    """An optimizer that was made before the model was copied or sharded updates tensors that nobody uses."""
    need_updates(run, 1)
    need(not run.sharded, "sharding replaces the tensors of the model; another check looks at these")
    need(run.any("forward", train=True, grad=True), "no call of a model was seen in training")
    doubts = []
    firsts = {e["optimizer"]: e for e in reversed(run.first.all("update"))}
    for number, e in sorted(firsts.items()):
        steps = [g["gradients"] for g in run.first.all("gradients", optimizer=number)]
        used = any(value and value[1] for step in steps for name, value in step.items() if name.startswith("?"))
        if e["foreign"] and not used and number == run.first.all("update")[0]["optimizer"]:
            text = f"{e['foreign']} of the {e['parameters']} tensors of the optimizer belong to no model that is called"
            yield fault(e["at"], text, "make the optimizer after the model has been moved, copied or wrapped")
        elif e["foreign"]:
            doubts.append(f"{e['foreign']} tensors of an optimizer belong to no model that is called")
    need_none(doubts)
    seen(sum(e["parameters"] for e in firsts.values()), "tensors in optimizers, all of models that are called")


@check("All trainable weights are in an optimizer.", after=("foreign_weights", "sharded_orphans"))
def orphans(run: Run) -> Iterator[Finding]:
    """A weight that gets gradients, but is in no optimizer, stays as it was at the start."""
    need_updates(run, 1)
    need(run.any("trainable"), "the script was ended before the optimizers were complete")
    need(not run.sharded, "sharded weights are looked at by another check")
    need(not run.divides_optimizer, "the optimizer has this rank's part of the weights, which the script gathers")
    trained = {e["model"] for e in run.first.all("forward", train=True, grad=True)}
    at = run.first.all("update")[0]["at"]
    last = {e["model"]: e for e in run.first.all("trainable") if e["model"] in trained}
    without = 0
    for e in last.values():
        without += len(e["orphans"])
        if e["orphans_with_gradient"]:
            text = (
                f"{len(e['orphans'])} of {e['parameters']} trainable weights are in no optimizer ({some(e['orphans'])})"
            )
            fix = "pass all parameters to the optimizer, or requires_grad_(False) for those that are to stay"
            yield (fault if len(e["orphans"]) < e["parameters"] / 2 else hint)(at, text, fix)
    need(not without, f"{without} trainable weights are in no optimizer, and have no gradient at the end")
    seen(sum(e["parameters"] for e in last.values()), "trainable weights, all in an optimizer")


@check("An optimizer has all sharded weights.", exercise="learns_little")
def sharded_orphans(run: Run) -> Iterator[Finding]:
    """An optimizer that was made before fully_shard, or while weights were gathered, updates tensors nobody uses."""
    need_updates(run, 1)
    need_use(run.sharded, "sharded weights")
    need(run.any("sharded"), "the run was ended before the optimizers were complete")
    for e in run.first.all("sharded")[-1:]:
        if e["orphans"]:
            made = next((g["made"] for g in run.first.all("gradients") if g.get("made")), "")
            yield fault(
                made or run.first.all("update")[0]["at"],
                f"{len(e['orphans'])} of {e['parameters']} sharded weights that get gradients are in no optimizer "
                f"({some(e['orphans'])})",
                "make the optimizer after fully_shard, and before the model is called for the first time",
            )
        else:
            seen(e["parameters"], "sharded weights with gradients, all in an optimizer")


def _is_zero(gradient: list[float] | None) -> bool:
    return gradient is None or gradient[1] == 0


@check("All weights get gradients.", after=("sharded_orphans", "recomputed_gradients", "same_unused", "gradients_used"))
def gradients_arrive(run: Run) -> Iterator[Finding]:
    """A loss that does not depend on the model's output trains nothing, without any error."""
    steps = [e for e in run.first.all("gradients") if not e["closure"]]
    seen(len(steps), "updates with their gradients", 3)
    # such as the gate of a mixture of experts, of which one rank has one
    need(run.launch.provocation != "one_rank", "on one rank a part of the model may have nothing to choose")
    need((not run.crashed and run.launch.ended not in ("hang", "lost")) or len(steps) > 5, "the run failed early")
    few = []
    for number in sorted({e["optimizer"] for e in steps}):
        mine = [e["gradients"] for e in steps if e["optimizer"] == number]
        names = [name for name in mine[0] if all(name in gradients for gradients in mine)]
        if names and run.sharded and all(name.startswith("?") for name in names):
            few.append("the tensors of the optimizer belong to no model that is called")
            continue
        few += [f"an optimizer has made {len(mine)} updates only"] if len(mine) < 3 else []
        # FSDP1 may leave a rank no part of a weight, so no gradient of it
        of_all = [
            e["gradients"] for rank in run.ranks if run.sharded for e in rank.all("gradients", optimizer=number)
        ] or mine
        never = [name for name in names if all(_is_zero(gradients.get(name)) for gradients in of_all)]
        at = next(e["at"] for e in steps if e["optimizer"] == number)
        if len(mine) > 2 and never and len(never) == len(names):
            backward = next((e["backwards"] for e in run.first.all("update", optimizer=number) if e["backwards"]), [at])
            text = f"all {len(names)} weights have no gradient, or one of zero, in all {len(mine)} updates compared"
            yield fault(
                backward[0], text, "look at what the loss depends on: its inputs, their shapes, detach() and no_grad()"
            )
        elif len(mine) > 2 and never:
            yield hint(
                at,
                f"{len(never)} of {len(names)} weights got no gradient, or one of zero, in {len(mine)} updates "
                f"({some(never)})",
                "if forward uses them, look for detach() and no_grad() behind them; if not, keep them out of the "
                "optimizer",
            )
        elif names:
            shows(f"{len(names)} weights with gradients")
    need_none(few)


@check("Weights change when they are updated.", after=("gradients_arrive", "low_precision"))
def weights_change(run: Run) -> Iterator[Finding]:
    """An update with a learning rate of zero, or one that is rounded away, changes nothing."""
    doubts = []
    for number in sorted({e["optimizer"] for e in run.first.all("gradients")}):
        steps = run.first.all("gradients", optimizer=number)
        names = [name for name, value in steps[0]["weights"].items() if value and name in steps[0]["gradients"]]
        same = [name for name in names if all(e["weights"].get(name) == steps[0]["weights"][name] for e in steps)]
        if len(steps) < 4 or not names:
            doubts.append(f"{len(steps)} updates of an optimizer were seen, with {len(names)} weights")
        elif any(math.isnan(number) for name in same for number in steps[0]["weights"][name] or []):
            doubts.append("weights were NaN before the first update of an optimizer")
        elif len(same) == len(names):
            text = (
                f"none of {len(names)} weights changed in {len(steps)} updates; learning rate {steps[-1]['lr'][0]:.3g}"
            )
            yield fault(steps[0]["at"], text, "check the learning rate and its schedule")
        elif same:
            doubts.append(f"{len(same)} of {len(names)} weights stayed as they were ({some(same)})")
        else:
            seen(len(names), f"weights that changed in {len(steps)} updates")
    need_none(doubts)


@check("The learning rate is above zero until the end.", after=("schedule_length",))
def rate_above_zero(run: Run) -> Iterator[Finding]:
    """A schedule that is too short reaches zero early: the rest of the run trains nothing, without any error."""
    need(run.launch.ended == "end", "the run was ended before the end of the training")
    last = max((e["step"] for e in run.first.all("update")), default=0)
    for number in sorted({e["optimizer"] for e in run.first.all("gradients")}):
        steps = run.first.all("gradients", optimizer=number)
        seen(len(steps), f"updates of optimizer {number + 1}", 10)
        above = [i for i, e in enumerate(steps) if max(e["lr"], default=0) > 0]
        zero = steps[above[-1] + 1 :] if above else []
        if len(zero) > 1 and zero[0]["step"] < 0.9 * last:
            text = f"the learning rate is 0 from update {zero[0]['step'] + 1} of {last + 1} on"
            at = next((e["at"] for e in run.first.all("schedule")), zero[0]["at"])
            yield hint(at, text, "make the schedule as long as the training, in the steps that it is really stepped")
            return


@check("Weights and gradients are finite numbers.", exercise="damaged_images")
def finite(run: Run) -> Iterator[Finding]:
    """Once a weight is NaN, all that follows is NaN."""
    need(run.launch.provocation not in ("nan", "outliers"), "the doctor made such numbers itself")
    events = [e for rank in run.ranks for e in rank.all("gradients")]
    values = sum(1 for e in events for value in e["weights"].values() if value)
    for e in run.first.all("gradients"):
        bad = [name for name, value in e["weights"].items() if value and not math.isfinite(value[1])]
        if bad:
            text = (
                f"before update {e['step'] + 1}, {len(bad)} of {len(e['weights'])} weights are not finite ({some(bad)})"
            )
            empty = run.first.all("empty")[:1] if e["step"] == run.first.all("gradients")[0]["step"] else []
            if empty:
                fix = "initialize the weights of all layers after to_empty()"
                yield fault(empty[0]["at"], f"to_empty() left weights that nothing initialized: {text}", fix)
            else:
                fix = "look for the first loss that is not finite: learning rate, damaged samples, fp16 without scaler"
                yield fault(e["at"], text, fix)
            return
    wrong = [
        e
        for e in events
        for value in (*e["weights"].values(), *e["gradients"].values())
        if value and not math.isfinite(value[1])
    ]
    need(not wrong, f"before update {wrong[0]['step'] + 1 if wrong else 0} some gradients are not finite")
    seen(values, f"sums of weights before {len(run.first.all('gradients'))} updates of each rank, all finite")


@check("Weights are updated in 32 bits.", exercise="barely_moves")
def low_precision(run: Run) -> Iterator[Finding]:
    """A weight in 16 bits has 2 to 3 digits: an update that is smaller than the last of them is rounded away."""
    need_updates(run, 1)
    same = sum(e.get("low_same", 0) for e in run.first.all("update"))
    total = sum(e.get("low_all", 0) for e in run.first.all("update"))
    dtypes = sorted({d for e in run.first.all("gradients") for d in e["dtypes"]})
    low = [d for d in dtypes if d in ("bfloat16", "float16")]
    need(total or not low, "no update of weights in 16 bits had a gradient")
    if dtypes and not low:
        shows(f"weights in {', '.join(dtypes)}")
    if low and total:
        text = f"weights are updated in {low[0]}: {same / total:.0%} of the updates with a gradient changed nothing"
        kind = fault if same > 0.5 * total else hint
        yield kind(
            where_made(run) or run.first.all("update")[0]["at"],
            text,
            "keep the weights in float32 and compute in 16 bits (autocast)",
        )


@check("Moving averages follow.")
def averages_follow(run: Run) -> Iterator[Finding]:
    """A step of an average is a small part of a difference: in 16 bits, most of them are rounded away."""
    lines = [e for e in run.first.all("average") if e["calls"] > 2 and e["apart"] > 64]
    need_use(lines, "moving averages in 16 bits")
    for e in lines:
        if e["stayed"] > 0.8 * e["apart"]:
            yield fault(
                e["at"],
                f"a moving average is kept in {e['dtype']}, where its steps are smaller than the last digit: of the "
                f"elements that differ from the value, an update leaves {e['stayed'] / e['apart']:.0%} as they are",
                "keep the average in float32, and convert it where it is used",
            )
            return
    seen(sum(e["calls"] for e in lines), "updates of averages in 16 bits")


@check("In each step all ranks train the same weights.", exercise="two_archives", ranks=True)
def same_unused(run: Run) -> Iterator[Finding]:
    """DDP and fully_shard need a gradient of every weight on every rank; some samples may give a part of them none."""
    wraps = run.first.all("ddp")
    if run.sharded and not wraps:
        yield from _unused_shards(run)
        return
    need_use(wraps, "DistributedDataParallel or sharded weights")
    need(not any(e.get("find_unused") for e in wraps), "DDP is told to find weights without a gradient")
    known = [(rank, e) for rank in run.ranks for e in rank.all("unused")]
    always = set.intersection(*({*e["names"]} for _, e in known)) if known else set()
    for rank, e in known:
        if names := [name for name in e["names"] if name not in always]:
            calls = rank.all("forward", train=True, grad=True)
            text = (
                f"in training pass {e['number'] + 1}{_of_batch(run, rank, e['number'])}, {len(names)} weights of rank "
                f"{rank.number} get no gradient ({some(names)}), which get one in other passes; DDP waits for it"
            )
            fix = f"{TAKE_PART}; or find_unused_parameters=True"
            yield fault(calls[0]["at"] if calls else e["at"], text, fix)
            return
    seen(len(known), "backward passes of all ranks, which give the same weights a gradient", 4)


TAKE_PART = "let every part take part in each loss, with a factor of 0 if the batch has nothing for it"


def _unused_shards(run: Run) -> Iterator[Finding]:
    """Yield the finding if a sharded weight gets a gradient on some ranks only.

    fully_shard adds up what each rank has of a group, one weight after the other: a rank that leaves one out adds its
    others to the wrong places.
    """
    need(not run.any("model", cls="FullyShardedDataParallel"), "FSDP1 gives a rank no part of a small weight")
    steps = run.aligned("gradients")
    for events in steps:
        without: list[set[str]] = [{name for name, value in e["gradients"].items() if value is None} for e in events]
        if apart := sorted(set[str]().union(*without) - without[0].intersection(*without)):
            lines = [at for e in run.first.all("update") for at in e["backwards"]]
            yield fault(
                lines[0] if lines else events[0]["at"],
                f"before update {events[0]['count'] + 1}, {len(apart)} weights ({some(apart)}) have a gradient on some "
                "ranks and none on others: fully_shard then adds up gradients of different weights",
                f"{TAKE_PART}; or set_reduce_scatter_unused_params(True) of the sharded model (PyTorch 2.13)",
            )
            return
    seen(len(steps), "updates in which the same sharded weights have a gradient on all ranks", 4)


def _of_batch(run: Run, rank: Rank, number: int) -> str:
    """Return the first samples of the batch of a backward pass, as a part of a sentence; "" if they have no numbers."""
    count, plan, given = -1, None, 0
    for e in rank.events:
        if e["e"] == "pass" and e["loader"] in run.training:
            plan, given = e, 0
        elif e["e"] == "batch" and plan and e["loader"] == plan["loader"]:
            given += 1
        elif e["e"] == "forward" and e["train"] and e["grad"]:
            count += 1
            size = (plan and run.made(plan["loader"])["batch_size"]) or 0
            if count == number and plan and size and given < plan.get("batches", 0):
                samples = run.numbers(plan)[(given - 1) * size : given * size]
                return f" (samples {', '.join(map(str, samples[:4]))}, ...)" if samples else ""
    return ""
