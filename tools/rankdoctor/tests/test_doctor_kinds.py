"""Scripts of many kinds, right and with faults: what is found, with its line, and what is not accused."""

import pytest

from asked_runs import Doctor, Found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {}),
        ("members", {}),
        ("repeated", {}),
        ("live", {"kept_states": "kept"}),
        ("augmented", {"steady_validation": "held_out"}),
    ],
)
def test_weights_that_are_kept_members_of_an_ensemble_and_samples_that_validation_augments(
    doctor: Doctor, words: str, wanted: Found
) -> None:
    report, found = doctor.findings("best.py", *([words] if words else []))
    assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["", "attack", "sharpness", "surgery"])
def test_what_only_looks_like_a_fault_is_not_accused(doctor: Doctor, words: str) -> None:
    """Noise that a model scales, checkpointing, files that workers open, gradients that are read and thrown away."""
    report, found = doctor.findings("kinds.py", *([words] if words else []))
    assert report["errors"] == [] and found == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("gossip", {}),
        ("critic", {}),
        ("averaged", {}),
        ("tables", {}),
        ("chunks", {}),
        ("adapted", {}),
        ("chosen", {}),
        ("private", {}),
        ("langevin", {}),
        ("langevin,alone", {"weights_agree": "alone"}),
        ("chunks,own", {"messages_return": "own"}),
        ("teacher", {}),
        ("teacher,medians", {"same_validation": "medians"}),
    ],
)
def test_a_training_that_is_unusual(doctor: Doctor, kind: str, wanted: Found) -> None:
    how = "--validation" if kind.startswith("teacher") else "--reference"
    asked = [how, "--influence"] if kind == "private" else [how]
    report, found = doctor.findings(*asked, "unusual.py", kind)
    assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("sdpa", {"random_in_evaluation": "attention"}),
        ("noise", {"random_in_evaluation": "added"}),
        ("set", {"same_meaning": "index"}),
        ("handle", {"own_handles": "open"}),
        ("recomputed", {"recomputation": "recomputed"}),
        ("reentrant", {"recomputed_gradients": "reentrant"}),
        ("zeroed", {"gradients_used": "zeroed"}),
        ("clip_early", {"clip_in_time": "clip"}),
        ("stream", {"equal_steps": "stream"}),
        ("branch", {"same_unused": "backward"}),
    ],
)
def test_each_kind_is_found_with_its_line(doctor: Doctor, words: str, wanted: Found) -> None:
    _, found = doctor.findings("kinds.py", words)
    assert wanted.items() <= found.items(), found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {}),
        ("replacement", {}),
        ("own_order", {"same_samples": "model"}),
        ("own_count", {"element_weights": "backward"}),
        ("own_mean", {"element_weights": "backward"}),
        ("spread", {"own_target": "backward"}),
        ("pairs", {}),
    ],
)
def test_an_own_loader_and_a_masked_loss(doctor: Doctor, words: str, wanted: Found) -> None:
    report, found = doctor.findings("masks.py", *([words] if words else []))
    found.pop("collectives_per_step", None)  # a count that is added up in each step costs a little
    assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["fill", "fill,sums", "minus", "times", "left", "fill,plain"])
def test_a_mask_of_a_contrastive_loss(doctor: Doctor, how: str) -> None:
    for words, wanted in ((how, {}), (f"{how},no_offset", {"contrast_masks": "backward"})):
        report, found = doctor.findings("contrasts.py", words)
        found.pop("gathered_gradients", None)  # of constants
        assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {}),
        ("tally", {"added_once": "tally"}),
        ("divided", {"divided_once": "divided"}),
        ("average", {"statistics_of_copies": "average"}),
        ("vocabulary", {"same_numbering": "vocabulary"}),
        ("shuffled", {"stream_shared": "loader"}),
        ("worker", {"same_samples": "loader", "stream_shared": "loader"}),  # the second follows from the first
        ("sharded", {}),
        ("sharded,norms", {"norms_of_parts": "norms"}),
    ],
)
def test_totals_streams_and_vocabularies(doctor: Doctor, words: str, wanted: Found) -> None:
    report, found = doctor.findings("totals.py", *([words] if words else []))
    found.pop("small_norm", None)
    assert report["errors"] == [] and found == wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "words", "wanted"),
    [
        ("copies.py", "", {}),
        ("copies.py", "drawn", {}),
        ("copies.py", "stale", {"worker_copies": "loader"}),
        ("copies.py", "own_scaling", {"same_scaling": "scaling"}),
        ("copies.py", "low", {"averages_follow": "average"}),
        ("copies.py", "multiplied", {"averages_follow": "average"}),
        ("copies.py", "positions", {"same_samples": "loader"}),
        ("divided.py", "", {}),
        ("divided.py", "partial", {"shared_agree": "leave"}),
        ("parts.py", "", {}),
        ("parts.py", "revived", {"frozen_modes": "train"}),
        ("parts.py", "left", {"own_gradients": "discriminator"}),
        ("pipeline.py", "", {}),
        ("pipeline.py", "one", {"kept_inputs": "receive"}),
        ("updates.py", "evolve", {}),
        ("updates.py", "divide", {}),
        ("updates.py", "divide,local", {"clip_local": "clip"}),
        ("updates.py", "tasks", {}),
        ("updates.py", "tasks,alone", {"weights_agree": "update"}),
        ("updates.py", "sparse", {}),
        ("updates.py", "shard", {}),
        ("updates.py", "shard,blocks", {"unsharded_agree": "made"}),
    ],
)
def test_copies_of_workers_divided_layers_parts_and_own_updates(
    doctor: Doctor, script: str, words: str, wanted: Found
) -> None:
    report, found = doctor.findings(script, *([words] if words else []))
    found.pop("same_meaning", None)  # follows from another scaling of the samples
    assert report["errors"] == [] and found == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("folds", "each validates samples that only other ranks train on"),
        ("rates", "their optimizers were made with different learning rates"),
        ("sizes", "their models have different sizes: 161, 321 weights"),
        ("bags", "the samples are not shared among them either"),
    ],
)
def test_ranks_that_train_models_of_their_own_are_asked_and_not_accused(how: str, said: str, doctor: Doctor) -> None:
    report, found = doctor.findings("apart.py", how)
    assert found.pop("weights_agree") == "made"
    assert not found, report["findings"]
    (note,) = report["findings"]
    assert note["kind"] == "NOTE" and said in note["text"]


@pytest.mark.slow
def test_ranks_that_share_the_samples_and_exchange_nothing_are_accused(doctor: Doctor) -> None:
    report, found = doctor.findings("apart.py", "forgotten")
    assert found["weights_agree"] == "made" and report["findings"][0]["kind"] == "FAULT"


@pytest.mark.slow
def test_a_model_that_sends_messages_is_not_called_by_one_rank_alone(doctor: Doctor) -> None:
    """Otherwise the ranks wait for each other for ever."""
    report, found = doctor.findings("--influence", "--reference", "--seconds", 100, "halo.py")
    assert not found, report["findings"]
    assert report["updates"] == [8]


@pytest.mark.slow
def test_a_halo_whose_gradient_is_not_sent_back_is_found(doctor: Doctor) -> None:
    report, found = doctor.findings("halo.py", "lost")
    assert found == {"messages_return": "sent"}, report["findings"]
