"""Each check finds its fault in the events of a run, names the cause's line, and calls nothing broken fine."""

import copy
from collections.abc import Callable

import pytest

from doctor_events import TRAIN, VAL, add, at, change, correct_run
from faulty_processes import one_rank_ends_while_another_waits, trace
from faulty_runs import FAULTS
from faulty_samples import each_rank_has_a_shard_of_its_own, one_seed_for_noise, streams_that_were_cut
from faulty_steps import clipped_before_backward, each_rank_has_searched_a_rate_of_its_own, zeroed_before_each_part
from faulty_validation import attention_drops_weights_after_eval, other_running_means, results_stay_apart
from faulty_weights import inner_model_called
from rankdoctor.checks import CHECKS, judge
from rankdoctor.runs import Run, mark_validation_with_gradients


def test_only_layers_that_differ_are_counted() -> None:
    run = correct_run()
    other_running_means(run)
    (finding,) = judge([run]).findings
    assert "different running means in 1 layers of batch norm" in finding.text


def test_a_rank_that_leaves_out_its_first_update_has_made_its_optimizer_in_the_same_way() -> None:
    """Its schedule has gone on meanwhile, so its first update has another rate."""
    run = correct_run()
    each_rank_has_searched_a_rate_of_its_own(run)
    change(run, "gradients", wanted={"count": 0}, made_lr=[0.1])
    (finding,) = judge([run]).faults
    assert finding.at != at(28)


def test_noise_of_each_rank_and_noise_that_is_no_batch() -> None:
    run = correct_run()
    for rank in (0, 1):
        add(run, "noise", 43, (rank,), samples=2, values=rank)
        add(run, "noise", 47, (rank,), samples=64, values=7)  # for example latent vectors of pictures that are shown
    assert not [finding for finding in judge([run]).findings if finding.check == "same_noise"]


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


@pytest.mark.parametrize(
    ("broken", "title"),
    [
        (
            attention_drops_weights_after_eval,
            "Nothing in the model is random, and no statistic of a batch is used, in evaluation mode.",
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


def test_a_loader_without_updates_is_validated_also_if_no_grad_is_forgotten() -> None:
    run = correct_run()
    for rank in run.ranks:
        for e in rank.all("forward", loader=VAL):
            e |= {"grad": True, "train": True}
        mark_validation_with_gradients(rank)
    assert (run.training, run.validating) == ({TRAIN}, {VAL})
    assert all(e["for_nothing"] for e in run.first.all("forward", loader=VAL))


def test_loaders_that_are_read_in_turns_are_both_trained_on() -> None:
    run = correct_run()
    for rank in run.ranks:
        for e in list(rank.all("forward", loader=TRAIN)):  # the batch of the other loader comes before
            rank.events.insert(rank.events.index(e), e | {"loader": VAL})
        mark_validation_with_gradients(rank)
    assert run.training == {TRAIN, VAL}
