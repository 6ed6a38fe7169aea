"""`--skip`: a condition by which one rank leaves out a batch is found in the source, and tried."""

import pytest

from asked_runs import Doctor, mark


def of_skips(report: dict) -> list[dict]:
    """The findings of the runs in which rank 1 skipped a batch."""
    found = [one for top in report["findings"] for one in (top, *top["consequences"])]
    return [one for one in found if one["run"].startswith("with a batch that rank 1 skips")]


@pytest.mark.slow
def test_a_batch_that_one_rank_skips_is_found_although_none_is_damaged(doctor: Doctor) -> None:
    report, _ = doctor.findings("--skip", "skips.py", "alone")
    for finding in (first := of_skips(report)):
        assert finding["kind"] == "NOTE" and "one rank alone" in finding["text"]
        assert mark(finding["at"]) == "alone"
    assert first
    assert not [one for one in report["findings"] if one["check"] == "waits"], "no value of a batch is on the GPU yet"


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["function", "hand"])
def test_it_is_found_in_a_function_of_a_step_too(doctor: Doctor, how: str) -> None:
    report, _ = doctor.findings("--skip", "skips.py", how)
    assert {mark(finding["at"]) for finding in of_skips(report)} == {"function"}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["agreed", "by_step", "join", "local"])
def test_what_all_ranks_decide_alike_or_harms_nobody_is_not_accused(doctor: Doctor, how: str) -> None:
    report, _ = doctor.findings("--skip", "skips.py", how)
    assert of_skips(report) == []
    assert how in ("agreed", "by_step") or len(report["runs"]) == 2, "where a rank decides by itself, it was tried"
