"""What looks like a fault and is right is not accused."""

from collections.abc import Callable

import pytest

from doctor_events import NAMES, SAMPLES, STEPS, TRAIN, VAL, add, at, change, correct_run
from faulty_processes import (
    a_gather,
    a_halo,
    data_of_its_own_on_each_rank,
    devices,
    messages,
    own_collectives,
    sharded_gradients,
    stream,
    unused,
)
from faulty_samples import (
    contrast,
    contrast_mask,
    draws,
    draws_of,
    each_rank_has_a_shard_of_its_own,
    files_in_another_order,
    handles,
    label,
    numbered,
    probed,
    scaling,
    set_samples,
    stream_of,
    streams_that_were_cut,
    worker_copies,
)
from faulty_steps import (
    checkpointed,
    clip,
    gradients_are_added_up_only,
    sharded_and_accumulated,
    two_batches_for_each_update,
    two_optimizers,
)
from faulty_validation import (
    attention_drops_weights_after_eval,
    divided,
    evaluated_copy,
    frozen_mode,
    in_evaluation,
    kept_state,
    one_data_set_for_both,
    totals,
)
from faulty_weights import (
    average,
    average_on_rank_0_only,
    codebook,
    divided_layers,
    divided_optimizer,
    kept,
    tied,
    trained_copies,
    what_enters_a_divided_layer_is_not_added_up_in_backward,
)
from rankdoctor.checks import judge
from rankdoctor.runs import Run


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


def a_sharded_model_of_which_all_ranks_need_all(run: Run) -> None:
    sharded_gradients(run)


def a_sharded_layer_that_no_rank_needs(run: Run) -> None:
    sharded_gradients(run, NAMES[0])
    run.ranks[0].all("gradients")[2]["gradients"] |= {NAMES[0]: None}


def a_gather_of_which_all_compute_the_same(run: Run) -> None:
    a_gather(run, 0, [1.0, 1.0])


def a_gather_whose_gradient_is_added_up(run: Run) -> None:
    a_gather(run, 1, [1.0, 2.0])


def gathers_in_groups_of_one_rank(run: Run) -> None:
    a_gather(run, 0, [1.0, 2.0], [[0], [1]])


def a_table_of_which_each_rank_has_some_rows(run: Run) -> None:
    for rank in run.ranks:
        for e in rank.all("gradients"):
            for what in ("weights", "gradients"):
                total, size = e[what][NAMES[0]]
                e[what] = e[what] | {NAMES[0]: [total + 0.1 * rank.number, size + 0.3 * rank.number]}


def targets_with_the_offset_of_the_rank(run: Run) -> None:
    contrast(run, 0, 8)


def a_mask_with_the_offset_of_the_rank(run: Run) -> None:
    contrast_mask(run, 8, 8)


def samples_that_are_drawn_with_other_seeds(run: Run) -> None:
    draws(run, [0, 3, 3, 5, 9, 0, 7, 1], [2, 5, 5, 1, 3, 8, 8, 0])


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


def a_rank_that_fills_in_when_its_stream_has_ended(run: Run) -> None:
    stream(run, 4, 3)
    rank = run.ranks[1]
    batches = [e for e in rank.events if e["e"] == "batch" and e["loader"] == TRAIN]
    rank.events = [e for e in rank.events if e is not batches[3] and e is not batches[7]]


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


def a_rank_that_validates_one_batch_more(run: Run) -> None:
    """All ranks have the same running means, but other ones in the next epoch."""
    for rank in run.ranks:
        calls = rank.all("forward", loader=VAL)
        for e in calls:
            e["buffers"] = [e["step"]]
        if rank.number == 0:
            place = rank.events.index(calls[3])
            rank.events[place:place] = [dict(calls[3])]


def as_many_batches_from_data_sets_of_other_sizes(run: Run) -> None:
    data_of_its_own_on_each_rank(run, STEPS)


def a_halo_whose_gradient_comes_back(run: Run) -> None:
    a_halo(run, backward=True)


def other_rates_in_a_join(run: Run) -> None:
    """The rank that has ended its pass is an epoch, and its schedule a step, ahead of the other."""
    add(run, "join", 42)
    for e in run.ranks[1].all("gradients")[4:]:
        e["lr"] = [0.01]


def members_of_an_ensemble(run: Run) -> None:
    """Each rank trains its own model, and saves it to a file of its own."""
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] not in ("ddp", "write", "save")]
        save = {"file": f"/home/me/{rank.number}.pt", "tensors": 3, "shards": 0, "wrapped": 0, "on_gpu": False}
        rank.events.append({"e": "save", "step": 8, "t": 9.0, "at": at(55), **save})
        for e in rank.all("forward"):
            e.pop("ddp"), e.pop("sync")
        for e in rank.all("gradients"):
            for what in ("gradients", "weights"):
                e[what] = {name: [value[0] + rank.number, value[1] + 1] for name, value in e[what].items()}


def members_that_are_wrapped_by_a_group_of_one(run: Run) -> None:
    change(run, "ddp", among=1)
    for e in run.ranks[1].all("gradients"):
        for what in ("gradients", "weights"):
            e[what] = {name: [value[0] + 1, value[1] + 1] for name, value in e[what].items()}


def a_pretraining_that_each_rank_repeats(run: Run) -> None:
    """Before the model is wrapped, all ranks train another one, with equal inputs."""
    for rank in run.ranks:
        wrapped = rank.all("ddp")[0]
        place = rank.events.index(wrapped)
        call = rank.all("forward", loader=TRAIN)[0]
        before = [
            call | {"model": 1, "t": -1.0, "rows": [n, n + 50, n + 90], "rng": n, "loader": None} for n in range(6)
        ]
        for e in before:
            e.pop("ddp"), e.pop("sync")
        rank.events[place:place] = before


def a_schedule_of_updates_with_accumulation(run: Run) -> None:
    two_batches_for_each_update(run)


def a_schedule_of_batches_with_accumulation(run: Run) -> None:
    two_batches_for_each_update(run)
    change(run, "schedule", steps=16, length=16)


def a_live_state_from_before_the_training(run: Run) -> None:
    kept_state(run, "save", 0)


def validation_of_a_data_set_that_does_not_augment(run: Run) -> None:
    one_data_set_for_both(run)
    probed(run, lambda rank, n: [(1000 + n, 0, "8 values"), (n % 3, 0, "1")], varies=[False, False])


def validation_of_a_simulator(run: Run) -> None:
    probed(run, lambda rank, n: [(1000 + n, 0, "8 values")], varies=[True], dataset=1)


def workers_that_learn_of_the_epoch_in_shared_memory(run: Run) -> None:
    worker_copies(run, 0)


def workers_whose_samples_are_random_anyway(run: Run) -> None:
    worker_copies(run, 16, random=True)


def one_scaling_for_all_ranks(run: Run) -> None:
    scaling(run, 0.5, 0.5 + 1e-9)


def a_scaling_that_is_called_local(run: Run) -> None:
    scaling(run, 0.5, -0.25, name="local_mean and local_std")


def samples_of_all_numbers_are_drawn_with_replacement(run: Run) -> None:
    change(run, "dataset", size=64)
    draws_of(run, 64)


def layers_that_are_divided_by_hand(run: Run) -> None:
    divided_layers(run, alike=True)


def an_average_in_16_bits_that_follows(run: Run) -> None:
    average(run, 300)


def a_frozen_part_in_evaluation_mode(run: Run) -> None:
    frozen_mode(run, False)


def two_optimizers_with_gradients_of_their_own(run: Run) -> None:
    two_optimizers(run, [])


def parts_that_are_received_into_tensors_of_their_own(run: Run) -> None:
    messages(run, False)


def federated_weights_with_private_norms(run: Run) -> None:
    """One weight is averaged now and then, the others stay the rank's own."""
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "ddp"]
        for n, e in enumerate(rank.all("gradients")):
            apart = [1.0, 1.0 + rank.number]
            e["weights"] = e["weights"] | {NAMES[0]: apart if n % 4 else [1.0, 1.0], NAMES[1]: apart}
    change(run, "forward", wanted={"loader": TRAIN}, ddp=False, sync=False)


def members_of_a_population_are_tried_without_a_backward_pass(run: Run) -> None:
    """An evolution strategy: the model has other weights on each rank, and the optimizer the same center."""
    average_on_rank_0_only(run)
    change(run, "update", backwards=[])


def shared_weights_that_differ_before_the_parts_are_clipped(run: Run) -> None:
    """What enters a divided layer is not added up: the factor differs, because the norms of the shared weights do."""
    what_enters_a_divided_layer_is_not_added_up_in_backward(run)
    for rank in run.ranks:
        for e in rank.all("gradients"):
            e["factor"], e["gradients"] = 0.5 + 0.1 * rank.number, e["gradients"] | {NAMES[1]: [0.5, 1.0]}
    assert found_by(run) == {"shared_agree"}
    divided_layers(run, alike=True)
    change(run, "gradients", factor=1.0)


def samples_that_are_evaluated_before_they_are_trained_on(run: Run) -> None:
    """As in active learning: what the model is least sure of is trained on later."""
    change(run, "pass", base=7)
    change(run, "pass", wanted={"loader": VAL}, t=-1.0)
    set_samples(run, "v", [0, 1, 90, 91], [92, 93, 94, 95])


def two_losses_in_one_line(run: Run) -> None:
    """One is a mean over a batch with labels, the other over a larger one without."""
    change(run, "update", factors=[[at(44), 2, 0.5, 10], [at(44), 8, 0.125, 20]])


def copies_that_are_trained_on_each_rank(run: Run) -> None:
    """As in federated averaging: their means over the ranks are what the next ones begin with."""
    trained_copies(run, exchange=True)


def an_attack_on_validation_samples(run: Run) -> None:
    change(run, "forward", wanted={"grad": False}, for_nothing=True, for_inputs=True)


def padding_that_has_no_weight_in_validation(run: Run) -> None:
    set_samples(run, "v", [0, 2, 4, 6, 8, 10, 12, 14, 0], [1, 3, 5, 7, 9, 11, 13, 15, 1])
    for rank in run.ranks:
        for e in rank.all("collective"):
            sums = {"e": "sum", "step": e["step"], "t": e["t"], "at": at(53), "totals": [11.0, float(SAMPLES)]}
            rank.events.insert(rank.events.index(e) + 1, sums)


def a_fixed_part_in_batches_of_another_order(run: Run) -> None:
    """A sampler that has no epochs gives the same part of the data in each of them."""
    change(run, "dataset", size=64)
    for rank in (0, 1):
        run.samples[f"{rank}_1"] = run.samples[f"{rank}_0"][::-1]


def a_sampler_in_a_batch_sampler_that_is_told_the_epoch(run: Run) -> None:
    a_fixed_part_in_batches_of_another_order(run)
    for rank in run.ranks:
        for epoch, e in enumerate(rank.all("pass", loader=TRAIN)):
            e["epochs"] = {"Draw": epoch}


def stages_with_a_tied_embedding(run: Run) -> None:
    tied(run, alike=True)


RIGHT = [
    stages_with_a_tied_embedding,
    a_fixed_part_in_batches_of_another_order, a_sampler_in_a_batch_sampler_that_is_told_the_epoch,
    padding_that_has_no_weight_in_validation,
    an_attack_on_validation_samples,
    samples_that_are_evaluated_before_they_are_trained_on, two_losses_in_one_line, copies_that_are_trained_on_each_rank,
    members_of_a_population_are_tried_without_a_backward_pass, divided_optimizer,
    shared_weights_that_differ_before_the_parts_are_clipped,
    a_frozen_part_in_evaluation_mode, two_optimizers_with_gradients_of_their_own,
    parts_that_are_received_into_tensors_of_their_own, own_collectives, federated_weights_with_private_norms,
    workers_that_learn_of_the_epoch_in_shared_memory, workers_whose_samples_are_random_anyway,
    one_scaling_for_all_ranks, a_scaling_that_is_called_local, samples_of_all_numbers_are_drawn_with_replacement,
    layers_that_are_divided_by_hand, an_average_in_16_bits_that_follows,
    a_halo_whose_gradient_comes_back, as_many_batches_from_data_sets_of_other_sizes, sharded_and_accumulated,
    a_rank_that_validates_one_batch_more, other_rates_in_a_join, members_of_an_ensemble,
    members_that_are_wrapped_by_a_group_of_one, a_pretraining_that_each_rank_repeats,
    a_schedule_of_updates_with_accumulation, a_schedule_of_batches_with_accumulation,
    a_live_state_from_before_the_training, validation_of_a_data_set_that_does_not_augment, validation_of_a_simulator,
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
    settings_of_each_rank, samples_that_are_drawn_with_other_seeds, targets_with_the_offset_of_the_rank,
    a_sharded_model_of_which_all_ranks_need_all,
    a_sharded_layer_that_no_rank_needs,
    a_gather_of_which_all_compute_the_same,
    a_gather_whose_gradient_is_added_up,
    gathers_in_groups_of_one_rank,
    a_table_of_which_each_rank_has_some_rows,
    a_rank_that_fills_in_when_its_stream_has_ended,
]  # fmt: skip
"""what looks like one of the faults above and is right"""


@pytest.mark.parametrize("neighbor", RIGHT, ids=lambda function: function.__name__)
def test_what_only_looks_like_a_fault_is_not_accused(neighbor: Callable[[Run], None]) -> None:
    run = correct_run()
    neighbor(run)
    assert found_by(run) <= {"accumulation"}  # these events say nothing of no_sync


def test_an_ensemble_is_one_under_a_provocation_too() -> None:
    """A run that ends early has not saved the members' files, from which an ensemble is known."""
    ordinary, provoked = correct_run(), correct_run(name="with a NaN on rank 1", provocation="nan")
    for run in (ordinary, provoked):
        members_of_an_ensemble(run)
    for rank in provoked.ranks:
        rank.events = [e for e in rank.events if e["e"] not in ("save", "write")]
    assert not judge([ordinary, provoked]).faults
    assert {fault.check for fault in judge([provoked]).faults} == {"weights_agree"}


def test_ranks_that_average_now_and_then_are_not_accused_when_a_nan_comes_before() -> None:
    ordinary, provoked = correct_run(), correct_run(name="with a NaN on rank 1", provocation="nan")
    for run in (ordinary, provoked):
        federated_weights_with_private_norms(run)
    for rank in provoked.ranks:
        for e in rank.all("gradients"):
            e["weights"] = {name: [1.0, 1.0 + rank.number + e["count"]] for name in NAMES}
    assert not judge([ordinary, provoked]).faults
    assert {fault.check for fault in judge([provoked]).faults} == {"weights_agree"}


def test_weights_that_are_nan_are_not_called_unchanged() -> None:
    run = correct_run(provocation="nan")
    change(run, "gradients", weights={name: [float("nan"), float("nan")] for name in NAMES})
    assert not found_by(run) & {"weights_change", "weights_agree"}


def test_outliers_on_one_rank_accuse_no_divided_layers() -> None:
    ordinary, provoked = correct_run(), correct_run(name="with outliers on rank 1", provocation="outliers")
    divided_layers(ordinary, alike=True)
    divided_layers(provoked, alike=False)
    assert not judge([ordinary, provoked]).faults
