"""The same weights, validated on several ranks and on one: a result that differs is put together in a wrong way."""

from pathlib import Path

import pytest

from asked_runs import findings
from doctor_events import correct_run
from rankdoctor.checks.same_validation import Printed, constants, differs, trivial
from rankdoctor.runs import Rank

TITLE = "A validation has the same results on one rank."


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mean of R2", "order of the data"])
def test_a_result_that_depends_on_the_number_of_ranks_is_found(how: str, tmp_path: Path) -> None:
    _, found = findings(tmp_path, "--validation", "validations.py", "--how", how)
    kind, mark, text = found["same_validation"]
    assert kind == "FAULT"
    assert mark == {"mean of R2": "mean", "order of the data": "gathered"}[how]
    assert "result" in text and "on 2 ranks, and" in text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gathered", "mean of losses"])
def test_a_result_that_does_not_is_called_fine_with_what_was_compared(how: str, tmp_path: Path) -> None:
    report, found = findings(tmp_path, "--validation", "validations.py", "--how", how)
    assert "same_validation" not in found
    assert report["fine"][TITLE].startswith("1 printed results, equal on several ranks and on one")


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["mean of roots"])
def test_more_that_is_wrong(how: str, tmp_path: Path) -> None:
    _, found = findings(tmp_path, "--validation", "validations.py", "--how", how)
    assert found["same_validation"][0] == "FAULT"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "val"),
    [("interleaved", 96), ("contrast", 96), ("gathered", 97)],
    ids=["the order is restored", "it depends on which samples are in a batch", "a sample is repeated"],
)
def test_more_that_only_looks_wrong(how: str, val: int, tmp_path: Path) -> None:
    _, found = findings(tmp_path, "--validation", "validations.py", "--how", how, "--val", str(val))
    assert "same_validation" not in found


def lines(*texts: str) -> Rank:
    return Rank(0, [{"e": "printed", "step": 0, "t": 0.0, "at": "/home/me/train.py:9", "text": text} for text in texts])


def test_only_what_is_printed_alike_each_time_is_a_result() -> None:
    epochs = [f"epoch {n}: loss {1 / (n + 1):.3f}, val R2 0.789, lr 0.0010, {3.21 + n:.1f} s" for n in range(3)]
    (result,) = constants(lines(*epochs)).values()
    assert (result.word, result.text) == ("R2", "0.789")
    assert not constants(lines(epochs[0])), "once is not enough"
    (one,) = constants(lines(*["step 10/20, 64 samples, accuracy 1.0, memory 1.25 GB"] * 3)).values()
    assert trivial(one.text) and trivial("0.000", "1.0") and not trivial("1.0", "0.953"), "1 and 1 say nothing"


def test_rounding_is_no_difference() -> None:
    def printed(text: str) -> Printed:
        return Printed("R2", text, "train.py:9")

    assert not differs(printed("0.789"), printed("0.790"))
    assert not differs(printed("1234.5678"), printed("1234.9"))
    assert differs(printed("0.789"), printed("0.795"))
    assert differs(printed("1.2e-05"), printed("1.7e-05"))


def test_runs_whose_weights_do_not_move_are_only_compared() -> None:
    from rankdoctor.checks import judge

    still = correct_run()
    still.launch.provocation = "frozen"
    for rank in still.ranks:
        for e in rank.all("gradients"):
            e["weights"] = rank.all("gradients")[0]["weights"]
    assert not judge([correct_run(), still]).findings
