"""Validation: over which samples, in which mode, and whether the results of the ranks are combined."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .apart import several_models, trains_several
from .base import (
    NO_VALIDATION,
    Finding,
    Observed,
    check,
    cost,
    fault,
    hint,
    need,
    need_none,
    need_use,
    seen,
    shows,
    some,
)


def _first_passes(run: Run) -> list[tuple[tuple, dict[int, Event]]]:
    """Return the first pass of each validation: its loader, and the event of each rank."""
    epochs = run.epochs(run.validating)
    need(epochs, NO_VALIDATION)
    found = [
        (kind, passes[0]) for kind, passes in epochs.items() if kind[2] and all("file" in e for e in passes[0].values())
    ]
    need(found, "the samples of the validation have no numbers")
    return found


@check("Every validation sample is read once.", after=("same_split", "held_out"), ranks=True)
def validation_counts(run: Run) -> Iterator[Finding]:
    """DistributedSampler repeats samples until all ranks have equally many; drop_last leaves some out."""
    covered: dict[int, set[int]] = defaultdict(set)  # of each data set: a second loader may validate the rest
    firsts = [(kind, parts) for kind, parts in _first_passes(run) if run.same_data(parts)]
    need(firsts, "the ranks have different data sets, so the numbers of their samples cannot be compared")
    for _, parts in firsts:
        for event in parts.values():
            covered[event["base"]].update(run.numbers(event))
    complete, chosen = 0, []
    for kind, parts in firsts:
        size, distributed = kind[2], "Distributed" in kind[3]
        covered_here = set().union(*(run.numbers(event) for event in parts.values()))
        if any(len(set(run.numbers(event))) == len(covered_here) for event in parts.values()) and len(parts) > 1:
            if len(covered_here) == size:
                complete += size
            else:
                chosen.append(f"every rank validates the same {len(covered_here)} of {size} samples")
            continue  # every rank has all of them
        counts = Counter(number for event in parts.values() for number in run.numbers(event))
        trimmed = any(e["loader"].startswith(kind[0] + "#") for e in run.first.all("trimmed") if e["loader"])
        trimmed = trimmed or _counts_once(run, kind[0], counts)
        if not trimmed and (twice := sum(count - 1 for count in counts.values())):
            text = f"{twice} of {size} validation samples count more than once (sampler: {kind[3]})"
            names = {name for name, _ in _collectives_after(run, kind[0]) or []}
            if names and all("gather" in name for name in names):
                fix = "leave the repeated ones out of what is gathered, by their numbers, if the script does not"
                yield hint(kind[0], f"{text}, unless they are left out of what is gathered", fix)
            else:
                fix = "a sampler without padding for validation; combine the sums of the ranks after the loop"
                yield fault(kind[0], text, fix)
        event = parts[min(parts)]
        missing = len(_all_samples(run, event, size, min(parts)) - covered[event["base"]])
        a_batch = run.world * (run.made(event["loader"])["batch_size"] or 0)
        if missing and (missing <= a_batch or distributed):  # a sampler of many fewer samples has chosen them
            own_parts = len({frozenset(_all_samples(run, e, size, rank)) for rank, e in parts.items()}) > 1
            whose = f" of rank {min(parts)}'s part of the data" if own_parts else ""
            text = f"{missing} of {size} validation samples{whose} are never validated (sampler: {kind[3]})"
            yield fault(kind[0], text, "drop_last=False for validation, and parts of the ranks that cover all samples")
        if missing:
            chosen.append(f"{missing} of {size} samples are not validated: the script may have chosen the others")
        complete += len(covered_here)
    need_none(chosen)
    seen(complete, "validation samples, all of the data sets")


def _all_samples(run: Run, event: Event, size: int, number: int) -> set[int]:
    """Return the numbers of all samples of a rank's data set, as numbers of the data set below its subsets."""
    for rank in sorted(run.ranks, key=lambda rank: rank.number != number):  # its own, or that of another rank
        for dataset in rank.all("dataset", dataset=event["dataset"]):
            if dataset["file"]:
                return set(run.numbers(dataset))
    return set(range(size))


@check("The ranks do not repeat each other's validation.", ranks=True)
def validation_repeated(run: Run) -> Iterator[Finding]:
    """If all ranks validate all samples, the result is right, but validation takes as long as on one rank."""
    shared = 0
    for kind, parts in _first_passes(run):
        if not run.same_data(parts):
            continue
        read = [set(run.numbers(event)) for event in parts.values()]  # each rank may have a Subset of its own
        full = sum(len(samples) == kind[2] and samples == read[0] for samples in read)
        if full > 1 and kind[2] > 2 * run.world:
            yield cost(
                kind[0],
                f"{full} ranks validate all {kind[2]} samples each",
                "share the samples between the ranks and combine the sums, or validate on rank 0 only",
            )
        twice = sum(map(len, read)) - len(set().union(*read))
        shared += sum(map(len, read)) if twice <= run.world else 0
    need(shared, "the ranks validate some samples in common, or have different data sets")
    seen(shared, "validation samples, each on one rank")


@check("The ranks exchange the results of a validation that they share.", exercise="two_accuracies", ranks=True)
def results_combined(run: Run) -> Iterator[Finding]:
    """Otherwise rank 0 prints the result of its own part of the samples."""
    need_none(several_models(run))
    for kind, parts in _first_passes(run):
        share = {rank: len(set(run.numbers(event))) for rank, event in parts.items()}
        of_all_ranks = set().union(*(run.numbers(event) for event in parts.values()))
        size = max(kind[2], len(of_all_ranks))  # the data set, also if each rank has a Subset of its own
        if len(share) < run.world or max(share.values()) > 0.9 * size:
            continue  # one rank validates all of them
        following = _collectives_after(run, kind[0])
        need(following is not None, "the run was ended, or failed, before the results could be combined")
        if not following:
            event = parts[min(parts)]
            text = f"no collective follows the validation, so rank 0's result is of {share[0]} of {size} samples"
            yield fault(
                event["at"], text, "dist.all_reduce the sum of losses, of correct answers and of samples; then divide"
            )
            continue
        names = sorted({name for name, _ in following})
        need(set(names) - {"broadcast", "broadcast_object_list"}, "only a broadcast follows the validation")
        shows(f"after the validation: {', '.join(names)} at line {following[0][1].rpartition(':')[2]}")
    need_use(Observed.now, "a validation that the ranks share")


def _collectives_after(run: Run, made_at: str) -> list[tuple[str, str]] | None:
    """Return names and lines of the collectives with values that follow a validation before training goes on.

    None: there are none, because the run ended before.
    """
    found: list[tuple[str, str]] = []
    # ZeroRedundancyOptimizer sends in its update, and Join in its own line
    joins = {e["at"] for e in run.first.all("join")}
    following, trains_again = _events_after(run, made_at)
    for e in following:
        if e["e"] == "functional" or (e["e"] == "collective" and e["name"] != "barrier"):
            if e.get("in_step") or (e["e"] == "collective" and e["at"] in joins):
                continue
            found.append((e.get("name", "functional collective"), e["at"]))
    return found if found or trains_again or run.whole else None


def _events_after(run: Run, made_at: str) -> tuple[list[Event], bool]:
    """Return rank 0's events from a validation until training goes on, and whether it goes on."""
    found: list[Event] = []
    began = False
    for e in run.first.events:
        if e["e"] == "forward":
            if began and e["train"] and e["grad"]:
                return found, True
            began |= not e["grad"] and bool(e["loader"]) and e["loader"].startswith(made_at + "#")
        elif began:
            found.append(e)
    return found, False


def _counts_once(run: Run, made_at: str, counts: Counter[int]) -> bool:
    """Return whether a sum over the ranks after a validation is the number of its samples, each counted once.

    So it is if the script gives a weight of zero to the samples that fill up the shares of the ranks.
    """
    sums = {value for e in _events_after(run, made_at)[0] if e["e"] == "sum" for value in e["totals"]}
    return len(counts) in sums and sum(counts.values()) not in sums


@check("Validation runs in evaluation mode.")
def validation_mode(run: Run) -> Iterator[Finding]:
    """In training mode, dropout makes the result worse, and batch norm learns from the validation samples."""
    calls = [e for e in run.first.all("forward", grad=False) if e["loader"] in run.validating]
    need(calls, NO_VALIDATION)
    wrong = [e for e in calls if e["train"] and e["random_layers"]]
    if wrong:
        text = (
            f"{len(wrong)} of {len(calls)} calls in validation were in training mode, with dropout or batch norm active"
        )
        yield fault(wrong[0]["at"], text, "model.eval() before validation, model.train() after it")
    need(not any(e["train"] for e in calls) or wrong, "the model has no dropout or batch norm that a mode would change")
    seen(len(calls), "calls in validation, all in evaluation mode")


@check("A model that generates or is tried between steps is in evaluation mode.", after=("validation_mode",))
def generating_mode(run: Run) -> Iterator[Finding]:
    """Samples of a generator, or results of averaged weights, are worse with dropout or statistics of a batch.

    A teacher, which is called without gradients in most steps, may rightly be in training mode.
    """
    calls = [e for e in run.first.all("forward", grad=False) if e["loader"] not in run.validating]
    need_use(calls, "calls of a model without gradients, outside of a validation")
    updates = {e["step"] for e in run.first.all("update")}
    for number in sorted({e["model"] for e in calls}):
        mine = [e for e in calls if e["model"] == number]
        wrong = [e for e in mine if e["train"] and e["random_layers"]]
        if wrong and len({e["step"] for e in mine}) < len(updates) / 2:
            text = (
                f"{len(wrong)} calls of {wrong[0]['cls']} without gradients, between steps of the training, were in "
                "training mode, with dropout or batch norm active"
            )
            yield hint(wrong[0]["at"], text, "model.eval() before it, and model.train() after it")
    need(not any(e["train"] for e in calls), "calls in training mode have no dropout or batch norm, or are a teacher's")
    seen(len(calls), "calls without gradients outside of a validation, all in evaluation mode")


@check("Training runs in training mode.")
def training_mode(run: Run) -> Iterator[Finding]:
    """After model.eval() for validation, dropout stays off and batch norm stands still until model.train()."""
    calls = [e for e in run.first.all("forward", grad=True) if e["loader"] in run.training]
    need(calls, "no training with a DataLoader was seen")
    active = {e["model"] for e in calls if e["train"] and e["random_layers"]}
    need(any(e["train"] for e in calls), "the model is in evaluation mode in all of the training, perhaps on purpose")
    need_use(active, "dropout, batch norm")
    seen(sum(e["train"] for e in calls), "calls in training mode")
    trained = {e["model"]: i for i, e in enumerate(calls) if e["train"]}
    later = [e for i, e in enumerate(calls) if not e["train"] and e["model"] in active and i > trained[e["model"]]]
    if later:
        text = f"after a validation, training goes on in evaluation mode: {len(later)} of {len(calls)} calls"
        yield fault(later[0]["at"], text, "model.train() at the begin of each epoch")
    need(run.any("forward", grad=False) or len(run.first.all("pass")) > 1, "no call came between steps of the training")


@check("A frozen part stays in evaluation mode.")
def frozen_modes(run: Run) -> Iterator[Finding]:
    """train() of a model reaches a frozen teacher or backbone in it, too: dropout and running statistics work again."""
    parts = run.first.all("frozen_mode")
    need_use(parts, "a frozen part with dropout or batch norm that was put into evaluation mode")
    for e in [e for e in parts if e["train"]][:1]:
        wakes = [f"{e['random_layers']} layers of dropout"] if e["random_layers"] else []
        wakes += [f"{e['local_norms']} batch norms, whose statistics move"] if e["local_norms"] else []
        yield fault(
            e["at"],
            f"the {e['cls']} is frozen, and line {e['made'].rpartition(':')[2]} puts it into evaluation mode; this "
            f"train() puts it back, so it computes with {' and '.join(wakes)}",
            "call its eval() after each train(), or in a train() of the model around it",
        )
    seen(sum(not e["train"] for e in parts), "frozen parts in evaluation mode in training")


@check("The samples of a validation are not augmented.", after=("same_split",), ranks=True)
def steady_validation(run: Run) -> Iterator[Finding]:
    """`random_split` of one data set gives validation the transforms of training, so its results are of other samples.

    A data set of its own that is random may be meant, such as a simulator or several crops of an image.
    """
    passes = [e for e in run.first.all("pass") if "base" in e]
    trained = {e["base"] for e in passes if e["loader"] in run.training}
    validated = {e["base"]: e for e in reversed(passes) if e["loader"] in run.validating}
    need(validated, NO_VALIDATION)
    probes = [e for e in run.first.all("samples") if e["dataset"] in validated and not e.get("collated")]
    need(probes, "no validation samples could be read by their numbers after the training")
    doubts = []
    for e in probes:
        random = [name for name, varies in zip(e["names"], e.get("varies", []), strict=False) if varies]
        if random and e["dataset"] in trained:
            text = (
                f"validation reads the {e['cls']} of the training, whose samples are other ones with other random "
                f"numbers ({some(f'[n]{name}' for name in random)}): it validates samples that are augmented"
            )
            fix = "make two data sets, one of them without augmentation, and take Subsets with the indices of the split"
            yield hint(run.made(validated[e["dataset"]]["loader"])["at"], text, fix)
        elif random:
            doubts.append("the samples of the validation are random, which may be meant")
        else:
            seen(len(e["contents"]), "validation samples, of which some were read with other random numbers")
    need_none(doubts)


@check(
    "All ranks validate with the same statistics of batch norm.",
    exercise="two_accuracies",
    after=("weights_agree",),
    ranks=True,
)
def validation_statistics(run: Run) -> Iterator[Finding]:
    """Each rank computes running means from its own samples; a checkpoint holds the means of one rank only."""
    calls = run.in_step("forward", grad=False, train=False)
    need(calls, "no validation in evaluation mode was seen")
    need(not trains_several(run, run.aligned("gradients")), "each rank trains a model of its own")
    need_none(several_models(run))
    with_statistics = [events for events in calls if all(e.get("buffers") for e in events)]
    need_use(with_statistics, "statistics of batch norm that each rank computes for itself")
    seen(len(with_statistics), "calls in validation, compared")
    different = [events for events in with_statistics if len({tuple(e["buffers"]) for e in events}) > 1]
    shared = [parts for _, parts in _first_passes(run) if len(parts) == run.world]
    repeated = all(run.numbers(parts[0]) == run.numbers(event) for parts in shared for event in parts.values())
    if different and all(events[0]["loader"] in run.validating for events in different):
        layers = sum(len(set(of_ranks)) > 1 for of_ranks in zip(*(e["buffers"] for e in different[0]), strict=True))
        text = (
            f"in {len(different)} of {len(calls)} calls in validation, the ranks had different running means in "
            f"{layers} layers of batch norm"
        )
        yield (hint if repeated else fault)(  # a result of rank 0 alone fits to a checkpoint of rank 0
            different[0][0]["at"],
            text,
            "give all ranks the same before a validation (for buffer in model.buffers(): dist.broadcast(buffer, 0)), "
            "or use SyncBatchNorm",
        )
    need(not different, "the ranks had different running means, in calls outside of a validation")


@check("Averaged or copied weights are evaluated with statistics of their own.")
def statistics_of_copies(run: Run) -> Iterator[Finding]:
    """parameters() has no running means: an average of the weights alone keeps those with which it was made."""
    calls = [e for e in run.first.all("forward", grad=False, train=False) if e.get("buffers")]
    need_use(calls, "batch norm in evaluation mode")
    own = {number for e in run.first.all("gradients") for number in e["others"]}
    trained = {e["cls"] for e in run.first.all("forward", train=True, grad=True) if e["random_layers"]}
    copies = sorted({e["model"] for e in calls if str(e["model"]) in own and e["cls"] in trained})
    need_use(copies, "a copy of the model with batch norm that is evaluated")
    for number in copies:
        mine = [e for e in calls if e["model"] == number]
        sums = [e["others"][str(number)] for e in run.first.all("gradients") if str(number) in e["others"]]
        moves = len({str(one) for one in sums}) > 1
        late = [e for e in mine if e["step"] > 0]
        made = [e for e in late if e.get("untouched")]
        still = len({str(e["buffers"]) for e in late}) == 1 and len({e["step"] for e in late}) > 1
        if moves and (made or still):
            layers = made[0]["untouched"] if made else len(mine[0]["buffers"])
            how = "with which it was made (mean 0, variance 1)" if made else "of its first evaluation"
            yield fault(
                late[0]["at"],
                f"the copy of {mine[0]['cls']} that is evaluated here gets new weights, but {layers} layers of batch "
                f"norm keep the statistics {how}",
                "copy or average its buffers too: AveragedModel(..., use_buffers=True), or zip over model.buffers()",
            )
        elif moves:
            seen(len(late), "calls of a copy, whose statistics changed with its weights")
    need(Observed.now, "the weights of the copy do not change")


@check(
    "Nothing in the model is random, and no statistic of a batch is used, in evaluation mode.",
    after=("validation_mode",),
)
def random_in_evaluation(run: Run) -> Iterator[Finding]:
    """Functions do not know the mode of the model: dropout_p, F.dropout(x, p) and noise are active after model.eval().

    The same inputs evaluated several times in a row are samples on purpose (Monte Carlo dropout), and so is noise that
    the model scales by what it has learned (a variational autoencoder).
    """
    calls = [e for e in run.first.all("forward", grad=False, train=False) if "random_in" in e]
    need(calls, "no call in evaluation mode was seen")
    times = Counter((e["step"], e["model"], str(e["rows"])) for e in calls if e.get("rows"))
    meant = {key for key, count in times.items() if count > 2}
    calls = [e for e in calls if (e["step"], e["model"], str(e.get("rows"))) not in meant]
    need(calls, "the same inputs are evaluated several times, as if to sample")
    found: dict[tuple[str, str], int] = Counter((what, at) for e in calls for what, at in e["random_in"])
    for (what, at), count in found.items():
        text = f"in {count} of {len(calls)} calls in evaluation mode, "
        if what == "noise":
            fix = "draw it only `if self.training`; if it is meant (a sampler), seed it before each validation"
            yield hint(at, f"{text}the model draws random numbers here, so equal inputs give different outputs", fix)
        elif what.endswith("layer"):
            fix = "call eval() on it too: model.eval() reaches the modules that are registered in the model"
            yield fault(at, f"{text}a {what} here is in training mode", fix)
        elif what == "dropout":
            fix = "pass the rate only in training: dropout_p=p if self.training else 0.0, or training=self.training"
            yield fault(
                at, f"{text}dropout is active here, because a function does not know the mode of the model", fix
            )
        else:
            fix = "pass training=self.training, with running statistics"
            yield fault(at, f"{text}batch norm takes mean and variance of the batch here", fix)
    unknown = [e for e in calls if e.get("drew") and not e["random_in"]]
    if len(unknown) > len(calls) / 2:
        text = (
            f"in {len(unknown)} of {len(calls)} calls in evaluation mode, something in this model draws random numbers"
        )
        yield hint(unknown[0]["at"], text, "draw them only `if self.training`; if they are meant, seed them before")
    need(not unknown, f"in {len(unknown)} of {len(calls)} calls in evaluation mode, random numbers were drawn")
    seen(len(calls), "calls in evaluation mode that drew no random numbers")
