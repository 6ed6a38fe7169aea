"""Faults in gradients, clipping, learning rates and recomputation."""

from doctor_events import NAMES, TRAIN, add, at, change
from faulty import faulty
from rankdoctor.runs import Run


@faulty("gathered_gradients", "NOTE", 46)
def features_are_gathered_without_a_graph(run: Run) -> None:
    add(run, "collective", 46, name="all_gather", size=64, everyone=True, features=True, backward=False)


@faulty("gathered_gradients", "NOTE", 47)
def features_are_gathered_in_the_model(run: Run) -> None:
    add(run, "inner", 47, name="all_gather", features=True)


@faulty("gathered_gradients", "FAULT", 48)
def the_loss_depends_on_gathered_copies(run: Run) -> None:
    features_are_gathered_without_a_graph(run)
    for rank in run.ranks:
        for e in rank.all("update"):
            e["losses"] = [1.0 + rank.number]
    run.launch.used_gathers = [at(48)]


@faulty("gradients_averaged", "NOTE", 44)
def gradients_are_added_up_only(run: Run) -> None:
    change(run, "gradients", kept=1.0)
    add(run, "collective", 44, name="all_reduce", size=30, everyone=True, gradient=True)


@faulty("losses_scaled", "NOTE", 42)
def float16_without_a_scaler(run: Run) -> None:
    change(run, "gradients", scaler=None)
    for rank in run.ranks:
        rank.events.append({"e": "half", "step": 1, "t": 1.0, "at": at(42)})


@faulty("sharded_values", "FAULT", 44)
def norm_of_a_sharded_gradient(run: Run) -> None:
    change(run, "model", sharded=True)
    add(run, "part", 44, placement="_NormPartial(2)")


@faulty("rate_above_zero", "NOTE", 33)
def the_schedule_ends_early(run: Run) -> None:
    for rank in run.ranks:
        updates = rank.all("update")
        step = updates[-1]["step"]
        for kind in ("gradients", "update"):
            last = rank.all(kind)[-1]
            more = [last | {"step": step + n, "count": step + n} for n in range(1, 9)]
            rank.events += [e | ({"lr": [0.0]} if kind == "gradients" else {}) for e in more]


@faulty("schedule_length", "FAULT", 33)
def accelerate_steps_it_twice(run: Run) -> None:
    change(run, "schedule", steps=16, length=8)


@faulty("learning_rates_agree", "FAULT", 48)
def each_rank_has_a_loss_of_its_own(run: Run) -> None:
    change(run, "gradients", (1,), lr=[0.05])
    change(run, "gradients", (0, 1), wanted={"count": 0}, lr=[0.1])
    for rank in run.ranks:
        metric = {"e": "metric", "step": 1, "t": 1.0, "at": at(48), "cls": "ReduceLROnPlateau"}
        rank.events.append(metric | {"value": 0.5 + rank.number})


@faulty("learning_rates_agree", "FAULT", 48)
def a_plateau_of_its_own_that_nobody_has_seen_yet(run: Run) -> None:
    for rank in run.ranks:
        metric = {"e": "metric", "step": 1, "t": 1.0, "at": at(48), "cls": "ReduceLROnPlateau"}
        rank.events.append(metric | {"value": 0.5 + 0.01 * rank.number})


@faulty("learning_rates_agree", "FAULT", 28)
def each_rank_has_searched_a_rate_of_its_own(run: Run) -> None:
    change(run, "gradients", (1,), lr=[0.05])
    change(run, "gradients", wanted={"count": 0}, made=at(28), made_lr=[0.1])
    change(run, "gradients", (1,), wanted={"count": 0}, made_lr=[0.05])


@faulty("learning_rates_agree", "FAULT", 47)
def one_rank_steps_the_scheduler(run: Run) -> None:
    change(run, "schedule", (0,), stepped_at=at(47))
    change(run, "gradients", (1,), lr=[0.1])


@faulty("gradients_arrive", "FAULT", 44)
def loss_of_one_class(run: Run) -> None:
    change(run, "gradients", gradients={name: [0.0, 0.0] for name in NAMES})


@faulty("gradients_arrive", "NOTE", 45)
def unused_layer(run: Run) -> None:
    change(run, "gradients", gradients={name: [0.5, 1.0] for name in NAMES[:2]} | {"c.weight": None})


@faulty("clip_scaled", "FAULT", 44)
def clipped_before_unscale(run: Run) -> None:
    add(run, "clip", 44, scaled=True, plain=True)


@faulty("clip_local", "FAULT", 44)
def local_norm(run: Run) -> None:
    change(run, "model", sharded=True)
    add(run, "clip", 44, scaled=False, plain=True)


@faulty("clip_local", "FAULT", 45)
def own_clipping_of_a_part(run: Run) -> None:
    change(run, "model", sharded=True)
    change(run, "gradients", (1,), factor=0.9)


@faulty("gradients_zeroed", "FAULT", 45)
def no_zero_grad(run: Run) -> None:
    change(run, "update", added=True)


@faulty("accumulation", "COST", 44)
def no_no_sync(run: Run) -> None:
    change(run, "update", backwards=[at(44), at(44)])


@faulty("schedule_length", "NOTE", 33)
def schedule_counts_all_samples_and_gradients_are_accumulated(run: Run) -> None:
    two_batches_for_each_update(run)
    change(run, "schedule", steps=8, length=16)


def two_batches_for_each_update(run: Run) -> None:
    for rank in run.ranks:
        rank.events = [
            each for e in rank.events for each in ([e] * 2 if e["e"] == "batch" and e["loader"] == TRAIN else [e])
        ]
        for e in rank.all("pass", loader=TRAIN):
            e["batches"] *= 2


@faulty("schedule_length", "NOTE", 33)
def schedule_counts_all_samples(run: Run) -> None:
    change(run, "schedule", length=16)


def sharded_and_accumulated(run: Run) -> None:
    """fully_shard adds up two backward passes for each update."""
    change(run, "model", sharded=True, groups=5)
    change(run, "update", backwards=[at(44)] * 2, followed=1, thrown=[])


@faulty("gradients_used", "FAULT", 45)
def a_last_group_whose_gradients_are_not_exchanged(run: Run) -> None:
    sharded_and_accumulated(run)
    for rank in run.ranks:
        for e in rank.all("gradients")[3::4]:
            e["gradients"] = dict.fromkeys(e["gradients"])


@faulty("gradients_used", "FAULT", 42)
def zeroed_before_each_part(run: Run) -> None:
    change(run, "update", thrown=[[at(44), at(42)]] * 3, backwards=[at(44)] * 4)


@faulty("gradients_used", "NOTE", 42)
def the_rest_of_an_epoch(run: Run) -> None:
    change(run, "update", followed=1, thrown=[])
    for rank in run.ranks:
        rank.all("update")[4]["thrown"] = [[at(44), at(42)]] * 2


@faulty("clip_in_time", "FAULT", 44)
def clipped_before_backward(run: Run) -> None:
    clip(run, 0)


def clip(run: Run, passes: int) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients"):
            clipped = {"e": "clip", "step": e["step"], "t": e["t"], "at": at(44), "scaled": False, "plain": True}
            rank.events.insert(rank.events.index(e), clipped | {"passes": passes})


def checkpointed(run: Run, **fields: object) -> None:
    event = {"e": "checkpoint", "step": 0, "t": 0.1, "at": at(25), "lost": False, "redrawn": False}
    for rank in run.ranks:
        rank.events.insert(8, event | fields)
    change(run, "update", changed_in_backward=[])


@faulty("recomputation", "FAULT", 25)
def batch_norm_is_recomputed(run: Run) -> None:
    checkpointed(run)
    change(run, "update", changed_in_backward=["norm.num_batches_tracked"])


@faulty("recomputation", "NOTE", 25)
def a_counter_is_recomputed(run: Run) -> None:
    checkpointed(run)
    change(run, "update", changed_in_backward=["block.calls (a number)"])


@faulty("recomputation", "FAULT", 25)
def dropout_is_recomputed_with_other_numbers(run: Run) -> None:
    checkpointed(run, redrawn=True)


@faulty("recomputed_gradients", "FAULT", 25)
def reentrant_with_a_frozen_first_layer(run: Run) -> None:
    checkpointed(run, lost=True)


@faulty("norms_of_parts", "FAULT", 46)
def trust_ratios_of_shards(run: Run) -> None:
    change(run, "model", sharded=True, groups=4)
    add(run, "part_norm", 46, count=6)


def two_optimizers(run: Run, left: list[str]) -> None:
    """Every second update is one of another optimizer."""
    for rank in run.ranks:
        for number, e in enumerate(rank.all("update")):
            e |= {"optimizer": number % 2, "left": left if number % 2 else []}


@faulty("own_gradients", "NOTE", 45)
def the_discriminator_learns_from_the_pass_of_the_generator(run: Run) -> None:
    two_optimizers(run, [at(42), at(44)])
