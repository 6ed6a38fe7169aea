"""The pages of lesson 04: shown outputs and the commands above them, minutes, exercises, and what is called noise."""

import json
import re

import pytest

import underflow
from conftest import REPOSITORY
from lab import render, render_compute
from lab.example_output import COMMANDS_04

LESSON = REPOSITORY / "04_mixed_precision"
PAGE = (LESSON / "README.md").read_text()
SIDE_PAGES = re.findall(r"^\| \[[^]]+\]\((\w+\.md)\)", (LESSON / "experiments" / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS_04)
def test_a_shown_output_is_that_of_the_command_above_it(name: str) -> None:
    before, _, _ = PAGE.partition(render_compute.output(name, speeds=name == "mfu"))
    assert f"\n{COMMANDS_04[name]}\n" in before
    assert before != PAGE


def test_another_command_needs_another_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS_04, "fp32", "python train.py")
    with pytest.raises(ValueError, match=r"example_output\.py fp32: the command has changed"):
        render_compute.output("fp32")


def minutes() -> dict[str, tuple[int, bool]]:
    """The minutes of each section, and whether it is on the shortest path."""
    rows = re.findall(r"^\| (\**)\[([^]]+)\]\(#([\w-]+)\)\**\ \| (\d+) \|", PAGE, re.MULTILINE)
    return {name: (int(number), bool(bold)) for bold, name, _, number in rows}


def test_the_minutes_add_up() -> None:
    sections = minutes()
    headings = re.findall(r"^#{2,3} (.+)$", PAGE, re.MULTILINE)
    assert [heading for heading in headings if heading in sections] == list(sections)
    shortest = sum(number for number, bold in sections.values() if bold)
    whole = sum(number for number, _ in sections.values())
    assert f"takes about {whole} minutes" in PAGE
    assert f"shortest path takes {shortest} minutes" in PAGE


def test_the_exercises_are_numbered_in_reading_order() -> None:
    pages = [PAGE, *((LESSON / "experiments" / name).read_text() for name in SIDE_PAGES)]
    numbers = [int(number) for page in pages for number in re.findall(r"^\*\*Exercise (\d+)\.\*\*", page, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {file.name for file in (LESSON / "experiments").glob("*.md")} == {*SIDE_PAGES, "README.md"}


def test_a_difference_within_the_spread_is_noise() -> None:
    def row(name: str, mean: float, std: float) -> dict[str, object]:
        return {"name": name, "samples_per_second": mean, "samples_per_second_std": std}

    fp32 = row("fp32", 100, 10)
    assert render_compute.change_of_speed(fp32, row("bf16", 119, 10)) == "fp32: noise"
    assert render_compute.change_of_speed(fp32, row("bf16", 121, 10)) == "fp32: 1.2x"
    assert render_compute.change_of_speed(fp32, row("fp16", 7, 1)) == "fp32: 0.07x"


def test_an_option_is_compared_with_the_row_above_and_a_format_with_float32() -> None:
    table = render_compute.short_ladder()
    assert re.search(r"^\| bf16 \|.*\| fp32: ", table, re.MULTILINE)
    assert re.search(r"^\| \+ channels_last \|.*\| bf16: ", table, re.MULTILINE)
    assert re.search(r"^\| \+ fused \|.*\| \+ channels_last: ", table, re.MULTILINE)


def test_runs_whose_ranges_overlap_are_not_called_different(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "each of them is slower and ends lower" in render.success_rate_spread()
    results = render.load("success_rate")
    fast = next(row for row in results["rows"] if row["name"] == "fast")
    fast["runs"][0]["process_seconds"] = 100.0
    monkeypatch.setattr(render, "load", lambda _: results)
    assert render.success_rate_spread().endswith("may be noise.")


def test_the_plot_of_the_gradients_shows_nearly_all_of_them() -> None:
    results = json.loads((render.RESULTS / f"{render.MACHINE}.json").read_text())["underflow"]
    begin, end = underflow.shown(results["exponents"], results["histogram"])
    shares = dict(zip(results["exponents"], results["histogram"], strict=True))
    assert sum(share for exponent, share in shares.items() if exponent < begin) < 1e-3
    assert begin < -25 < -14 < 16 < end < results["exponents"][-1] + 16
