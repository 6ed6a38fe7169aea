"""Faults, one or more for each check: functions that change the events of a correct run."""

from collections.abc import Callable

from doctor_events import NAMES, SAMPLES, TRAIN, VAL, add, at, change
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
def every_rank_draws_the_same_with_replacement(run: Run) -> None:
    draws(run, [0, 3, 3, 5, 9, 0, 7, 1], [0, 3, 3, 5, 9, 0, 7, 1])


def draws(run: Run, *orders: list[int]) -> None:
    for rank, order in enumerate(orders):
        for epoch, name in enumerate(sorted(name for name in run.samples if name.startswith(f"{rank}_"))):
            run.samples[name] = [(n + 5 * epoch) % SAMPLES for n in order]


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


@faulty("same_samples", "FAULT", 43)
def own_loaders_that_shuffle_apart(run: Run) -> None:
    """The ranks have a quarter of their inputs in common: not of the largest, which are drawn anew, but of another."""
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "pass"]
        for number, e in enumerate(rank.all("forward", train=True)):
            e["further"] = [[1000 * (rank.number if n % 4 else 7) + 100 * number + n for n in range(16)]]


@faulty("same_samples", "FAULT", 10)
def same_rollouts_with_many_equal_rows(run: Run) -> None:
    """As of an environment that often is in the same state: most rows of a batch are equal to others."""
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "pass"]
        for number, e in enumerate(rank.all("forward", train=True)):
            e["rows"] = [n % 4 + number for n in range(12)]


@faulty("unsharded_agree", "FAULT", 29)
def the_root_is_not_sharded(run: Run) -> None:
    change(run, "model", sharded=True, groups=4)
    change(run, "gradients", unsharded=NAMES[:1])
    for e in run.ranks[1].all("gradients"):
        e["weights"] = e["weights"] | {NAMES[0]: [0.7, 3.0]}


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


@faulty("validation_gradients", "COST", 51)
def validation_with_gradients(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("forward", grad=False):
            e["for_nothing"] = True


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


def make_weights_differ(run: Run) -> None:
    for e in run.ranks[1].all("gradients")[1:]:
        e["weights"] = {name: [value[0], value[1] + 0.1] for name, value in e["weights"].items()}
    for e in run.ranks[1].all("gradients"):
        e["gradients"] = {name: [0.1, 0.7] for name in NAMES}


@faulty("weights_agree", "FAULT", 37)
def one_rank_loads_the_state_of_the_optimizer(run: Run) -> None:
    make_weights_differ(run)
    first = run.ranks[0].all("gradients")[0]
    first["state"] = 3
    run.ranks[0].events.insert(8, {"e": "optimizer_loaded", "step": 0, "t": 0.05, "at": at(37)})


@faulty("weights_agree", "FAULT", 53)
def gradients_of_different_weights_are_added_up(run: Run) -> None:
    never_wrapped(run)
    for rank in run.ranks:
        e = rank.all("gradients")[0]
        e["gradients"] = e["gradients"] | {NAMES[rank.number]: None}
    add(run, "collective", 53, name="all_reduce", size=6, everyone=True, gradient=True)


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


@faulty("element_weights", "NOTE", 44)
def masked_mean_per_rank(run: Run) -> None:
    change(run, "update", (1,), elements=[[at(44), 0, 0, 1 / 31]])


@faulty("own_target", "FAULT", 44)
def each_output_meets_each_target(run: Run) -> None:
    add(run, "spread", 44, shape=[2, 1], became=[2, 2])


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


@faulty("same_dropout", "NOTE", 41)
def one_seed(run: Run) -> None:
    for events in run.together("forward"):
        for e in events:
            e["rng"] = e["step"]


@faulty("same_noise", "NOTE", 43)
def one_seed_for_noise(run: Run) -> None:
    add(run, "noise", 43, samples=2, values=7)


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


@faulty("workers_restarted", "COST", 10)
def workers_not_kept(run: Run) -> None:
    change(run, "loader", wanted={"loader": TRAIN}, workers=2)
    change(run, "pass", wanted={"loader": TRAIN}, workers=2)


@faulty("loading", "COST", 10)
def slow_samples(run: Run) -> None:
    change(run, "batch", wait=0.03)


@faulty("graphs_kept", "COST", 44)
def losses_are_collected_in_each_epoch(run: Run) -> None:
    for rank in run.ranks:
        updates = rank.all("update")
        more = [dict(e) for e in updates]
        rank.events[-3:-3] = more
        for number, e in enumerate([*updates, *more]):
            e["graphs"] = 1 + number % 8


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


@faulty("kept_states", "FAULT", 57)
def the_best_weights_are_kept_without_a_copy(run: Run) -> None:
    kept_state(run, "load", 4)


@faulty("kept_states", "NOTE", 57)
def the_best_weights_are_saved_later(run: Run) -> None:
    kept_state(run, "save", 4)


def kept_state(run: Run, how: str, began: int) -> None:
    for rank in run.ranks:
        fields = {"how": how, "made": at(57), "began": began, "names": ["a.weight", "b.weight"]}
        rank.events.append({"e": "kept_state", "step": 8, "t": 9.0, "at": at(58), **fields})


@faulty("steady_validation", "NOTE", 20)
def validation_of_augmented_samples(run: Run) -> None:
    one_data_set_for_both(run)
    probed(run, lambda rank, n: [(1000 + n, 0, "8 values"), (n % 3, 0, "1")], varies=[True, False])


def one_data_set_for_both(run: Run) -> None:
    change(run, "pass", base=0)
    set_samples(run, "v", list(range(SAMPLES, 2 * SAMPLES, 2)), list(range(SAMPLES + 1, 2 * SAMPLES, 2)))


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


def streams_that_were_cut(run: Run) -> None:
    stream(run, 4, 4, complete=(False, False))


@faulty("contrast_targets", "FAULT", 42)
def targets_without_the_offset_of_the_rank(run: Run) -> None:
    contrast(run, 0, 0)


def contrast(run: Run, *targets: int) -> None:
    for rank in run.ranks:
        own = {"target": targets[rank.number], "own": 8 * rank.number, "columns": 16}
        rank.events.append({"e": "contrast", "step": 8, "t": 9.0, "at": at(42), **own})


@faulty("contrast_masks", "FAULT", 44)
def a_mask_without_the_offset_of_the_rank(run: Run) -> None:
    contrast_mask(run, 8, 0)


def contrast_mask(run: Run, *right: int) -> None:
    for rank in run.ranks:
        for mask, rows in ((0, 0), (1, right[rank.number])):  # the first one is about the pairs
            sizes = {"mask": mask, "count": 8, "right": rows, "columns": 16}
            rank.events.append({"e": "contrast_mask", "step": 8, "t": 9.0, "at": at(44), **sizes})


@faulty("profiled", "COST", 40)
def a_profiler_around_everything(run: Run) -> None:
    trace(run, 16)


def trace(run: Run, updates: int) -> None:
    for rank in run.ranks:
        rank.events.append({"e": "profiled", "step": 8, "t": 9.0, "at": at(40), "updates": updates})
