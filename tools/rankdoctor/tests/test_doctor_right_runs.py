"""Correct runs of kinds that are less usual have no fault."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from doctor_events import NAMES, SAMPLES, TRAIN, VAL, add, at, change, correct_run
from faulty_processes import one_batch_more, two_ranks_wait, workers_not_kept
from faulty_samples import (
    each_rank_splits_in_its_own_way,
    every_rank_has_all,
    no_set_epoch,
    one_seed,
    same_inputs_without_numbers,
    set_samples,
)
from faulty_steps import the_loss_depends_on_gathered_copies
from faulty_validation import (
    all_validate_all,
    averaged_weights_generate_in_training_mode,
    validation_drops_the_last,
    validation_padded,
)
from faulty_weights import all_save, make_weights_differ, sharded_weights_without_an_optimizer
from rankdoctor.checks import Diagnosis, apply, counted, judge
from rankdoctor.checks.base import Check, Finding, hint, need, seen
from rankdoctor.launch import likely_launchers
from rankdoctor.runs import Run

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


def test_whole_files_that_the_ranks_exchange_in_the_next_epoch_are_no_order_of_their_own() -> None:
    """The first half of the steps has nothing in common; all of the second half was on the other rank before."""
    run = correct_run()
    for rank in run.ranks:
        rank.events = [e for e in rank.events if e["e"] != "pass"]
        for number, e in enumerate(rank.all("forward", train=True)):
            files = rank.number if number < 4 else 1 - rank.number
            e["rows"] = [1000 * files + 100 * (number % 4) + n for n in range(16)]
    assert not [finding for finding in judge([run]).findings if finding.check == "same_samples"]


def test_tables_of_each_rank_may_have_an_optimizer_of_their_own() -> None:
    """Their weights differ between the ranks from the beginning on; the ranks exchange rows within the model."""
    run = correct_run()
    for rank in run.ranks:
        events = []
        for e in rank.events:
            events.append(e)
            if e["e"] == "gradients":
                own = {"table": [0.5 + rank.number + 0.1 * e["step"], 9.0]}
                events.append(e | {"optimizer": 1, "weights": own, "gradients": own})
        rank.events = events
    assert [finding.check for finding in judge([run]).faults] == ["weights_agree"], "nobody has wrapped the table"
    add(run, "inner", 43, name="all_to_all_single", features=True)
    assert not [finding for finding in judge([run]).faults if finding.check == "weights_agree"]


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
