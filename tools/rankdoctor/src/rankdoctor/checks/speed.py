"""What makes the training slower than it has to be."""

import itertools
from collections import Counter
from collections.abc import Iterator

from ..events import Event
from ..runs import Run
from .base import NO_VALIDATION, ONE_EPOCH, Finding, check, cost, hint, need, need_updates, need_use, seen

EVERY_STEP = 0.8
SMALL_BATCH = 16
MOST_PROFILED = 10
"""updates in a trace that can still be opened"""


@check("The CPU does not wait for the GPU in every step.", exercise="slow_on_gpu")
def waits(run: Run) -> Iterator[Finding]:
    """loss.item() returns only when the GPU has computed it; meanwhile the CPU cannot prepare the next operations."""
    need(run.launch.standin, "this is judged on the stand-in for a GPU only")
    updates = run.first.all("update")
    need_updates(run, 5)
    steps = steps_of(updates)
    places = Counter(place for e in updates for place in e["waits"])
    for place, count in places.items():
        if count > EVERY_STEP * steps:
            at, name = place.rsplit(" ", 1)
            yield cost(
                at,
                f"{name} makes the CPU wait for a GPU in {min(count, steps)} of {steps} steps",
                "add up detached tensors, and read their value every 50 steps",
            )
    need(False, "single values are read in few steps, or in none; copies of larger tensors are not looked at")


def steps_of(updates: list[Event]) -> int:
    """Return the number of training steps: with several optimizers, the updates of the one that has most of them."""
    return max(Counter(e["optimizer"] for e in updates).values())


@check("The ranks wait for each other in backward only.", ranks=True)
def collectives_per_step(run: Run) -> Iterator[Finding]:
    """Each further collective in a step costs a round trip over the network, and waits for the slowest rank."""
    need_updates(run, 5)
    updates, training, has_batch = 0, False, False
    steps: dict[tuple[str, str], set[int]] = {}
    factors = [e.get("factor") for e in run.first.all("gradients")]
    divisors = {e["summed_at"] for e in run.first.all("divisor")}  # such as the number of tokens of a whole update
    own_factor = not run.any("clip") and any(factor is None or abs(factor - 1) > 1e-4 for factor in factors)
    for e in run.first.events:
        updates += e["e"] == "update"
        begins = e["e"] == "batch" or (e["e"] == "forward" and e["train"] and e["grad"])
        has_batch = e["e"] != "update" and (has_batch or begins)
        training = e["train"] and e["grad"] if e["e"] == "forward" else training
        # gradients the script averages itself, and the loss depends on features
        of_the_user = e.get("own", True) and not e.get("gradient") and not e.get("features")
        # between a batch and its backward pass, such as the number of tokens over all ranks
        for_the_loss = has_batch and e.get("passes") == 0
        # between a backward pass and its update, where the script scales the gradients itself, as to clip them
        for_clipping = own_factor and bool(e.get("passes"))
        of_parts = run.divides_optimizer and e.get("name", "").startswith("all_gather")
        needed = for_the_loss or for_clipping or of_parts or e.get("at") in divisors
        if e["e"] == "collective" and training and of_the_user and not needed and (e["size"] or 0) < 1000:
            steps.setdefault((e["at"], e["name"]), set()).add(updates)
    need(run.whole or run.launch.ended in ("enough", "stopped"), "the run failed, or was ended")
    need(run.exchanges_gradients, "no exchange of gradients was seen, so these collectives may be what trains")
    some_steps = []
    for (at, name), called in steps.items():
        count, number = len(called), steps_of(run.first.all("update"))
        if count > EVERY_STEP * number:
            yield cost(
                at,
                f"{name} is called in {min(count, number)} of {number} steps, beside the exchange of the gradients",
                "if only a log needs its result, call it every 50 steps, or once an epoch",
            )
        some_steps += [f"{name} is called in {count} of {number} steps"] if count > 0.2 * number + 1 else []
    need(not some_steps, "; ".join(some_steps))


@check("Sharded weights are gathered block by block.", exercise="one_big_group", ranks=True)
def one_group(run: Run) -> Iterator[Finding]:
    """One call of fully_shard for the whole model makes one group: all weights are gathered at the same time."""
    models = [e for e in run.first.all("model") if e["sharded"] and e["groups"]]
    need_use(models, "a model that FSDP shards")
    need(any(e["groups"] > 1 or e["blocks"] > 1 for e in models), "the model has no blocks of one kind")
    seen(sum(e["groups"] for e in models), "groups of sharded weights")
    for e in models:
        if e["groups"] == 1 and e["blocks"] > 1:
            name = e["cls"].removeprefix("FSDP")
            yield cost(
                e["made"] if e["made"] != "?" else e["at"],
                f"{name} has {e['blocks']} blocks of one kind and is sharded as one group: all of its weights are "
                "gathered at once",
                "fully_shard(block) for each block, then fully_shard(model); with FSDP1 an auto_wrap_policy",
            )


@check("Workers are kept between epochs.", exercise="reborn_workers")
def workers_restarted(run: Run) -> Iterator[Finding]:
    """Starting workers takes seconds in each epoch; persistent_workers=True keeps them."""
    made = {e["loader"]: e for e in run.first.all("loader")}
    passes: Counter[str] = Counter(e["loader"] for e in run.first.all("pass") if e["workers"])
    need_use(passes, "workers of a loader")
    need(max(passes.values()) > 1, ONE_EPOCH)
    kept = sum(count for loader, count in passes.items() if made[loader]["persistent"] and loader in run.training)
    for loader, count in passes.items():
        if made[loader].get("told_epochs"):
            continue  # workers that are kept have copies of the data set, which set_epoch() does not reach
        if count > 1 and not made[loader]["persistent"] and loader in run.training:
            yield cost(
                made[loader]["at"],
                f"{made[loader]['workers']} workers are started again in each of {count} epochs",
                "persistent_workers=True",
            )
    need(kept, "the loader of the training has no workers, or they have to be started again to learn of the epoch")
    seen(kept, "training passes with workers that are kept")


@check("The loader keeps up with the training.", exercise="slow_samples")
def loading(run: Run) -> Iterator[Finding]:
    """The time that a step waits for its batch is lost; on a GPU, which computes faster, its share is larger."""
    waits_, total, made, steps = 0.0, 0.0, "", 0
    previous: Event | None = None
    for e in run.first.events:
        if e["e"] == "batch" and e["loader"] in run.training:
            if previous:  # not the first batch of a pass, for which workers may have to start
                waits_, total, made = waits_ + e["wait"], total + e["t"] - previous["t"], e["loader"]
                steps += 1
            previous = e
        elif e["e"] == "pass":
            previous = None
    need(total > 0, "no two batches of a pass were trained on")
    need(not run.any("profiler"), "a profiler ran, which takes time in each step")
    seen(steps, "training steps", 5)
    if waits_ > 0.5 * total:
        loader = run.made(made)
        yield cost(
            loader["at"],
            f"{waits_ / total:.0%} of the time of training steps passes by waiting for batches on this "
            f"CPU (num_workers={loader['workers']})",
            "more workers, or samples that are faster to read",
        )
    need(False, f"on this CPU {waits_ / total:.0%} of the time passes by waiting; a GPU computes faster")


@check("The graph of each step is freed.", after=("gradients_zeroed",))
def graphs_kept(run: Run) -> Iterator[Finding]:
    """A sum of losses that are not detached keeps the graph of every step; without backward, also all activations."""
    updates = run.first.all("update")
    need_updates(run, 6)
    last = updates[-1]
    if last["graphs"] > 0.7 * len(updates):
        yield cost(
            last["graph_at"],
            f"after {len(updates)} updates, the graphs of {last['graphs']} losses are still in memory",
            "add up loss.detach()",
        )
        return
    longest = [number for number in _growing(updates) if number >= LEAST_GRAPHS]
    if len(longest) > 1 and sum(longest) > 0.7 * len(updates):
        yield cost(
            last["graph_at"],
            f"in each epoch the graphs of its losses stay in memory, of {max(longest)} at the end of a shortened one",
            "add up, or collect, loss.detach()",
        )
    need(last["graphs"] <= 2 + 0.1 * len(updates), f"the graphs of {last['graphs']} losses are still in memory")


LEAST_GRAPHS = 7
"""that are added one after the other in an epoch of which eight batches are left"""


def _growing(updates: list[Event]) -> list[int]:
    """Return the lengths of the stretches of updates, at each of which one more graph is in memory."""
    lengths = [1]
    for before, after in itertools.pairwise(updates):
        if after["graphs"] == before["graphs"] + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


@check("Workers can share the memory of the data set.", exercise="growing_memory")
def many_objects(run: Run) -> Iterator[Finding]:
    """Reading a Python object changes its reference count, so copy-on-write copies all objects for every worker."""
    need_use(any(e["workers"] for e in run.first.all("loader")), "workers of a loader")
    need(run.first.all("dataset"), "the data of a stream were not looked at")
    for e in run.first.all("dataset"):
        if e["objects"]:
            length, name = e["objects"]
            at = next((m["at"] for m in run.first.all("loader") if m["dataset"] == e["cls"]), "?")
            yield cost(
                at,
                f"{e['cls']}.{name} keeps {length} Python objects, which each worker comes to copy",
                "keep them in one tensor or array",
            )
    need(
        all(e.get("plain") for e in run.first.all("dataset")),
        "only the attributes of the data set itself are looked at, and it has others than tensors and arrays",
    )
    seen(len(run.first.all("dataset")), "data sets that hold tensors and arrays only")


@check("Validation keeps nothing for a backward pass.")
def validation_gradients(run: Run) -> Iterator[Finding]:
    """Without no_grad(), each call keeps its activations until its outputs are freed: time, and a lot of memory."""
    calls = [e for e in run.first.all("forward", grad=False) if e["loader"] in run.validating]
    need(calls, NO_VALIDATION)
    kept = [e for e in calls if e.get("for_nothing") and not e.get("for_inputs")]
    if kept:
        text = f"{len(kept)} of {len(calls)} calls in validation keep what a backward pass would need, and none follows"
        yield cost(kept[0]["at"], text, "with torch.no_grad(): around the validation")
    seen(len(calls) - len(kept), "calls in validation without gradients")


@check("Batch norm has enough samples per rank.", exercise="two_accuracies", ranks=True)
def small_norm(run: Run) -> Iterator[Finding]:
    """Batch norm takes its mean and variance over the samples of one rank, not over the global batch."""
    norms = max((e["local_norms"] for e in run.first.all("model")), default=0)
    need_use(norms, "batch norm")
    sizes = [e["samples"] for e in run.first.all("forward", train=True, grad=True) if "samples" in e]
    need(sizes, "the size of the batches is not known")
    seen(len(sizes), f"batches of up to {max(sizes)} samples")
    if max(sizes) < SMALL_BATCH:
        at = run.first.all("forward", train=True, grad=True)[0]["at"]
        yield hint(
            at,
            f"{norms} layers of batch norm see {max(sizes)} samples per rank",
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped",
        )


@check("A profiler records a few steps.")
def profiled(run: Run) -> Iterator[Finding]:
    """A trace of all steps fills the memory of the host, and is too large to open; a schedule records some of them."""
    traces = run.first.all("profiled")
    need_use(traces, "a profiler")
    longest = max(traces, key=lambda e: e["updates"])
    if longest["updates"] > MOST_PROFILED:
        text = f"the profiler records {longest['updates']} of {len(run.first.all('update'))} updates of this short run"
        fix = "profile(schedule=schedule(wait=5, warmup=2, active=4, repeat=1)), and step() after each update"
        yield cost(longest["at"], text, fix)
    seen(longest["updates"], f"updates at most in each of {len(traces)} traces")
