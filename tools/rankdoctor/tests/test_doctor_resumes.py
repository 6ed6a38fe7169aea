"""Runs that were resumed, compared with those that were not stopped."""

import pytest

from doctor_events import VAL, at, change, correct_run
from rankdoctor.checks import judge
from rankdoctor.runs import Run

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
