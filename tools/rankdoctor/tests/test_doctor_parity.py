"""Parity: the same global batch on any number of ranks gives the same updates, or the first difference is named."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from asked_runs import run
from doctor_events import at, correct_run
from rankdoctor.agreement import compare
from rankdoctor.parity import text
from rankdoctor.placeholders import WrongPlaceholder, filled
from rankdoctor.runs import Run

PAGE = Path(__file__).resolve().parent.parent / "docs/parity.md"


@pytest.mark.parametrize(
    ("argument", "ranks", "result"),
    [
        ("{64/ranks}", 4, "16"),
        ("--lr={0.1*ranks}", 2, "--lr=0.2"),
        ("{(64 // ranks) - 2 + 1}", 3, "20"),
        ("{-ranks}", 2, "-2"),
        ("{1.0/ranks}", 4, "0.25"),
        ("a{ranks}b{2*ranks}", 3, "a3b6"),
        ('{"key": 1}', 3, '{"key": 1}'),
        ("{rank}", 3, "{rank}"),
    ],
)
def test_expressions_of_ranks_are_computed_and_other_braces_stay(argument: str, ranks: int, result: str) -> None:
    assert filled(argument, ranks) == result


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("{64/ranks}", "no whole number"),
        ("{ranks**2}", "not 'ranks ** 2'"),
        ("{__import__('os').system('ls') + ranks}", "may have numbers"),
        ("{ranks.real}", "not 'ranks.real'"),
        ("{ranks and True}", "may have numbers"),
        ("{64/ranks", ""),
        ("{64/(ranks-3)}", "divides by zero"),
        ("{64 ranks}", "is no expression of ranks"),
        ("{True*ranks}", "not 'True'"),
    ],
)
def test_nothing_else_is_computed(argument: str, said: str) -> None:
    if not said:
        assert filled(argument, 3) == argument
        return
    with pytest.raises(WrongPlaceholder, match=said.replace("*", r"\*")):
        filled(argument, 3)


def trained_run(world: int, **changes: object) -> Run:
    """Return events of a run of five updates of eight samples, with equal values on any number of ranks."""
    it = correct_run(world)
    for rank in it.ranks:
        rank.events = [e for e in rank.events if e["e"] not in ("gradients", "update")]
        for step in range(5):
            numbers = [100 * step + k for k in range(rank.number, 8, world)]
            base = {"at": at(45), "t": 1.0}
            rank.events.append({"e": "gradients", "step": step, "optimizer": 0, "lr": [0.1], **base})
            rank.events.append(
                {
                    "e": "update",
                    "step": step,
                    "factors": [[at(44), 8 // world, world / 8]],
                    **base,
                }
            )
            rank.events.append({"e": "parity", "step": step + 1, "samples": numbers, "loss": 2.0 - step / 10,
                                "squares": {"w": ["", 4.0]}, "sketch": [1.0 + step, 2.0], "half": False,
                                "start": None if step else [0.0, 2.0], **base})  # fmt: skip
    return it


def parity_events(it: Run, step: int) -> list:
    return [rank.all("parity")[step] for rank in it.ranks]


def first(*runs: Run) -> tuple[str, str]:
    """Return what differs first between the last run and the usual one, and the likely reason."""
    found = compare(list(runs), None)
    assert found.status == 1, found.reason
    (one,) = found.differences.values()
    assert f"update {one.update}" in text(found, list(runs))
    return f"{one.what} in update {one.update}", one.likely


def test_equal_runs_are_equal() -> None:
    runs = [trained_run(1), trained_run(1), trained_run(2), trained_run(4)]
    found = compare(runs, None)
    assert found.status == 0 and found.distances == {2: 0.0, 4: 0.0}
    assert "1 and 4 ranks: equal" in text(found, runs) and "losses and norms within 1e-03" in text(found, runs)


def test_the_first_difference_is_named_with_its_likely_reason() -> None:
    usual = trained_run(1), trained_run(1)

    other = trained_run(2)
    parity_events(other, 2)[0]["samples"][0] = 7777
    what, likely = first(*usual, other)
    assert what == "samples in update 3" and likely.startswith("the sampler: its order")

    other = trained_run(2)
    a, b = parity_events(other, 1)
    b["samples"] = list(a["samples"])
    assert first(*usual, other)[1].startswith("ranks use the same samples")

    other = trained_run(2)
    parity_events(other, 4)[1]["samples"].pop()
    assert first(*usual, other)[1].startswith("the ranks' shares are unequal in the last batch")

    other = trained_run(2)
    for rank, count in zip(other.ranks, (3, 4), strict=True):
        rank.all("update")[2]["factors"] = [(at(44), count, 1 / count)]
        rank.all("parity")[2]["loss"] += 0.1
    what, likely = first(*usual, other)
    assert what == "loss in update 3" and likely.startswith("a mean of means: the ranks count 3 and 4 targets")

    other = trained_run(2)
    for rank in other.ranks:
        rank.all("model")[0]["local_norms"] = 3
        rank.all("parity")[0]["loss"] += 0.1
    assert first(*usual, other)[1].startswith("batch norm takes")

    for factor, said in (
        (4.0, "a sum over the ranks"),
        (0.25, "divided by the number of ranks twice"),
        (2.0, "shards"),
    ):
        other = trained_run(4)
        for e in parity_events(other, 0):
            e["squares"] = {"w": ["", 4.0 * factor**2]}
        what, likely = first(*usual, other)
        assert what == "gradient in update 1" and said in likely

    other = trained_run(2)
    for rank in other.ranks:
        for e in rank.all("gradients"):
            e["lr"] = [0.2]
    assert first(*usual, other)[0] == "learning rate in update 1"

    other = trained_run(2)
    for e in parity_events(other, 4):
        e["sketch"] = [9.0, 2.0]
    assert first(*usual, other)[0] == "weights in update 5"

    other = trained_run(2)
    for rank in other.ranks:
        rank.events.remove(rank.all("parity")[4])
    assert first(*usual, other)[0] == "updates in update 5"


def test_what_rounding_alone_leads_to_is_no_difference() -> None:
    """A correct script with Adam: equal for 20 updates, and then no digit is left. A nudged run shows the same."""
    usual, other, nudged = trained_run(1), trained_run(2), trained_run(1)
    for rank in other.ranks:
        rank.all("parity")[3]["squares"] = {"w": ["", 4.16]}
    nudged.first.all("parity")[2]["squares"] = {"w": ["", 4.04]}
    runs = [usual, usual, other]
    assert compare(runs, None).differences[2].what == "gradient"
    found = compare(runs, None, nudged)
    assert found.status == 0 and found.rounding == 3
    assert "From update 3 on, rounding decides" in text(found, runs)
    nudged.first.all("parity")[2]["squares"] = {"w": ["", 4.004]}
    assert compare(runs, None, nudged).status == 1, "forty times as much as rounding"
    nudged.first.all("parity")[2]["squares"] = {"w": ["", 4.04]}
    parity_events(other, 4)[0]["samples"][0] = 7777
    assert compare(runs, None, nudged).differences[2].what == "samples", "which rounding does not change"


def test_shards_of_a_gradient_count_once() -> None:
    other = trained_run(4)
    for rank in other.ranks:
        for e in rank.all("parity"):
            e["squares"] = {"w": [str(rank.number % 2), 2.0]}  # two shards, in two replicas
    assert compare([trained_run(1), trained_run(1), other], None).status == 0


def test_what_cannot_be_compared_says_why() -> None:
    again = trained_run(1)
    parity_events(again, 1)[0]["samples"][0] = 7777
    found = compare([trained_run(1), again, trained_run(2)], None)
    assert found.status == 2 and "two runs on 1 ranks differ in update 2 (samples): seed" in found.reason

    other = trained_run(2)
    for e in parity_events(other, 0):
        e["samples"] = e["samples"] * 2
    found = compare([trained_run(1), trained_run(1), other], None)
    assert found.status == 2 and "--batch_size '{8/ranks}'" in found.reason

    other = trained_run(2)
    for e in parity_events(other, 0):
        e["start"] = [0.5, 2.0]
    assert "weights before the first update differ" in compare([trained_run(1), trained_run(1), other], None).reason

    other = trained_run(2)
    other.launch.world_size = 4
    assert compare([trained_run(1), trained_run(1), other], None).reason == "4 ranks were started, and 2 joined"


def test_the_tolerance_can_be_chosen() -> None:
    other = trained_run(2)
    for e in parity_events(other, 0):
        e["loss"] *= 1.01
    runs = [trained_run(1), trained_run(1), other]
    assert compare(runs, None).status == 1 and compare(runs, 0.02).status == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "2", "global_batch.py"], "--ranks 2: give at least two numbers"),
        (["--ranks", "2,2", "global_batch.py"], "each number may stand there once"),
        (["--ranks", "1,3", "global_batch.py", "{16/ranks}"], "is 5.333 with 3 ranks, and no whole number"),
        (["--ranks", "1,2"], "name a training script"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    status, out, err = run(tmp_path, "parity", *arguments)
    assert status == 2 and not out and err.count("\n") == 1
    assert err.startswith("rankdoctor: error: ") and said in err


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["", "fsdp"])
def test_a_correct_script_is_equal(words: str, tmp_path: Path) -> None:
    status, out, _ = run(tmp_path, "parity", "--ranks", "1,2,4", "global_batch.py", "{16/ranks}", words)
    assert status == 0, out
    assert "1 and 2 ranks: equal" in out and "1 and 4 ranks: equal" in out
    if not words:
        (shown,) = re.findall(r"```text\n(update .*?)```", PAGE.read_text(), re.S)
        assert shown in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("not_shared", 1, "ranks use the same samples"),
        ("unequal", 1, "unequal in the last batch"),
        ("batch_norm", 1, "batch norm takes the mean"),
        ("ignored", 1, "a mean of means: the ranks count"),
        ("summed", 1, "a sum over the ranks in place of a mean"),
        ("late", 1, "a sum over the ranks in place of a mean"),
        ("rate", 1, "it depends on the number of ranks"),
        ("unseeded", 2, "two runs on 1 ranks differ in update 1 (samples): seed"),
    ],
)
def test_faults_of_scripts_are_named(words: str, status: int, said: str, tmp_path: Path) -> None:
    arguments = ["parity", "--format", "json", "--ranks", "1,2", "global_batch.py", "{16/ranks}", words]
    seen, out, _ = run(tmp_path, *arguments)
    report = json.loads(out)
    assert (seen, report["status"]) == (status, status), out
    assert said in report["reason"] + "".join(one["likely"] for one in report["differences"])
    assert Counter(one["ranks"] for one in report["runs"]) == Counter({1: 1, 2: 1})
