"""Each check finds its fault in the events of a run, names the cause's line, and finds nothing in a correct run."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from doctor_events import NAMES, SAMPLES, TRAIN, VAL, add, at, change, correct_run
from rankdoctor.checks import CHECKS, Diagnosis, apply, counted, judge
from rankdoctor.checks.base import Check, Finding, hint, need, seen
from rankdoctor.launch import likely_launchers
from rankdoctor.runs import Run

FAULTS: dict[str, tuple[str, int, Callable[[Run], object]]] = {}
"""for each check: kind of the finding, line, and what makes the events faulty"""


def faulty(check: str, kind: str, line: int) -> Callable:
    def register(function: Callable[[Run], object]) -> Callable[[Run], object]:
        FAULTS[check if check not in FAULTS else f"{check} ({function.__name__})"] = kind, line, function
        return function

    return register


def set_samples(run: Run, prefix: str, *parts: list[int]) -> None:
    for rank, part in enumerate(parts):
        for name in run.samples:
            if name.startswith(f"{prefix}{rank}_"):
                run.samples[name] = part


@faulty("same_samples", "FAULT", 10)
def every_rank_has_all(run: Run) -> None:
    set_samples(run, "", list(range(SAMPLES)), [(3 * n) % SAMPLES for n in range(SAMPLES)])


@faulty("same_samples", "FAULT", 10)
def each_rank_permutes_the_data_before_they_are_shared(run: Run) -> None:
    run.samples["0_0"], run.samples["1_0"] = [0, 5, 10, 15, 4, 9, 14, 3], [6, 7, 10, 15, 4, 1, 2, 8]


@faulty("same_samples", "FAULT", 10)
def epochs_are_counted_on_rank_0_only(run: Run) -> None:
    run.samples["0_1"], run.samples["1_1"] = [1, 4, 11, 0, 5, 10, 15, 9], run.samples["1_0"]


@faulty("same_samples", "FAULT", 10)
def same_inputs_without_numbers(run: Run) -> None:
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "pass"]
        for number, e in enumerate(rank.all("forward", train=True)):
            e["rows"] = [number, number + 100]


@faulty("shared_once", "FAULT", 9)
def shared_twice(run: Run) -> None:
    change(run, "loader", sampler_at=at(9))
    change(run, "dataset", size=64)
    set_samples(run, "", list(range(0, 64, 4)), list(range(2, 64, 4)))


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


@faulty("generating_mode", "NOTE", 60)
def averaged_weights_generate_in_training_mode(run: Run) -> None:
    for rank in run.ranks:
        for step in (4, 8):
            call = {"e": "forward", "step": step, "t": 1.0, "at": at(60), "model": 1, "cls": "EMA", "train": True}
            rank.events.append(call | {"grad": False, "loader": None, "random_layers": 2})


@faulty("gradients_averaged", "NOTE", 44)
def gradients_are_added_up_only(run: Run) -> None:
    change(run, "gradients", kept=1.0)
    add(run, "collective", 44, name="all_reduce", size=30, everyone=True, gradient=True)


@faulty("losses_scaled", "NOTE", 42)
def float16_without_a_scaler(run: Run) -> None:
    change(run, "gradients", scaler=None)
    for rank in run.ranks:
        rank.events.append({"e": "half", "step": 1, "t": 1.0, "at": at(42)})


@faulty("timeouts", "NOTE", 5)
def a_group_without_the_timeout(run: Run) -> None:
    change(run, "init", timeout=7200.0)
    for rank in run.ranks:
        rank.events.insert(2, {"e": "group", "step": 0, "t": 0.0, "at": at(5), "ranks": [0, 1], "timeout": None})


@faulty("sharded_values", "FAULT", 44)
def norm_of_a_sharded_gradient(run: Run) -> None:
    change(run, "model", sharded=True)
    add(run, "part", 44, placement="_NormPartial(2)")


@faulty("same_order", "FAULT", 42)
def no_set_epoch(run: Run) -> None:
    for rank in (0, 1):
        run.samples[f"{rank}_1"] = run.samples[f"{rank}_0"]


@faulty("same_order", "NOTE", 10)
def no_shuffling(run: Run) -> None:
    set_samples(run, "", list(range(0, SAMPLES, 2)), list(range(1, SAMPLES, 2)))


@faulty("held_out", "FAULT", 20)
def unseeded_split(run: Run) -> None:
    change(run, "pass", base=7)
    set_samples(run, "v", [0, 1, 90, 91], [92, 93, 94, 95])


@faulty("same_split", "FAULT", 12)
def each_rank_splits_in_its_own_way(run: Run) -> None:
    for rank in run.ranks:
        split = {"e": "split", "step": 0, "t": 0.1, "at": at(12), "sizes": [80, 20], "order": rank.number, "content": 7}
        rank.events.insert(3, split)


@faulty("stream_repeats", "FAULT", 10)
def workers_repeat_the_stream(run: Run) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, iterable=True)
    change(run, "pass", wanted={"loader": TRAIN}, workers=2)
    for rank in run.ranks:
        for number, e in enumerate(rank.all("forward", train=True)):
            e["rows"] = [1000 * rank.number + 10 * (number // 2), 1000 * rank.number + 10 * (number // 2) + 1]


@faulty("validation_counts", "FAULT", 20)
def validation_padded(run: Run) -> None:
    set_samples(run, "v", [0, 2, 4, 6, 8, 10, 12, 14, 0], [1, 3, 5, 7, 9, 11, 13, 15, 1])


@faulty("validation_counts", "FAULT", 20)
def validation_drops_the_last(run: Run) -> None:
    set_samples(run, "v", [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11])


@faulty("validation_repeated", "COST", 20)
def all_validate_all(run: Run) -> None:
    set_samples(run, "v", list(range(SAMPLES)), list(range(SAMPLES)))


@faulty("results_combined", "FAULT", 50)
def only_the_optimizer_sends(run: Run) -> None:
    results_stay_apart(run)
    for rank in run.ranks:
        validated = [i for i, e in enumerate(rank.events) if e["e"] == "forward" and not e["train"]]
        sent = {"e": "collective", "step": 4, "t": 1.0, "at": at(45), "name": "broadcast", "size": 10, "everyone": True}
        sent["in_step"] = True
        rank.events.insert(validated[3] + 1, sent)  # after the first validation


@faulty("results_combined", "FAULT", 50)
def results_stay_apart(run: Run) -> None:
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "collective"]


@faulty("validation_mode", "FAULT", 51)
def validation_in_training_mode(run: Run) -> None:
    change(run, "forward", wanted={"loader": VAL}, train=True, random_layers=2)


@faulty("training_mode", "FAULT", 43)
def second_epoch_in_evaluation_mode(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("forward", loader=TRAIN)[4:]:
            e.update(train=False, random_layers=0)


@faulty("validation_statistics", "FAULT", 51)
def other_running_means(run: Run) -> None:
    for rank in run.ranks:
        change(run, "forward", (rank.number,), {"loader": VAL}, buffers=[5, rank.number])


def test_only_layers_that_differ_are_counted() -> None:
    run = correct_run()
    other_running_means(run)
    (finding,) = judge([run]).findings
    assert "different running means in 1 layers of batch norm" in finding.text


def make_weights_differ(run: Run) -> None:
    for e in run.ranks[1].all("gradients")[1:]:
        e["weights"] = {name: [value[0], value[1] + 0.1] for name, value in e["weights"].items()}
    for e in run.ranks[1].all("gradients"):
        e["gradients"] = {name: [0.1, 0.7] for name in NAMES}


@faulty("weights_agree", "FAULT", 43)
def inner_model_called(run: Run) -> None:
    make_weights_differ(run)
    for rank in run.ranks:
        for e in rank.all("forward", train=True):
            del e["ddp"], e["sync"]
            e["inside"] = at(30)


@faulty("weights_agree", "FAULT", 43)
def always_no_sync(run: Run) -> None:
    make_weights_differ(run)
    change(run, "forward", wanted={"train": True}, sync=False)


@faulty("weights_agree", "FAULT", 30)
def unfrozen_after_wrapping(run: Run) -> None:
    make_weights_differ(run)
    change(run, "ddp", frozen=2)


@faulty("weights_agree", "FAULT", 29)
def never_wrapped(run: Run) -> None:
    make_weights_differ(run)
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "ddp"]
        for e in rank.all("forward"):
            e.pop("ddp")


@faulty("weights_agree", "FAULT", 34)
def a_module_beside_the_wrapped_one(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["weights"]["1:scale"] = [0.1 * rank.number * e["step"], 1.0]
            e["gradients"]["1:scale"] = [0.5, 1.0]
        made = next(e for e in rank.events if e["e"] == "model")
        rank.events.insert(rank.events.index(made), made | {"model": 1, "cls": "Weighting", "made": at(34)})


@faulty("weights_agree", "FAULT", 43)
def gradients_are_exchanged_too_early(run: Run) -> None:
    make_weights_differ(run)
    for rank in run.ranks:
        events = []
        for e in rank.events:
            events += [e, e | {"sync": False}] if e["e"] == "forward" and e["train"] else [e]
        rank.events = events


@faulty("weights_agree", "FAULT", 35)
def only_rank_0_loads(run: Run) -> None:
    make_weights_differ(run)
    events = run.ranks[0].events
    wrapped = next(i for i, e in enumerate(events) if e["e"] == "ddp")
    events.insert(wrapped + 1, {"e": "load", "step": 0, "t": 9.0, "at": at(35), "file": "/home/me/last.pt"})


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


def test_a_rank_that_leaves_out_its_first_update_has_made_its_optimizer_in_the_same_way() -> None:
    """Its schedule has gone on meanwhile, so its first update has another rate."""
    run = correct_run()
    each_rank_has_searched_a_rate_of_its_own(run)
    change(run, "gradients", wanted={"count": 0}, made_lr=[0.1])
    (finding,) = judge([run]).faults
    assert finding.at != at(28)


@faulty("learning_rates_agree", "FAULT", 47)
def one_rank_steps_the_scheduler(run: Run) -> None:
    change(run, "schedule", (0,), stepped_at=at(47))
    change(run, "gradients", (1,), lr=[0.1])


@faulty("foreign_weights", "FAULT", 45)
def optimizer_of_a_copy(run: Run) -> None:
    change(run, "update", foreign=3)


@faulty("orphans", "FAULT", 45)
def head_forgotten(run: Run) -> None:
    change(run, "trainable", orphans=["c.weight"], orphans_with_gradient=1)


@faulty("gradients_arrive", "FAULT", 44)
def loss_of_one_class(run: Run) -> None:
    change(run, "gradients", gradients={name: [0.0, 0.0] for name in NAMES})


@faulty("gradients_arrive", "NOTE", 45)
def unused_layer(run: Run) -> None:
    change(run, "gradients", gradients={name: [0.5, 1.0] for name in NAMES[:2]} | {"c.weight": None})


@faulty("weights_change", "FAULT", 45)
def learning_rate_zero(run: Run) -> None:
    change(run, "gradients", weights={name: [0.5, 1.0] for name in NAMES}, lr=[0.0])


@faulty("finite", "FAULT", 45)
def weights_are_nan(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients")[2:]:
            e["weights"] = {name: [float("nan"), float("nan")] for name in NAMES}


@faulty("finite", "FAULT", 31)
def a_layer_is_never_initialized(run: Run) -> None:
    for rank in run.ranks:
        rank.events.insert(0, {"e": "empty", "step": 0, "t": 0.0, "at": at(31)})
        for e in rank.all("gradients"):
            e["weights"]["b.weight"] = [float("nan"), float("nan")]


@faulty("low_precision", "FAULT", 29)
def weights_in_bf16(run: Run) -> None:
    change(run, "gradients", dtypes=["bfloat16"])
    change(run, "update", low_same=80, low_all=100)


@faulty("equal_steps", "FAULT", 10)
def one_batch_more(run: Run) -> None:
    change(run, "pass", (1,), {"loader": TRAIN}, batches=5)


@faulty("same_collectives", "FAULT", 53)
def collectives_per_batch(run: Run) -> None:
    for rank in run.ranks:
        extra = next(e for e in rank.events if e["e"] == "collective")
        rank.events.extend(extra | {"name": "barrier", "size": None} for _ in range(rank.number))


@faulty("hang", "FAULT", 45)
def two_ranks_wait(run: Run) -> None:
    run.launch.ended = "hang"
    run.launch.stuck = {1000: f"{at(45)} in backward", 1001: f"{at(53)} in all_reduce"}


@faulty("clip_scaled", "FAULT", 44)
def clipped_before_unscale(run: Run) -> None:
    add(run, "clip", 44, scaled=True, plain=True)


@faulty("clip_local", "FAULT", 44)
def local_norm(run: Run) -> None:
    change(run, "model", sharded=True)
    add(run, "clip", 44, scaled=False, plain=True)


@faulty("one_group", "COST", 29)
def blocks_that_are_not_sharded_one_by_one(run: Run) -> None:
    change(run, "model", sharded=True, groups=1)


@faulty("sharded_orphans", "FAULT", 45)
def sharded_weights_without_an_optimizer(run: Run) -> None:
    change(run, "model", sharded=True, groups=5)
    add(run, "sharded", 45, parameters=3, orphans=["layer.weight"])


@faulty("clip_local", "FAULT", 45)
def own_clipping_of_a_part(run: Run) -> None:
    change(run, "model", sharded=True)
    change(run, "gradients", (1,), factor=0.9)


@faulty("teachers_agree", "FAULT", 60)
def average_on_rank_0_only(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["others"] = {"7": [1.0 + e["count"] * (1 - rank.number), 2.0]}
        calls = [e | {"model": 7, "grad": False, "at": at(60), "loader": None} for e in rank.all("forward", train=True)]
        rank.events.extend(calls)


@faulty("gradients_zeroed", "FAULT", 45)
def no_zero_grad(run: Run) -> None:
    change(run, "update", added=True)


@faulty("accumulation", "COST", 44)
def no_no_sync(run: Run) -> None:
    change(run, "update", backwards=[at(44), at(44)])


@faulty("sample_weights", "NOTE", 44)
def class_weights_per_rank(run: Run) -> None:
    change(run, "update", (1,), factors=[[at(44), 2, 0.2]])


@faulty("schedule_length", "NOTE", 33)
def schedule_counts_all_samples(run: Run) -> None:
    change(run, "schedule", length=16)


@faulty("same_dropout", "NOTE", 41)
def one_seed(run: Run) -> None:
    for events in run.together("forward"):
        for e in events:
            e["rng"] = e["step"]


@faulty("same_noise", "NOTE", 43)
def one_seed_for_noise(run: Run) -> None:
    add(run, "noise", 43, samples=2, values=7)


def test_noise_of_each_rank_and_noise_that_is_no_batch() -> None:
    run = correct_run()
    for rank in (0, 1):
        add(run, "noise", 43, (rank,), samples=2, values=rank)
        add(run, "noise", 47, (rank,), samples=64, values=7)  # for example latent vectors of pictures that are shown
    assert not [finding for finding in judge([run]).findings if finding.check == "same_noise"]


def fetches(run: Run, state: Callable[[int, int], int]) -> None:
    for rank in run.ranks:
        rank.workers = [
            {
                "e": "fetch",
                "worker": w,
                "count": 1,
                "used": {"numpy": state(rank.number, w)},
                "dataset": "Images",
            }
            for w in (0, 1)
        ]


@faulty("same_workers", "NOTE", 10)
def generator_copied_to_workers(run: Run) -> None:
    fetches(run, lambda rank, worker: rank)


@faulty("same_augmentation", "NOTE", 10)
def seed_without_rank(run: Run) -> None:
    fetches(run, lambda rank, worker: worker)


@faulty("one_writer", "FAULT", 55)
def all_save(run: Run) -> None:
    add(run, "write", 55, (1,), file="/home/me/model.pt", how="save")


@faulty("shards_saved", "FAULT", 55)
def parts_of_rank_0(run: Run) -> None:
    change(run, "model", sharded=True)
    change(run, "save", (0,), shards=3)


@faulty("loaded_to_own_gpu", "NOTE", 31)
def loaded_without_map_location(run: Run) -> None:
    change(run, "save", (0,), on_gpu=True)
    add(run, "load", 31, file="/home/me/model.pt", located=False)


@faulty("wrapped_names", "NOTE", 55)
def ddp_state_saved(run: Run) -> None:
    change(run, "save", (0,), wrapped=3)


@faulty("waits", "COST", 46)
def item_in_each_step(run: Run) -> None:
    change(run, "update", waits={f"{at(46)} item": 1})


@faulty("collectives_per_step", "COST", 47)
def loss_reduced_in_each_step(run: Run) -> None:
    add(run, "collective", 47, name="all_reduce", size=1, everyone=True)


def test_collectives_between_epochs_are_not_counted_as_steps() -> None:
    run = correct_run()
    for rank in run.ranks:
        last = max(number for number, e in enumerate(rank.events) if e["e"] == "update")
        step = rank.events[last]["step"] + 1
        one = {
            "e": "collective",
            "step": step,
            "t": 0.0,
            "at": at(60),
            "name": "all_reduce",
            "size": 9,
            "everyone": True,
        }
        rank.events[last + 1 : last + 1] = [dict(one) for _ in range(100)]
    assert not [finding for finding in judge([run]).findings if finding.check == "collectives_per_step"]


@faulty("workers_restarted", "COST", 10)
def workers_not_kept(run: Run) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, workers=2)
    change(run, "pass", wanted={"loader": TRAIN}, workers=2)


@faulty("loading", "COST", 10)
def slow_samples(run: Run) -> None:
    change(run, "batch", wait=0.03)


@faulty("graphs_kept", "COST", 44)
def loss_summed_with_graph(run: Run) -> None:
    for rank in run.ranks:
        for number, e in enumerate(rank.all("update"), start=1):
            e["graphs"] = number


@faulty("many_objects", "COST", 10)
def list_of_lists(run: Run) -> None:
    change(run, "loader", workers=2)
    change(run, "dataset", wanted={"dataset": 0}, objects=(50_000, "samples"))


@faulty("small_norm", "NOTE", 43)
def batch_norm_of_two_samples(run: Run) -> None:
    change(run, "model", local_norms=4)


# what is random or a statistic of a batch in evaluation mode


def in_evaluation(run: Run, *random_in: tuple[str, str], drew: bool = True) -> None:
    change(run, "forward", wanted={"loader": VAL}, random_in=[list(one) for one in random_in], drew=drew)


@faulty("random_in_evaluation", "FAULT", 21)
def attention_drops_weights_after_eval(run: Run) -> None:
    in_evaluation(run, ("dropout", at(21)))


@faulty("random_in_evaluation", "FAULT", 22)
def batch_norm_of_the_batch_after_eval(run: Run) -> None:
    in_evaluation(run, ("batch norm", at(22)), drew=False)


@faulty("random_in_evaluation", "FAULT", 23)
def a_layer_that_eval_does_not_reach(run: Run) -> None:
    in_evaluation(run, ("dropout layer", at(23)))


@faulty("random_in_evaluation", "NOTE", 24)
def noise_in_forward_after_eval(run: Run) -> None:
    in_evaluation(run, ("noise", at(24)))


@faulty("random_in_evaluation", "NOTE", 51)
def numpy_noise_after_eval(run: Run) -> None:
    in_evaluation(run)


# gradients that are thrown away, clipped too early, or made by recomputing


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


def unused(run: Run, rank: int, number: int, *names: str) -> None:
    event = {"e": "unused", "step": number, "t": 1.0, "at": at(44), "number": number, "names": [*names]}
    run.ranks[rank].events.append(event | {"missing": len(names)})


@faulty("same_unused", "FAULT", 43)
def a_batch_without_targets_on_one_rank(run: Run) -> None:
    for number in range(4):
        unused(run, 0, number)
    unused(run, 1, 3, "c.weight")


# ranks that disagree on what a number means, and what they share by accident


def probed(run: Run, value: Callable[[int, int], list[tuple[int, int, str]]], **fields: object) -> None:
    for rank in run.ranks:
        contents = {str(n): [list(part) for part in value(rank.number, n)] for n in range(8)}
        event = {"e": "samples", "step": 8, "t": 9.0, "dataset": 0, "cls": "Images", "size": 16, "contents": contents}
        attributes = {"index": rank.number, "size": 7}
        rank.events.append(
            event
            | {
                "names": ["[0]", "[1]", "[2]"],
                "steady": [True] * len(contents["0"]),
                "attributes": attributes,
                "lines": {"index": at(19)},
            }
            | fields
        )


def label(rank: int, n: int) -> tuple[int, int, str]:
    return ((n + rank) % 3, 0, str((n + rank) % 3))


@faulty("same_meaning", "FAULT", 19)
def class_numbers_from_a_set(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 + n, 0, "8 values"), label(rank, n)])


@faulty("same_meaning", "FAULT", 19)
def files_in_another_order(run: Run) -> None:
    probed(run, lambda rank, n: [((n + 3 * rank) % 8, 0, "8 values"), ((n + 3 * rank) % 8 % 3, 0, "1")])


@faulty("same_meaning", "FAULT", 19)
def a_vocabulary_from_a_set(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 50 + n, "9 values")])


@faulty("own_handles", "FAULT", 19)
def a_file_opened_before_the_workers_are_forked(run: Run) -> None:
    handles(run, inherited=True, used=True)


def handles(run: Run, kind: str = "file", *, inherited: bool, used: bool, locked: bool = False) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, workers=2, persistent=True)
    for rank in run.ranks:
        event = {"e": "handles", "step": 0, "t": 1.0, "dataset": "Images", "locked": locked, "lines": {".file": at(19)}}
        rank.workers = [event | {"handles": [[".file", kind, inherited, used]]} for _ in range(2)]


@faulty("loads_kept", "NOTE", 31)
def a_checkpoint_stays_on_the_gpu(run: Run) -> None:
    kept(run, "cuda:0", 300)


def kept(run: Run, where: str, size: int) -> None:
    for rank in run.ranks:
        rank.events.append(
            {"e": "kept", "step": 2, "t": 1.0, "at": at(31), "where": where, "size": size, "beside": 100}
        )


@faulty("device_exists", "FAULT", 6)
def a_gpu_of_another_task(run: Run) -> None:
    run.launch.gpus_per_task = 1
    devices(run, 1)


@faulty("device_exists", "FAULT", 6)
def the_rank_instead_of_the_local_rank(run: Run) -> None:
    run.launch.nodes = 2
    devices(run, 1)


def devices(run: Run, gpus: int, asked: bool = False) -> None:
    for rank in run.ranks:
        event = {"e": "device", "step": 0, "t": 0.0, "at": at(6), "index": rank.number, "gpus": gpus, "asked": asked}
        rank.events.insert(2, event)


@faulty("equal_steps", "FAULT", 10)
def a_stream_that_ends_earlier_on_one_rank(run: Run) -> None:
    stream(run, 4, 2)


def stream(run: Run, *batches: int, complete: tuple[bool, bool] = (True, True)) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, iterable=True)
    for rank in run.ranks:
        for e in rank.all("pass", loader=TRAIN):
            del e["file"], e["batches"]
        events = [e for e in rank.events if e["e"] == "batch" and e["loader"] == TRAIN]
        for last in (events[3], events[7]):
            ended = {"e": "pass_end", "step": last["step"], "t": last["t"], "loader": TRAIN}
            ended |= {"batches": batches[rank.number], "complete": complete[rank.number]}
            rank.events.insert(1 + max(i for i, e in enumerate(rank.events) if e is last), ended)


@faulty("hang", "FAULT", 44)
def one_rank_ends_while_another_waits(run: Run) -> None:
    run.ranks[1].events = [e for e in run.ranks[1].events if e["e"] != "end"]
    text = "[enforce fail at pair.cc] Connection closed by peer [127.0.0.1]:6231"
    run.ranks[1].events.append({"e": "error", "step": 8, "t": 9.0, "at": at(44), "type": "RuntimeError", "text": text})
    run.launch.statuses = [0, 1]


def found_by(run: Run) -> set[str]:
    diagnosis = judge([run])
    assert not diagnosis.broken
    return {f.check for top in diagnosis.findings for f in (top, *top.consequences)}


def monte_carlo(run: Run) -> None:
    """The same inputs are evaluated three times with dropout, on purpose."""
    attention_drops_weights_after_eval(run)
    for rank in run.ranks:
        rank.events = [each for e in rank.events for each in ([e] * 3 if e.get("loader") == VAL else [e])]


def dropout_in_training_only(run: Run) -> None:
    in_evaluation(run, drew=False)


def noise_that_the_model_scales(run: Run) -> None:
    in_evaluation(run, drew=False)  # what a variational autoencoder draws is left out by the observer


def a_sampler_outside_of_models(run: Run) -> None:
    in_evaluation(run, drew=False)
    for rank in run.ranks:
        rank.events.append({"e": "noise", "step": 8, "t": 9.0, "at": at(60), "samples": 3, "values": rank.number})


def dropout_in_calls_with_gradients(run: Run) -> None:
    """A model that is trained in evaluation mode, such as with frozen statistics."""
    change(run, "forward", wanted={"loader": TRAIN}, train=False, random_layers=0)


def parts_that_are_added_up(run: Run) -> None:
    change(run, "update", followed=1, thrown=[], backwards=[at(44)] * 4)
    change(run, "forward", wanted={"loader": TRAIN}, sync=False)


def one_batch_that_is_not_finite(run: Run) -> None:
    change(run, "update", followed=1, thrown=[])
    run.ranks[0].all("update")[2]["thrown"] = [[at(44), at(42)]]


def an_attack_on_the_inputs(run: Run) -> None:
    change(run, "update", followed=1, thrown=[], backwards=[at(44)] * 2)  # the observer leaves these passes out


def gradients_of_several_tasks_are_combined(run: Run) -> None:
    change(
        run, "update", followed=1, thrown=[], backwards=[at(44)] * 3
    )  # and these, if the script makes the gradients itself


def two_passes_of_sharpness_aware_minimization(run: Run) -> None:
    change(run, "update", followed=1, thrown=[], backwards=[at(44), at(46)])


def clipped_after_backward(run: Run) -> None:
    clip(run, 1)


def clipped_after_each_part(run: Run) -> None:
    clip(run, 1)
    clip(run, 2)
    change(run, "update", backwards=[at(44)] * 2)


def clipped_in_the_first_updates_only(run: Run) -> None:
    clip(run, 1)
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "clip" or e["step"] < 3]


def checkpointing_without_side_effects(run: Run) -> None:
    checkpointed(run)


def a_layer_that_no_rank_uses(run: Run) -> None:
    for rank in (0, 1):
        for number in range(8):
            unused(run, rank, number, "c.weight")


def ddp_finds_unused_weights(run: Run) -> None:
    change(run, "ddp", find_unused=True)
    unused(run, 0, 3)
    unused(run, 1, 3, "c.weight")


def the_same_data_everywhere(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 + n, 0, "8 values"), label(0, n)])


def each_rank_has_a_shard_of_its_own(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 0, "8 values"), label(rank, n)])
    set_samples(run, "", list(range(SAMPLES)), [(3 * n) % SAMPLES for n in range(SAMPLES)])
    for rank in run.ranks:
        run.samples[f"{rank.number}_1"] = [(5 * n + 1) % SAMPLES for n in range(SAMPLES)]


@faulty("same_meaning", "NOTE", 10)
def a_sampler_divides_what_each_rank_has_made_for_itself(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 0, "8 values"), label(rank, n)])
    for rank in run.ranks:
        for event in rank.all("samples"):
            event["attributes"] = {}


@faulty("same_samples", "FAULT", 10)
def samples_of_other_numbers_are_drawn_from_the_same_seed(run: Run) -> None:
    for rank in run.ranks:
        for n, e in enumerate(rank.all("forward", train=True, grad=True)):
            e["rows"] = [1000 * n + k for k in range(4)]


def shards_with_the_number_of_the_sample(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 0, "8 values"), (n, 0, str(n)), (5, 0, "1")])


def each_rank_has_shuffled_all_of_the_data(run: Run) -> None:
    files_in_another_order(run)
    set_samples(run, "", list(range(SAMPLES)), [(3 * n) % SAMPLES for n in range(SAMPLES)])
    set_samples(run, "v", list(range(SAMPLES)), list(range(SAMPLES)))
    for rank in run.ranks:
        run.samples[f"{rank.number}_1"] = [(5 * n + 1) % SAMPLES for n in range(SAMPLES)]
        change(run, "dataset", (rank.number,), content=rank.number)


def augmentations_of_its_own(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 0, "8 values"), label(0, n)], steady=[False, True])


def labels_of_one_class(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 * rank + n, 0, "8 values"), (1, 0, "1")])


def totals(run: Run, *again: bool) -> None:
    for rank in run.ranks:
        rank.events += [
            {"e": "total", "step": n, "t": 9.0, "at": at(52), "again": one, "before": 5.0}
            for n, one in enumerate(again)
        ]


@faulty("added_once", "FAULT", 52)
def a_tally_is_added_up_after_each_batch(run: Run) -> None:
    totals(run, True, True, True, False, True, True)


def divided(run: Run, times: float, total: float = 64.0) -> None:
    add(run, "divisor", 44, total=total, own=32.0, summed_at=at(43), times=times)


@faulty("divided_once", "FAULT", 44)
def a_loss_is_divided_by_the_count_of_all_ranks(run: Run) -> None:
    divided(run, 1.0)


def codebook(run: Run, apart: float, *, moves: bool = True, broadcast: bool = False) -> None:
    change(run, "ddp", broadcast=broadcast)
    for rank in run.ranks:
        for e in rank.all("gradients"):
            value = (e["count"] if moves else 0) + apart * rank.number
            e["kept_buffers"] = {"codes": [value, 5.0 + value]}


@faulty("buffers_agree", "FAULT", 29)
def each_rank_has_a_codebook_of_its_own(run: Run) -> None:
    codebook(run, 1.5)


@faulty("buffers_agree", "NOTE", 29)
def only_the_codes_of_rank_0_are_kept(run: Run) -> None:
    codebook(run, 1.5, broadcast=True)


@faulty("norms_of_parts", "FAULT", 46)
def trust_ratios_of_shards(run: Run) -> None:
    change(run, "model", sharded=True, groups=4)
    add(run, "part_norm", 46, count=6)


def evaluated_copy(run: Run, *, follows: bool, untouched: int = 0, moves: bool = True) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["others"] = {"1": [float(e["count"] if moves else 0), 3.0]}
        for step in (4, 8):
            call = {"e": "forward", "step": step, "t": 1.0, "at": at(57), "model": 1, "cls": "Net", "train": False}
            call |= {"grad": False, "loader": None, "random_layers": 0, "untouched": untouched}
            rank.events.append(call | {"buffers": [step if follows else 7]})


@faulty("statistics_of_copies", "FAULT", 57)
def an_average_keeps_its_first_statistics(run: Run) -> None:
    evaluated_copy(run, follows=False)


@faulty("statistics_of_copies", "FAULT", 57)
def an_average_has_the_statistics_it_was_made_with(run: Run) -> None:
    evaluated_copy(run, follows=False, untouched=1)


def stream_of(run: Run, *ranks: list[int], complete: bool = True) -> None:
    change(run, "loader", iterable=True, workers=2, wanted={"loader": TRAIN})
    for rank, given in zip(run.ranks, ranks, strict=True):
        name = f"s{rank.number}"
        run.samples[name] = given
        end = {"e": "pass_end", "step": 4, "t": 1.0, "at": at(10), "loader": TRAIN, "batches": 4, "complete": complete}
        rank.events.append(end | {"file": name, "bags": name})


@faulty("stream_shared", "FAULT", 10)
def readers_shuffle_the_files_before_they_share_them(run: Run) -> None:
    stream_of(run, [*range(20), *range(30, 40)], [*range(10, 30), 50])


def numbered(run: Run, *numberings: dict[str, int]) -> None:
    for rank, entries in zip(run.ranks, numberings, strict=True):
        held = {"e": "mapping", "step": 0, "t": 0.0, "at": at(12), "name": "stoi", "size": len(entries)}
        rank.events.append(held | {"entries": entries})


@faulty("same_numbering", "FAULT", 12)
def each_rank_has_a_vocabulary_of_its_own(run: Run) -> None:
    numbered(run, {f"w{n}": n for n in range(9)}, {f"w{n}": n - 3 for n in range(3, 12)})


def totals_that_begin_anew(run: Run) -> None:
    totals(run, False, False, False, False)


def a_total_that_grows_once(run: Run) -> None:
    totals(run, False, False, True, False, False)


def a_loss_times_the_number_of_ranks(run: Run) -> None:
    divided(run, 2.0)


def a_loss_divided_by_what_only_looks_like_a_total(run: Run) -> None:
    divided(run, 1.0, total=32.0)  # no other rank has put anything into it


def a_loss_whose_gradients_are_multiplied_later(run: Run) -> None:
    divided(run, 1.0)
    change(run, "gradients", factor=2.0)


def a_loss_whose_gradients_the_script_adds_up(run: Run) -> None:
    divided(run, 1.0)
    add(run, "collective", 47, name="all_reduce", size=30, everyone=True, gradient=True)


def gradients_of_a_divided_loss_are_added_up(run: Run) -> None:
    divided(run, 1.0)
    gradients_are_added_up_only(run)


def a_codebook_that_all_ranks_update_alike(run: Run) -> None:
    codebook(run, 0.0)


def a_table_of_each_rank_that_stays(run: Run) -> None:
    codebook(run, 1.5, moves=False)


def an_average_with_its_buffers(run: Run) -> None:
    evaluated_copy(run, follows=True)


def a_teacher_that_stays_as_it_is(run: Run) -> None:
    evaluated_copy(run, follows=False, moves=False)


def a_stream_that_draws_some_samples_often(run: Run) -> None:
    stream_of(run, [*range(20), *[3] * 6], [*range(20, 40), *[3] * 6])


def a_stream_of_which_only_the_begin_was_seen(run: Run) -> None:
    stream_of(run, [*range(20)], [*range(10, 30)], complete=False)


def one_vocabulary_on_all_ranks(run: Run) -> None:
    numbered(run, {f"w{n}": n for n in range(9)}, {f"w{n}": n for n in range(12)})


def settings_of_each_rank(run: Run) -> None:
    numbered(run, {f"a{n}": n for n in range(9)}, {f"b{n}": n + 1 for n in range(9)})


def files_that_workers_open(run: Run) -> None:
    handles(run, inherited=False, used=True)


def an_open_file_that_workers_do_not_read(run: Run) -> None:
    handles(run, inherited=True, used=False)


def streams_of_equal_length(run: Run) -> None:
    stream(run, 4, 4)


def streams_that_were_cut(run: Run) -> None:
    stream(run, 4, 4, complete=(False, False))


def a_checkpoint_on_the_cpu(run: Run) -> None:
    kept(run, "cpu", 300)


def a_checkpoint_that_is_forgotten(run: Run) -> None:
    kept(run, "cuda:1", 0)


def a_gpu_for_each_local_rank(run: Run) -> None:
    devices(run, 2)


def two_gpus_for_each_rank(run: Run) -> None:
    devices(run, 2)
    for rank in run.ranks:
        rank.all("device")[0]["index"] += 2


def a_task_that_counts_its_gpus(run: Run) -> None:
    run.launch.launcher = "srun"
    devices(run, 2, asked=True)


RIGHT = [
    monte_carlo, dropout_in_training_only, noise_that_the_model_scales, a_sampler_outside_of_models,
    dropout_in_calls_with_gradients, parts_that_are_added_up, one_batch_that_is_not_finite, an_attack_on_the_inputs,
    gradients_of_several_tasks_are_combined, two_passes_of_sharpness_aware_minimization, clipped_after_backward,
    clipped_after_each_part, clipped_in_the_first_updates_only, checkpointing_without_side_effects,
    a_layer_that_no_rank_uses, ddp_finds_unused_weights, the_same_data_everywhere, each_rank_has_a_shard_of_its_own,
    shards_with_the_number_of_the_sample, each_rank_has_shuffled_all_of_the_data,
    augmentations_of_its_own, labels_of_one_class, files_that_workers_open,
    an_open_file_that_workers_do_not_read, streams_of_equal_length, streams_that_were_cut, a_checkpoint_on_the_cpu,
    a_checkpoint_that_is_forgotten, a_gpu_for_each_local_rank, two_gpus_for_each_rank, a_task_that_counts_its_gpus,
    totals_that_begin_anew, a_total_that_grows_once, a_loss_times_the_number_of_ranks,
    a_loss_divided_by_what_only_looks_like_a_total, a_loss_whose_gradients_are_multiplied_later,
    a_loss_whose_gradients_the_script_adds_up, gradients_of_a_divided_loss_are_added_up,
    a_codebook_that_all_ranks_update_alike, a_table_of_each_rank_that_stays,
    an_average_with_its_buffers, a_teacher_that_stays_as_it_is,
    a_stream_that_draws_some_samples_often, a_stream_of_which_only_the_begin_was_seen, one_vocabulary_on_all_ranks,
    settings_of_each_rank,
]  # fmt: skip
"""what looks like one of the faults above and is right"""


@pytest.mark.parametrize("neighbor", RIGHT, ids=lambda function: function.__name__)
def test_what_only_looks_like_a_fault_is_not_accused(neighbor: Callable[[Run], None]) -> None:
    run = correct_run()
    neighbor(run)
    assert found_by(run) <= {"accumulation"}  # these events say nothing of no_sync


@pytest.mark.parametrize(
    ("broken", "title"),
    [
        (
            attention_drops_weights_after_eval,
            "Nothing is random, and no statistic of a batch is used, in evaluation mode.",
        ),
        (zeroed_before_each_part, "All samples of an update count alike."),
        (zeroed_before_each_part, "Gradients are exchanged once per update."),
        (one_rank_ends_while_another_waits, "No rank waits for ever."),
        (clipped_before_backward, "Gradients are clipped between backward and the update."),
        (streams_that_were_cut, "All ranks have the same number of training batches."),
        (each_rank_has_a_shard_of_its_own, "A number means the same sample on all ranks."),
    ],
)
def test_what_is_broken_or_was_not_seen_is_not_called_fine(broken: Callable[[Run], None], title: str) -> None:
    run = correct_run()
    broken(run)
    assert title not in judge([run]).fine


def test_collectives_of_a_run_that_failed_are_not_called_fine() -> None:
    run = correct_run(statuses=[0, 1])
    add(run, "collective", 53, name="all_reduce", size=1, everyone=True)
    assert "All ranks call the same collectives in the same order." not in judge([run]).fine


def test_a_check_that_saw_nothing_has_not_judged() -> None:
    empty = correct_run()
    for rank in empty.ranks:
        rank.events = [e for e in rank.events if e["e"] in ("process", "init", "end")]
    diagnosis = judge([empty])
    assert set(diagnosis.fine) <= {"No rank waits for ever."} and not diagnosis.findings


def test_the_cause_of_equal_noise_is_the_last_state_that_was_set() -> None:
    run = correct_run()
    one_seed_for_noise(run)
    for rank in run.ranks:
        seeds = [(7, 0, {}), (8, 50 + rank.number, {}), (9, 4711, {"whole": True})]
        rank.events[2:2] = [
            {"e": "seed", "step": 0, "t": 0.0, "at": at(line), "generator": "torch", "value": value, **more}
            for line, value, more in seeds
        ]
    (finding,) = judge([run]).findings
    assert "train.py:9 gives all of them the same random state" in finding.text and "every rank" in finding.fix
    for rank in run.ranks:  # seeded by the rank after that: then no line is named
        rank.events.insert(5, rank.events[3] | {"at": at(10)})
    (finding,) = judge([run]).findings
    assert "because" not in finding.text


def test_a_file_that_the_rank_wrote_itself_may_be_loaded_as_it_is() -> None:
    run = correct_run()
    for rank in run.ranks:
        file = f"/home/me/rng{rank.number}.pt"
        rank.events.append({"e": "save", "step": 8, "t": 9.0, "at": at(55), "file": file, "tensors": 2, "shards": 0,
                            "wrapped": 0, "on_gpu": True})  # fmt: skip
        rank.events.append({"e": "load", "step": 8, "t": 9.0, "at": at(31), "file": file, "located": False})
    assert not judge([run]).findings


@faulty("profiled", "COST", 40)
def a_profiler_around_everything(run: Run) -> None:
    trace(run, 16)


def trace(run: Run, updates: int) -> None:
    for rank in run.ranks:
        rank.events.append({"e": "profiled", "step": 8, "t": 9.0, "at": at(40), "updates": updates})


def test_a_profiler_with_a_schedule_is_right() -> None:
    run = correct_run()
    trace(run, 4)
    diagnosis = judge([run])
    assert not diagnosis.findings and "A profiler records a few steps." in diagnosis.fine


def test_nothing_is_found_in_a_correct_run() -> None:
    diagnosis = judge([correct_run()])
    assert not diagnosis.findings
    assert not diagnosis.broken
    assert len(diagnosis.fine) >= 20


def each_rank_validates_a_subset_of_its_own(run: Run) -> None:
    size = len(run.samples["v0_0"])
    for rank in run.ranks:
        for e in rank.all("dataset", dataset=rank.all("pass", loader=VAL)[0]["dataset"]):
            e["size"] = size


def test_ranks_that_validate_subsets_of_their_own_do_not_repeat_each_other() -> None:
    run = correct_run()
    each_rank_validates_a_subset_of_its_own(run)
    assert not judge([run]).findings


def test_results_of_subsets_must_be_combined_too() -> None:
    run = correct_run()
    each_rank_validates_a_subset_of_its_own(run)
    results_stay_apart(run)
    (finding,) = judge([run]).findings
    assert finding.kind == "FAULT"
    assert "of 8 of 16 samples" in finding.text


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_with_its_line(name: str) -> None:
    kind, line, break_it = FAULTS[name]
    run = correct_run()
    break_it(run)
    diagnosis = judge([run])
    assert not diagnosis.broken
    found = [(f.check, f.kind, f.at) for top in diagnosis.findings for f in (top, *top.consequences)]
    assert (name.split(" ")[0], kind, at(line)) in found
    assert sum(top.kind == "FAULT" for top in diagnosis.findings) <= 1  # one fault is reported once


def test_every_check_has_a_fault_here() -> None:
    assert {check.name for check in CHECKS} == {name.split(" ")[0] for name in FAULTS}


def test_a_cause_is_reported_once_with_what_follows() -> None:
    run = correct_run()
    inner_model_called(run)
    other_running_means(run)
    (top,) = judge([run]).findings
    assert top.check == "weights_agree"
    assert [finding.check for finding in top.consequences] == ["validation_statistics"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_ends_anywhere_can_be_judged(name: str) -> None:
    """The log of a killed run ends in the middle: no check may fail on it."""
    run = correct_run(ended="enough")
    FAULTS[name][2](run)
    for count in range(1, len(run.ranks[0].events), 29):
        short = copy.deepcopy(run)
        for rank in short.ranks:
            rank.events = rank.events[:count]
        assert not judge([short]).broken


def test_a_correct_run_that_is_cut_off_has_no_fault() -> None:
    for count in range(1, len(correct_run().ranks[0].events)):
        run = correct_run(ended="enough")
        for rank in run.ranks:
            rank.events = rank.events[:count]
        assert [f.text for f in judge([run]).faults] == []


# what is right, although it looks like a fault


def right(run: Run) -> None:
    assert [finding.text for finding in judge([run]).faults] == []


def test_weights_that_are_averaged_after_updates_are_right() -> None:
    run = correct_run()
    for events in run.together("gradients"):
        events[1]["gradients"] = {name: [0.1, 0.7] for name in NAMES}
    for e in run.ranks[1].all("gradients")[1:3]:
        e["weights"] = {name: [0.0, 1.0] for name in NAMES}
    right(run)


def test_two_optimizers_take_turns() -> None:
    """In a GAN, what is called in each step is called in every second update."""
    run = correct_run()
    for rank in run.ranks:
        for number, e in enumerate(rank.all("update")):
            e["optimizer"] = number % 2
            e["waits"] = {f"{at(49)} item": 1} if number % 2 else {}
    add(run, "collective", 52, name="all_reduce", size=1, everyone=True, own=True)
    found = {(f.check, f.at) for f in judge([run]).findings if f.kind == "COST"}
    assert {("waits", at(49)), ("collectives_per_step", at(52))} <= found


def test_collectives_of_a_library_and_of_gradients_are_no_cost() -> None:
    run = correct_run()
    add(run, "collective", 52, name="all_reduce", size=8, everyone=True, own=False)
    add(run, "collective", 52, name="all_reduce", size=8, everyone=True, own=True, gradient=True)
    assert "collectives_per_step" not in {f.check for f in judge([run]).findings}


def test_what_the_loss_needs_is_no_cost() -> None:
    """Such as the number of tokens of all ranks, between a batch and its backward pass."""
    run = correct_run()
    for rank in run.ranks:
        training = [e for e in rank.events if e["e"] == "forward" and e["train"]]
        for e in training:
            sent = {"e": "collective", "step": e["step"], "t": e["t"], "at": at(44), "name": "all_reduce", "size": 1}
            rank.events.insert(rank.events.index(e), sent | {"everyone": True, "passes": 0})
    assert "collectives_per_step" not in {f.check for f in judge([run]).findings}


def test_a_schedule_of_few_steps_may_have_the_right_length() -> None:
    run = correct_run()
    change(run, "schedule", steps=4, length=4)
    change(run, "pass", wanted={"loader": TRAIN}, batches=2)
    assert "schedule_length" not in {f.check for f in judge([run]).findings}


def test_each_rank_may_split_data_of_its_own() -> None:
    run = correct_run()
    each_rank_splits_in_its_own_way(run)
    run.ranks[1].all("split")[0]["content"] = 8
    right(run)


def test_what_only_cut_passes_show_is_no_fault() -> None:
    run = correct_run()
    no_set_epoch(run)
    run.launch.unconfirmed = ["same_order"]
    (finding,) = judge([run]).findings
    assert finding.kind == "NOTE" and "--full" in finding.text
    run.launch.refuted = ["same_order"]
    assert not judge([run]).findings


def test_gathers_are_right_where_every_rank_has_the_loss_of_the_whole_batch() -> None:
    run = correct_run()
    the_loss_depends_on_gathered_copies(run)
    for rank in run.ranks:
        for e in rank.all("update"):
            e["losses"] = [2.0]
    assert not judge([run]).findings


def test_a_teacher_may_be_in_training_mode() -> None:
    run = correct_run()
    averaged_weights_generate_in_training_mode(run)
    for rank in run.ranks:
        calls = rank.all("forward", model=1)
        rank.events += [calls[0] | {"step": step} for step in range(8)]
    assert not judge([run]).findings


def test_what_is_fine_is_said_with_what_was_looked_at() -> None:
    fine = judge([correct_run()]).fine
    assert fine["Gradients and weights are the same on all ranks."] == "8 updates compared, with 3 weights"
    assert all(any(character.isdecimal() for character in looked_at) for looked_at in fine.values())


def test_equal_findings_are_counted() -> None:
    finding = hint(at(5), "the names have module. before them", "save the model's own state")
    (found,) = counted([replace(finding) for _ in range(20)])
    assert found.count == 20


def test_ranks_may_end_at_different_updates_with_join() -> None:
    run = correct_run()
    run.ranks[0].events.insert(5, {"e": "join", "step": 0, "t": 0.1, "at": at(41)})
    make_weights_differ(run)
    add(run, "collective", 52, ranks=(0,), name="all_reduce", size=8, everyone=True)
    right(run)
    unjudged = judge([run]).unjudged
    assert sum("Join" in reason for reason in unjudged.values()) >= 3


def test_ranks_of_a_model_that_is_split_may_share_samples() -> None:
    run = correct_run()
    every_rank_has_all(run)
    change(run, "model", mesh_dims=2, sharded=True)
    right(run)


def test_a_second_loader_may_validate_the_rest() -> None:
    run = correct_run()
    validation_drops_the_last(run)
    run.samples["rest"] = [12, 13, 14, 15]
    first = run.ranks[0]
    other = VAL.replace(":20#", ":21#")
    made = next(e for e in first.all("loader", loader=VAL))
    subset = first.all("dataset")[1] | {"dataset": 5, "size": 4, "file": "rest"}
    begun = first.all("pass", loader=VAL)[0] | {"loader": other, "dataset": 5, "file": "rest", "batches": 1}
    extra = [made | {"loader": other, "at": at(21)}, subset, begun]
    extra += [first.all("batch")[0] | {"loader": other}, first.all("forward", loader=VAL)[0] | {"loader": other}]
    where = next(i for i, e in enumerate(first.events) if e["e"] == "collective")
    first.events[where:where] = extra
    right(run)


def test_a_validation_of_chosen_samples_is_right() -> None:
    run = correct_run()
    change(run, "dataset", size=1000)  # SubsetRandomSampler: training and validation are parts of one data set
    change(run, "pass", base=7)
    change(run, "loader", wanted={"loader": VAL}, sampler="SubsetRandomSampler")
    set_samples(run, "v", [100, 101, 102], [103, 104, 105])
    right(run)
    set_samples(run, "v", [100, 101, 102], [100, 101, 102])
    right(run)


def test_the_later_folds_of_a_cross_validation_are_right() -> None:
    run = correct_run()
    change(run, "pass", base=7)
    for rank in (0, 1):
        run.samples |= {f"v{rank}_0": [90 + rank], f"v{rank}_1": [run.samples[f"{rank}_0"][0]]}
    right(run)


def test_parameters_that_are_used_by_a_method_are_not_foreign() -> None:
    run = correct_run()
    change(run, "update", foreign=3)
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["gradients"] = {"?0": [0.1, 0.2]}
    right(run)


def test_stages_of_a_pipeline_are_right() -> None:
    run = correct_run()
    make_weights_differ(run)
    every_rank_has_all(run)
    add(run, "message", 43)
    right(run)


def test_a_rank_that_fails_is_not_said_to_hang() -> None:
    run = correct_run()
    two_ranks_wait(run)
    run.launch.ended = "lost"
    run.ranks[0].events.append({"e": "error", "type": "KeyError", "text": "'x'", "at": at(3), "step": 8, "t": 9})
    right(run)


def test_samples_drawn_with_replacement_may_be_common() -> None:
    run = correct_run()
    set_samples(run, "", [1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 3, 3, 4, 4])
    right(run)


def test_a_head_that_is_trained_alone_is_no_fault() -> None:
    run = correct_run()
    change(run, "trainable", orphans=["a.weight", "b.weight"], orphans_with_gradient=2)
    right(run)


def test_files_on_nodes_of_their_own_are_no_fault() -> None:
    run = correct_run(nodes=2)
    all_save(run)
    right(run)


def test_uneven_steps_with_join_are_right() -> None:
    run = correct_run()
    one_batch_more(run)
    add(run, "join", 40)
    right(run)


def test_a_script_for_one_process_is_judged_as_one() -> None:
    diagnosis = judge([correct_run(world=1)])
    assert not diagnosis.findings
    assert diagnosis.unused["Every rank trains on samples of its own."] == "several ranks"


# comparing two runs


def stopped_and_resumed() -> tuple[Run, Run]:
    """Return a run that was stopped after its sixth update, and one that goes on after the fourth, the first epoch."""
    stopped = correct_run(ended="stopped", name="stopped")
    for rank in stopped.ranks:
        rank.events = [e for e in rank.events if e["step"] < 6]
    again = correct_run(name="stopped and resumed", compared="resumed")
    for rank in again.ranks:
        rank.events = [
            e for e in rank.events if e["step"] >= 4 or e["e"] in ("process", "init", "loader", "dataset", "model")
        ]
        rank.events = [e for e in rank.events if e["step"] > 4 or e["e"] not in ("save", "write", "collective")]
        rank.events = [e for e in rank.events if e.get("loader") != VAL or e["step"] > 4 or e["e"] == "loader"]
    return stopped, again


def test_a_run_that_resumes_all_is_right() -> None:
    stopped, again = stopped_and_resumed()
    diagnosis = judge([correct_run(), stopped, again])
    assert not diagnosis.findings
    assert "A resumed run goes on where the stopped one was." in diagnosis.fine


@pytest.mark.parametrize(
    ("field", "value", "said"), [("state", 0, "optimizer has no state"), ("lr", [0.1], "learning rate")]
)
def test_what_a_resumed_run_has_lost_is_found(field: str, value: object, said: str) -> None:
    stopped, again = stopped_and_resumed()
    change(again, "gradients", **{field: value})
    (found,) = judge([correct_run(), stopped, again]).findings
    assert said in found.text
    assert (found.kind, found.run) == ("FAULT", "stopped and resumed")


def test_a_schedule_that_begins_anew_after_the_first_update_is_found() -> None:
    """The optimizer's state holds the rate of the first one."""
    stopped, again = stopped_and_resumed()
    for rank in again.ranks:
        for e in rank.all("gradients"):
            e["lr"] = e["lr"] if e["step"] == 4 else [0.9]
    (found,) = judge([correct_run(), stopped, again]).findings
    assert "the learning rate of update 5 is 0.9; without the stop it was 0.05" in found.text
    change(again, "process", argv=["train.py", "--epochs", "9"])  # a longer training has another schedule
    assert not judge([correct_run(), stopped, again]).findings


def test_a_scaler_that_is_not_saved_is_found() -> None:
    stopped, again = stopped_and_resumed()
    for run, first in ((stopped, 0), (again, 4)):
        for rank in run.ranks:
            for e in rank.all("gradients"):
                e["scaler"] = {"scale": 65536.0, "_growth_tracker": e["step"] - first}
    (found,) = judge([correct_run(), stopped, again]).findings
    assert "GradScaler begins anew" in found.text


def test_a_run_in_which_ranks_wait_for_their_workers_is_not_called_hanging() -> None:
    run = correct_run(ended="hang", stuck={1000: f"{at(42)} in select", 1001: f"{at(42)} in select"})
    assert not judge([run]).findings


def test_a_resumed_run_that_begins_with_the_first_order_is_found() -> None:
    stopped, again = stopped_and_resumed()
    for rank in again.ranks:
        again.samples[f"{rank.number}_1"] = stopped.samples[f"{rank.number}_0"]
    found = judge([correct_run(), stopped, again]).findings
    assert any("order of the first epoch" in finding.text for finding in found)


def test_a_resumed_run_that_skips_the_batches_it_had_is_right() -> None:
    stopped, again = stopped_and_resumed()
    for rank in again.ranks:
        first = next(e for e in rank.events if e["e"] == "batch")
        rank.events = [
            e
            for e in rank.events
            if e is first or e["step"] != 4 or e["e"] not in ("batch", "forward", "gradients", "update")
        ]
    diagnosis = judge([correct_run(), stopped, again])
    assert not diagnosis.findings
    assert "with the samples" in diagnosis.fine["A resumed run goes on where the stopped one was."]


def test_samples_that_come_again_or_are_left_out_after_a_resume_are_found() -> None:
    for update, said in ((2, "so those of 2 updates come again"), (6, "so those of 2 updates are left out")):
        stopped, again = stopped_and_resumed()
        for rank in again.ranks:
            numbers = stopped.samples[f"{rank.number}_{update // 4}"]
            begin = 2 * (update % 4)
            again.samples[f"{rank.number}_1"] = numbers[begin:] + numbers[:begin]
        (finding,) = judge([correct_run(), stopped, again]).findings
        assert finding.kind == "NOTE" and said in finding.text


def test_an_epoch_that_grows_with_the_ranks_is_found() -> None:
    usual, alone = correct_run(), correct_run(world=1, name="on one rank", compared="other_ranks")
    alone.samples = {name: numbers[:6] for name, numbers in alone.samples.items()}
    assert any("an epoch has 16 samples on 2 ranks, and 6 on 1" in f.text for f in judge([usual, alone]).faults)


def test_an_epoch_that_grows_with_the_workers_is_found() -> None:
    usual, other = correct_run(), correct_run(name="with two workers", compared="other_workers")
    change(other, "pass", wanted={"loader": TRAIN}, batches=8)
    assert any("4 batches, and 8" in finding.text for finding in judge([usual, other]).faults)


def test_a_schedule_that_is_stepped_for_all_ranks_is_long_enough() -> None:
    run = correct_run()
    change(run, "schedule", steps=16, length=16)
    assert not judge([run]).findings


def test_repeated_samples_that_are_taken_away_again_count_once() -> None:
    run = correct_run()
    validation_padded(run)
    assert judge([run]).faults
    add(run, "trimmed", 52, loader=VAL)
    assert not judge([run]).faults


def test_ranks_that_validate_data_sets_of_their_own_do_not_repeat_each_other() -> None:
    run = correct_run()
    all_validate_all(run)
    for number in (0, 1):
        change(run, "dataset", (number,), {"dataset": 1}, content=number)
    assert "validation_repeated" not in {finding.check for finding in judge([run]).findings}


def test_workers_that_learn_of_the_epoch_from_the_data_set_are_rightly_started_again() -> None:
    run = correct_run()
    workers_not_kept(run)
    change(run, "loader", told_epochs=True)
    assert not judge([run]).findings


def test_what_follows_from_a_fault_is_not_called_fine() -> None:
    assert "All trainable weights are in an optimizer." in judge([correct_run()]).fine
    run = correct_run()
    sharded_weights_without_an_optimizer(run)
    change(run, "gradients", made=at(31))
    diagnosis = judge([run])
    assert diagnosis.faults[0].at == at(31), "where the optimizer was made"
    assert "All trainable weights are in an optimizer." not in diagnosis.fine


def test_generated_inputs_are_equal_because_of_the_seed() -> None:
    run = correct_run()
    same_inputs_without_numbers(run)
    change(run, "forward", loader=None)
    for rank in run.ranks:
        rank.events.insert(2, {"e": "seed", "step": 0, "t": 0.0, "at": at(7), "generator": "torch", "value": 1})
    (found,) = [finding for finding in judge([run]).faults if finding.check == "same_samples"]
    assert found.at == at(7)


def test_only_faults_count_under_a_provocation() -> None:
    provoked = correct_run(name="with uneven data", provocation="uneven")
    one_seed(provoked)
    assert not judge([correct_run(), provoked]).findings
    validation_padded(provoked)
    (found,) = judge([correct_run(), provoked]).findings
    assert found.run == "with uneven data"


def test_tensor_parallel_ranks_may_have_the_same_inputs() -> None:
    run = correct_run()
    same_inputs_without_numbers(run)
    change(run, "model", sharded=True, mesh_dims=1, tensor_parallel=True)
    assert not judge([run]).faults


def test_samples_of_the_same_numbers_in_other_data_sets_are_other_samples() -> None:
    run = correct_run()
    set_samples(run, "", list(range(SAMPLES)), [(3 * n) % SAMPLES for n in range(SAMPLES)])
    for rank in run.ranks:
        for e in rank.all("dataset"):
            e["content"] = rank.number
    assert not judge([run]).faults


# how a script is started


@pytest.mark.parametrize(
    ("text", "launcher"),
    [
        ('dist.init_process_group("gloo")', "torchrun"),
        ('rank = int(os.environ["RANK"]); dist.init_process_group("gloo")', "torchrun"),
        ('rank = int(os.environ["SLURM_PROCID"]); dist.init_process_group("gloo", rank=rank)', "srun"),
        ('os.environ["RANK"] = os.environ["SLURM_PROCID"]; rank = int(os.environ["RANK"])', "srun"),
        ('os.environ["RANK"] = str(rank); mp.spawn(main, nprocs=2)', "spawn"),
        ("model(x).backward()", "single"),
    ],
)
def test_the_launcher_is_guessed_from_the_script(tmp_path: Path, text: str, launcher: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert likely_launchers(script)[0][0] == launcher


def test_after_a_hang_no_symptom_is_reported_as_a_cause() -> None:
    """An optimizer made before fully_shard, and a save on rank 0 alone at which all ranks then hang."""
    run = correct_run()
    two_ranks_wait(run)
    change(run, "model", sharded=True)
    change(run, "save", (0,), shards=3)
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] not in ("trainable", "end")]
        for e in rank.all("gradients"):
            e["gradients"], e["weights"] = {f"?{n}": None for n in range(3)}, {}
        early = {"e": "sharded", "step": 2, "t": 1.0, "at": at(45), "parameters": 3, "orphans": [*NAMES]}
        rank.events.insert(30, early)
    change(run, "gradients", made=at(31))
    diagnosis = judge([run])
    assert [(f.check, f.at) for f in diagnosis.findings] == [("shards_saved", at(55)), ("sharded_orphans", at(31))]
    assert [f.check for f in diagnosis.findings[0].consequences] == ["hang"]
    assert "No rank waits for ever." not in diagnosis.fine


def test_what_only_a_provoked_run_shows_is_not_called_fine() -> None:
    """A run without workers, for example, is another training than the user's."""

    def of_workers(run: Run) -> Iterator[Finding]:
        need(run.launch.name, "the workers' samples have no numbers")
        seen(3, "samples compared")
        yield from ()

    ordinary, provoked = correct_run(2), correct_run(2)
    provoked.launch.name = "without workers"
    check = Check(of_workers, "Workers share the samples.", "", ())
    for cases, fine in (([(ordinary,), (provoked,)], False), ([(provoked,)], True)):
        diagnosis = Diagnosis()
        assert not apply(check, cases, diagnosis)
        assert (check.title in diagnosis.fine) == fine
        assert (check.title in diagnosis.unjudged) != fine
