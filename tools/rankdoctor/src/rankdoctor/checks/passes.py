"""What becomes of the gradients between a backward pass and the update that uses them."""

from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .base import Finding, check, fault, hint, need, need_use, seen, some


@check("Gradients are clipped between backward and the update.")
def clip_in_time(run: Run) -> Iterator[Finding]:
    """Clipping changes the gradients that are there: before backward() there are none, or those of the step before."""
    need_use(run.any("clip"), "clipping of gradients")
    clips: list[Event] = []
    right, early = 0, []
    for e in run.first.events:
        if e["e"] == "clip":
            clips.append(e)
        elif e["e"] == "update":
            total = len(e["backwards"])
            if clips and total and any("passes" in one for one in clips):
                last = max(clips, key=lambda one: one["passes"])
                right += last["passes"] == total
                early += [last] if last["passes"] < total else []
            clips = []
    if len(early) > 1 and not right:
        text = f"gradients are clipped before the last backward() of an update, in all of {len(early)} updates"
        if not any(e["passes"] for e in early):
            text = f"gradients are clipped before backward(), in all of {len(early)} updates, so it changes nothing"
        yield fault(early[0]["at"], text, "clip after backward() and before step()")
    need(not early, f"in {len(early)} updates, gradients were clipped before the last backward pass")
    seen(right, "updates with gradients that were clipped after the last backward pass")


def _without_gradients(run: Run) -> list[Event]:
    """Return the updates of rank 0 after backward passes that have left no gradient for any weight of the optimizer."""
    before = {(e["optimizer"], e["step"]): e["gradients"] for e in run.first.all("gradients")}
    seen_with = {number for (number, _), gradients in before.items() if any(gradients.values())}
    return [
        e
        for e in run.first.all("update")
        if e["backwards"] and e["optimizer"] in seen_with
        if (gradients := before.get((e["optimizer"], e["step"]))) and not any(gradients.values())
    ]


@check("The gradients of every backward pass are used.", after=("sharded_orphans",))
def gradients_used(run: Run) -> Iterator[Finding]:
    """zero_grad() before step() throws away what backward() has computed, for instance before each part of a batch."""
    if run.sharded and (empty := _without_gradients(run)):
        passes = len(empty[0]["backwards"])
        yield fault(
            empty[0]["at"],
            f"update {empty[0]['step'] + 1} has no gradients at all, although {passes} backward passes came before it: "
            f"their exchange is switched off, so they wait for a later update (so it is in {len(empty)} updates)",
            "let one condition decide about set_requires_gradient_sync() and step(), also in a last, shorter group",
        )
        return
    updates = [e for e in run.first.all("update") if "thrown" in e and e["backwards"]][1:]
    need(len(updates) > 2, f"{len(updates)} updates were seen after the first one")
    wrong = [e for e in updates if e["thrown"]]
    if len(wrong) > 1 and len(wrong) > len(updates) / 2:
        (backward, zeroed), e = wrong[0]["thrown"][0], wrong[0]
        text = (
            f"in {len(wrong)} of {len(updates)} updates, the gradients of {len(e['thrown'])} of {len(e['backwards'])} "
            f"backward passes ({_line(backward)}) are set to zero before step() can use them"
        )
        fix = "zero_grad() once for each update, after step() or before the first part; then backward() adds up"
        yield fault(zeroed or backward, text, fix)
    elif wrong:
        begun = {e["step"] for e in run.first.all("pass") if e["loader"] in run.training}
        if all(e["step"] in begun for e in wrong) and len(wrong) >= len(begun) - 1:
            (backward, zeroed), e = wrong[0]["thrown"][0], wrong[0]
            text = f"the last {len(e['thrown'])} backward passes of an epoch are in no update: then come zeros"
            yield hint(zeroed or backward, text, "take a step after the last batch of an epoch, too")
    need(not wrong, f"before {len(wrong)} of {len(updates)} updates, gradients were set to zero without an update")
    used = sum(e["followed"] for e in updates)
    total = sum(len(e["backwards"]) for e in updates)
    need(used == total, f"of {total} backward passes, {used} were followed to an update")
    seen(used, f"backward passes, used by {len(updates)} updates")


def _line(at: str) -> str:
    return at.rpartition("/")[2]


@check("An update uses gradients of its own backward passes.", after=("gradients_zeroed", "gradients_used"))
def own_gradients(run: Run) -> Iterator[Finding]:
    """The pass of a generator leaves gradients in the discriminator; without zero_grad(), its own pass adds to them."""
    numbers = {e["optimizer"] for e in run.first.all("update")}
    need_use(len(numbers) > 1, "several optimizers")
    for number in sorted(numbers):
        updates = run.first.all("update", optimizer=number)
        mixed = [e for e in updates if e.get("left")]
        seen(len(updates), f"updates of optimizer {number + 1}")
        if len(mixed) > 0.5 * len(updates):
            line, own = mixed[0]["left"]
            yield hint(
                mixed[0]["at"],
                f"{len(mixed)} of {len(updates)} updates use, beside the backward pass of {_line(own)}, gradients that "
                f"the one of {_line(line)} has left: another optimizer has used that pass already",
                f"zero_grad() of this optimizer before the backward pass of {_line(own)}, if only that is meant",
            )
            return


@check("What is received overwrites nothing that backward needs.", ranks=True)
def kept_inputs(run: Run) -> Iterator[Finding]:
    """A stage of a pipeline that receives all parts of a batch into one tensor loses the inputs of the earlier ones."""
    messages = [e for rank in run.ranks for e in rank.all("message")]
    need_use(messages, "messages between two ranks")
    lost = [e for e in messages if e.get("overwrites")]
    if lost:
        yield fault(
            lost[0]["at"],
            f"{len(lost)} times a message comes into the memory of an input of the model whose backward pass is still "
            "to come: it then computes with the values of a later part",
            "receive into a new tensor, or into one of a list with a tensor for each part of the batch",
        )
        return
    seen(len(messages), "messages, none of them into an input that backward still needs")


@check("Recomputing activations changes nothing but their memory.")
def recomputation(run: Run) -> Iterator[Finding]:
    """Checkpointing runs forward a second time in backward, with its side effects, such as running means."""
    checkpoints = run.first.all("checkpoint")
    updates = [e for e in run.first.all("update") if "changed_in_backward" in e]
    need_use(checkpoints or any(e["changed_in_backward"] for e in updates), "checkpointing of activations")
    changed = [e for e in updates if e["changed_in_backward"]]
    at = checkpoints[0]["at"] if checkpoints else (updates[0]["backwards"] or [updates[0]["at"]])[0]
    if changed:
        buffers = changed[0]["changed_in_backward"]
        norm = any(name.endswith(("running_mean", "num_batches_tracked")) for name in buffers)
        text = (
            f"in {len(changed)} of {len(updates)} updates, recomputing activations in backward() changes "
            f"{len(buffers)} buffers or numbers again ({some(buffers)})"
        )
        fix = "leave what changes them out of the checkpointed part"
        if norm:
            text += ", so batch norm counts each batch twice in its running statistics"
            fix = "checkpoint what lies between the layers of batch norm, and not these"
        only_numbers = all(name.endswith("(a number)") for name in buffers)  # which may only be for a log
        yield (hint if only_numbers else fault)(at, text, fix)
    for e in checkpoints:
        if e["redrawn"]:
            text = "random numbers are drawn anew when this is recomputed (preserve_rng_state=False)"
            yield fault(e["at"], f"{text}, so backward() has another dropout than forward", "preserve_rng_state=True")
    need(checkpoints, "the script does not use torch.utils.checkpoint")
    seen(len(updates), "updates in which backward() changed no buffer")


@check("What is checkpointed gets gradients.")
def recomputed_gradients(run: Run) -> Iterator[Finding]:
    """Reentrant checkpointing gives weights a gradient only if an input needs one: with a frozen first layer, none."""
    checkpoints = run.first.all("checkpoint")
    need_use(checkpoints, "checkpointing of activations")
    for e in [e for e in checkpoints if e["lost"]][:1]:
        text = "the trainable weights that are checkpointed here get no gradients, because no input needs one"
        fix = "use_reentrant=False; or requires_grad_() for the input, as enable_input_require_grads() does"
        yield fault(e["at"], text, fix)
    seen(len(checkpoints), "lines that checkpoint, with gradients in their outputs")
