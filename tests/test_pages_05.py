"""What the page of lesson 05 shows: output that was kept, and tables of memory whose parts add up."""

import pytest

from conftest import REPOSITORY
from lab import memory_tables, render_memory, render_sharding
from lab.output_05 import COMMANDS

PAGE = (REPOSITORY / "05_fully_sharded" / "README.md").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_output_is_shown_below_its_command(name: str) -> None:
    output = render_sharding.output(name)
    assert PAGE.count(output) >= 1
    assert f"\n{COMMANDS[name]}\n" in PAGE.partition(output)[0]


def test_output_of_another_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "one_rank", "python train.py")
    with pytest.raises(ValueError, match="the command has changed"):
        render_sharding.output("one_rank")


def test_the_losses_that_are_shown_are_those_that_the_page_compares() -> None:
    epoch = {name: render_sharding.output(name).splitlines()[-2] for name in COMMANDS}
    assert epoch["two_ranks"] == epoch["ddp"] != epoch["one_rank"]
    assert epoch["saved_whole"] == epoch["saved_sharded"]
    assert epoch["resumed_whole"] == epoch["resumed_sharded"]


@pytest.mark.parametrize("short", [False, True])
def test_the_columns_of_the_forecast_add_up_to_the_peak(short: bool) -> None:
    lines = [line for line in render_memory.fit(*render_memory.SEVEN, short=short).splitlines() if line[:1] == "|"]
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert len(rows) == 5 if short else len(rows) > 10
    for _, *parts, peak, moment in rows:
        assert sum(map(float, parts)) == pytest.approx(float(peak.strip("*")), abs=0.011 * len(parts) / 2)
        assert moment in ("forward", "backward", "optimizer")


def test_the_columns_of_what_fills_the_memory_add_up_to_the_peak() -> None:
    _, cells = memory_tables.what_fills(render_memory.load("what_fills")["rows"])
    for _, *parts, peak in cells:
        assert sum(map(float, parts)) == pytest.approx(float(peak), abs=0.0031)


def test_a_cure_that_does_not_help_is_not_recommended() -> None:
    cures = {memory_tables.SHARDED: 90, memory_tables.RECOMPUTED: 50, memory_tables.PARTS: 40}
    assert memory_tables.advice(100, cures) == "split the batch, recompute"
    assert memory_tables.advice(100, cures | {memory_tables.RECOMPUTED: 100}) == "split the batch"
    assert memory_tables.advice(100, dict.fromkeys(cures, 99)) == memory_tables.NO_CURE
    assert memory_tables.advice(100, cures | {memory_tables.PARTS: None}) == "recompute"
