"""How the gradients of an update are scaled, clipped and added up; weights of samples; schedules."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .apart import differing
from .base import Finding, check, cost, fault, hint, need, need_none, need_updates, need_use, seen, shows

UNEVEN = 1.25
"""times that an element may count more than another before it is said"""


@check("Gradients are clipped after the scaler's factor is removed.", exercise="stuck_in_fp16")
def clip_scaled(run: Run) -> Iterator[Finding]:
    """Gradients that are multiplied by 65,536 always exceed the limit, so clipping makes each update far too small."""
    clips = run.first.all("clip")
    need_use(clips, "clipping of gradients")
    scaled = [e for e in clips if e["scaled"]]
    need_use(scaled or any(e.get("scaler") for e in run.first.all("gradients")), "a GradScaler")
    seen(len(clips), "times that gradients were clipped")
    if scaled:
        text = f"gradients are clipped with the scaler's factor still in them ({len(scaled)} of {len(clips)} times)"
        yield fault(scaled[0]["at"], text, "scaler.unscale_(optimizer) before clipping")


@check("Gradients that the script adds up are divided by the number of ranks.", ranks=True)
def gradients_averaged(run: Run) -> Iterator[Finding]:
    """With the sum in place of the mean, every update is as many times as large as there are ranks."""
    steps = [e for e in run.first.all("gradients") if e.get("kept")]
    need_use(steps, "gradients that the script adds up itself")
    need(not run.any("inner", name="message"), "each rank has a part of the samples, whose losses may be added up")
    seen(len(steps), "updates", 2)
    factors = [entry for e in run.first.all("update") for entry in e["factors"] if entry[2]]
    scale = next((scaler["scale"] for e in steps if "scale" in (scaler := e.get("scaler") or {})), 1.0)
    # a GradScaler divides by its factor between the sum and the update
    whole = [e for e in steps if any(0.99 < (e["kept"] or 0) * by < 1.01 for by in (1.0, scale))]
    elements = [entry for e in run.first.all("update") for entry in e.get("elements", []) if entry[3]]
    # of the loss; 1: its mean on this rank
    shares = [samples * factor / scale for _, samples, factor, _ in factors]
    shares = shares or [count * factor / scale for *_, count, factor in elements]
    by_total = [e for e in run.first.all("divisor") if abs(e["times"] - 1) < 0.01]  # then the sum is the mean
    divided = (shares and max(shares) < 0.9) or len(by_total) > 0.8 * len(steps)
    if len(whole) > 0.8 * len(steps) and not divided:
        at = next((e["at"] for e in run.first.all("collective") if e.get("gradient")), steps[0]["at"])
        text = f"gradients are added up over {run.world} ranks and not divided, in {len(whole)} of {len(steps)} updates"
        yield hint(at, text, "divide them by dist.get_world_size(), otherwise updates grow with the number of ranks")
    right = [e for e in steps if any(0.99 < (e["kept"] or 0) * by * run.world < 1.01 for by in (1.0, scale))]
    need(len(right) == len(steps) or divided, "the gradients are changed in another way after they are added up")


@check("Losses in float16 are scaled.")
def losses_scaled(run: Run) -> Iterator[Finding]:
    """Gradients below 6e-8 are zero in float16; a GradScaler multiplies the loss so that they stay above."""
    half = run.first.all("half")
    need_use(half, "autocast in float16")
    seen(len(run.first.all("gradients")), "updates")
    if not any(e["scaler"] for e in run.first.all("gradients")):
        text = "training computes in float16 without a GradScaler, so small gradients become zero"
        yield hint(half[0]["at"], text, "torch.amp.GradScaler, or bfloat16, which needs none")


@check(
    "Gradients are clipped by their norm over all ranks.",
    exercise="faster_clipping",
    ranks=True,
)
def clip_local(run: Run) -> Iterator[Finding]:
    """The norm of one rank's shard of the gradients is too small, and differs between the ranks."""
    clips = run.first.all("clip")
    need_use(run.sharded or run.divides_layers or run.divides_optimizer, "weights of which the ranks have parts")
    plain = [e for e in clips if e["plain"] and (not run.divides_optimizer or e["of_no_model"])]
    steps = [events for events in run.aligned("gradients") if all(e["factor"] for e in events)]
    changed = [events for events in steps if any(abs(e["factor"] - 1) > 1e-3 for e in events)]
    need_use(plain or changed, "clipping of sharded gradients")
    seen(len(changed) or len(plain), "updates with gradients that were made smaller")
    apart = [events for events in steps if max(e["factor"] for e in events) > 1.001 * min(e["factor"] for e in events)]
    need(
        not (apart and run.divides_layers and _shared_differ(apart[0])),
        "the gradients of weights that the ranks share differ before they are clipped",
    )
    if len(apart) > 1 and (run.divides_layers or not plain):
        text = (
            f"before {len(apart)} of {len(steps)} updates, each rank multiplied its part of the gradients by a factor "
            f"of its own ({', '.join(format(e['factor'], '.3g') for e in apart[0])} in the first of them)"
        )
        fix = "clip by the norm over all ranks: clip_grad_norm_(model.parameters(), ...), or all-reduce the squares"
        if run.divides_layers:
            fix = "all-reduce the squared norm of the divided weights, then add that of the shared weights, once"
        yield fault(plain[0]["at"] if plain else apart[0][0]["at"], text, fix)
    elif plain and not run.divides_layers:
        yield fault(
            plain[0]["at"],
            f"{len(plain)} times gradients are clipped by the norm of this rank's part",
            "all-reduce the squared norms of the parts, and multiply all parts by the same factor"
            if run.divides_optimizer
            else "model.clip_grad_norm_(...) with FSDP1; clip_grad_norm_(model.parameters(), ...) with FSDP2",
        )


def _shared_differ(events: tuple[Event, ...]) -> bool:
    """Return whether the gradients of equal weights differ between the ranks, before they were multiplied."""
    shared = set(events[0]["weights"]) - set(differing(events, "weights"))
    undone = [
        {name: [value / e["factor"] for value in values] for name, values in e["gradients"].items() if values}
        for e in events
    ]
    return any(
        abs(one - other) > 1e-3 * undone[0][name][1]
        for of_rank in undone[1:]
        for name in shared & undone[0].keys() & of_rank.keys()
        for one, other in zip(undone[0][name], of_rank[name], strict=True)
    )


@check("Gradients are set to zero between updates.", after=("sharded_orphans",))
def gradients_zeroed(run: Run) -> Iterator[Finding]:
    """backward() adds to the gradients; without zero_grad() each update has the sum of all that came before."""
    for number in sorted({e["optimizer"] for e in run.first.all("update")}):
        updates = run.first.all("update", optimizer=number)[1:]
        if updates and all(e["foreign"] == e["parameters"] for e in updates):
            continue  # of tensors that no backward reaches, such as the outer optimizer of local SGD
        seen(len(updates), "updates after the first one", 3)
        added = sum(e["added"] for e in updates)
        need(added in (0, len(updates)), f"in {added} of {len(updates)} updates backward added to older gradients")
        if added:
            yield fault(
                updates[0]["at"],
                f"in all {len(updates)} compared updates, backward added to the gradients of the update before",
                "optimizer.zero_grad() after each update",
            )
            return


@check(
    "Gradients are exchanged once per update.",
    exercise="accumulation",
    after=("gradients_used", "weights_agree"),
    ranks=True,
)
def accumulation(run: Run) -> Iterator[Finding]:
    """When gradients of several batches are added up, only their sum has to be sent."""
    updates = run.first.all("update")
    need_updates(run)
    # passes whose gradients an update uses, and not those of an attack on the inputs, for instance
    counts = [e["followed"] for e in updates if e.get("followed")] or [len(e["backwards"]) for e in updates]
    parts = Counter(counts).most_common(1)[0][0]
    need_use(parts > 1 and len({e["optimizer"] for e in updates}) == 1, "accumulation of gradients")
    synced = [e["sync"] for e in run.first.all("forward", train=True, grad=True) if "sync" in e]
    need(synced, "the model that is called is not wrapped by DistributedDataParallel")
    if not all(synced):
        exchanges = Counter(e["step"] for e in run.first.all("forward", train=True, grad=True) if e.get("sync"))
        need(max(exchanges.values(), default=0) <= 1, "some updates exchange the gradients several times")
        seen(sum(not sync for sync in synced), "backward passes without an exchange")
    else:
        yield cost(
            updates[0]["backwards"][0],
            f"all {parts} backward passes of an update exchange the gradients",
            "with ddp_model.no_sync() for all of them but the last",
        )


@check("All samples of an update count alike.", exercise="rare_classes", after=("gradients_used",))
def sample_weights(run: Run) -> Iterator[Finding]:
    """Each batch divides by its own number of samples, class weights or tokens; an average of such means is biased."""
    apart, worst, judged, compared = 0, (1.0, "", [0]), 0, 0
    for events in run.together("update"):
        factors = defaultdict(list)
        for at, samples, factor, call in (entry for e in events for entry in e["factors"] if entry[2]):
            factors[at, call].append((samples, abs(factor)))
        judged += bool(factors)
        for (at, _), found in factors.items():
            compared += len(found) if len(found) > 1 else 0
            ratio = max(factor for _, factor in found) / min(factor for _, factor in found)
            apart += ratio > 1.05
            worst = max(worst, (ratio, at, [samples for samples, _ in found]))
    need(judged > 1, "no cross-entropy over classes was seen in training")
    seen(compared, f"losses compared in {judged} updates", 2)
    need(not apart or apart > 0.3 * judged, f"in {apart} of {judged} updates samples count differently")
    if apart:
        text = (
            f"in {apart} of {judged} updates, samples of one update count differently, by up to {worst[0]:.2f} times "
            f"(parts of {', '.join(map(str, worst[2][:4]))} samples)"
        )
        yield hint(worst[1], text, "divide the sum of the losses by what there is in the whole update, over all ranks")


@check("All elements of an update count alike.", after=("gradients_used", "sample_weights"))
def element_weights(run: Run) -> Iterator[Finding]:
    """A mean over a mask divides by its own number of elements; an average of such means favors sparse batches."""
    apart: list[tuple[float, str, list[float]]] = []
    judged = compared = 0
    for events in run.together("update"):
        weights = defaultdict(list)
        for at, term, _, weight in (entry for e in events for entry in e.get("elements", [])):
            weights[at, term].append(weight)
        several = {key: found for key, found in weights.items() if len(found) > 1 and min(found) > 0}
        judged += bool(several)
        compared += sum(map(len, several.values()))
        ratios = [(max(found) / min(found), at, found) for (at, _), found in several.items()]
        apart += [max(ratios)] if ratios and max(ratios)[0] > UNEVEN else []
    need(judged > 1, "no sum or mean over elements was seen in what is minimized, on several ranks or in several parts")
    need(not any(e.get("gradient") for e in run.first.all("collective")), "the script adds up gradients itself")
    need(run.first.all("ddp") or run.sharded or run.world == 1, "the gradients are not averaged by DDP or FSDP")
    need(not apart or len(apart) > 0.6 * judged, f"in {len(apart)} of {judged} updates elements count differently")
    if apart:
        ratio, at, found = sorted(apart)[len(apart) // 2]
        parts = ", ".join(f"1/{1 / weight:.4g}" for weight in found[:4])
        text = (
            f"in {len(apart)} of {judged} updates, the elements of one part (a rank, or a batch that is accumulated) "
            f"count more than those of another: {ratio:.2g} times or more in half of them ({parts}), because each part "
            "divides by its own count"
        )
        fix = "if a mean over all elements is meant: all_reduce the counts, then sum of this part * ranks / total"
        yield hint(at, text, fix)
    seen(compared, f"sums and means compared in {judged} updates", 2)


@check("Each output is compared with its own target.")
def own_target(run: Run) -> Iterator[Finding]:
    """(N, 1) minus (N) is (N, N): each output meets each target, so a regression learns nothing but their mean."""
    passes = sum(len(e["backwards"]) for e in run.first.all("update"))
    need(passes, "no backward pass was seen")
    spread = run.first.all("spread")
    if spread:
        first = spread[0]
        yield fault(
            first["at"],
            f"in {len(spread)} of {passes} backward passes, outputs of shape {tuple(first['shape'])} and targets of "
            f"another shape have become {tuple(first['became'])}: each output is compared with each target",
            "give both one shape: outputs.squeeze(1), or targets.unsqueeze(1)",
        )
        return
    seen(passes, "backward passes", 2)


@check("The schedule is as long as the training.", exercise="other_losses", ranks=True)
def schedule_length(run: Run) -> Iterator[Finding]:
    """A schedule that counts the steps of one rank's data ends too late: the learning rate never comes down."""
    schedules = [e for e in run.first.all("schedule") if e["length"] and e["steps"] > 0]
    need_use(schedules, "a schedule with a length")
    planned, passes = planned_steps(run)
    need(planned, "the run was ended before the end of the training: let it train for one or two epochs")
    updates, batches, parts = len(run.first.all("update")), planned, batches_of_update(run)
    doubts = []
    for e in schedules:
        of_each_batch = parts > 1 and e["steps"] > (1 + parts) / 2 * updates  # and not of each update
        planned = batches if of_each_batch else batches // parts
        if abs(e["length"] - planned) <= passes:
            shows(f"{e['cls']} of {e['length']} steps, {planned} planned")
        else:
            doubts.append(f"{e['cls']} is made for {e['length']} steps, and the data are planned for {planned}")
        if e["steps"] > 1.5 * updates and not of_each_batch:  # accelerate steps it once for each rank
            if planned >= 4 and abs(e["length"] - planned) <= passes:
                text = (
                    f"{e['cls']} is made for {e['length']} steps, as many as a rank has, but it is stepped {run.world} "
                    f"times at each of them, as accelerate does: it ends after 1/{run.world} of the training"
                )
                yield fault(e["at"], text, f"make it for {run.world} times as many steps, before prepare()")
            continue
        # of each pass, the steps of one rank are rounded up from those of all ranks
        too_long = e["length"] > planned + passes and abs(e["length"] - run.world * planned) <= run.world * passes
        if e["steps"] > passes + 1 and planned >= 4 and too_long:
            text = f"{e['cls']} is made for {e['length']} steps, but the training on {run.world} ranks has {planned}"
            yield hint(e["at"], text, "count the steps with the global batch: len(loader) of a rank times epochs")
    need_none(doubts)


def batches_of_update(run: Run) -> int:
    """Return how many batches of a loader an update of rank 0 is made of, in most updates; 1 if there are none."""
    given = Counter(e["step"] for e in run.first.all("batch") if e["loader"] in run.training)
    return Counter(given.values()).most_common(1)[0][0] if given else 1


def planned_steps(run: Run) -> tuple[int, int]:
    """Return how many training batches rank 0 would have had in whole passes, and in how many passes; 0 if unknown."""
    passes = [parts[0] for epochs in run.epochs(run.training).values() for parts in epochs if 0 in parts]
    if (
        run.launch.ended != "end"
        or run.any("load")
        or run.launch.compared == "resumed"
        or not all("batches" in event for event in passes)
    ):
        return 0, len(passes)
    return sum(event["batches"] for event in passes), len(passes)
