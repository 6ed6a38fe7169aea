"""Pages show what is stored: tables, figures, code, outputs and exercises, each by one marker."""

import json
import re
from pathlib import Path

import pytest

from conftest import REPOSITORY
from lab import pages, results
from lab.outputs import FOLDER

TABLE = {
    "columns": ["`--loader`", "FULL", "of it"],
    "rows": [["`map`", [5402.1, 81.0], 0.69], ["`memory`", [17748.0, 80.0], None]],
    "formats": {"FULL": ",.0f", "of it": ".0%"},
    "unit": "samples/s",
    "spread": "3 trials",
    "machine": {"cpu": "AMD EPYC", "cpu_instructions": "AVX512", "cpus_available": 2},
    "versions": {"torch": "2.15.0"},
    "date": "2026-11-21",
    "command": "python speeds.py",
}
SCRIPT = '''"""A script."""

import os

# why it is ten
LIMIT = 10
"""of samples"""


@profile
def train(loader):
    for batch in loader:
        loss = step(
            batch,
        )
    return loss
'''


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A repository with one table and one script, except for the tests of the pages that are here."""
    if "_here" in request.node.name:
        return
    (tmp_path / "results" / "m").mkdir(parents=True)
    (tmp_path / "results" / "m" / "speeds.json").write_text(json.dumps(TABLE))
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "out.txt").write_text("$ python script.py\nepoch 1\n")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(pages, "REPOSITORY", tmp_path)


def shown(marker: str, before: str = "") -> str:
    """What stands between a marker and its end when the page has been rendered, twice."""
    text, problems = pages.rendered(f"{before}<!-- {marker} -->old<!-- end --> after", Path("page.md"))
    assert not problems
    assert pages.rendered(text, Path("page.md")) == (text, [])
    return text.removeprefix(f"{before}<!-- {marker} -->").removesuffix("<!-- end --> after")


def problems_of(text: str) -> str:
    """What is wrong with a page."""
    return "\n".join(pages.rendered(text, Path("page.md"))[1])


def test_a_table_has_its_numbers_and_one_line_of_where_they_are_from() -> None:
    assert shown("table: m/speeds").strip().splitlines() == [
        "| `--loader` | FULL | of it |",
        "| --- | ---: | ---: |",
        "| `map` | 5,402 ± 81 | 69% |",
        "| `memory` | 17,748 ± 80 |  |",
        "",
        "*Samples/s, 3 trials. 2 CPUs of an AMD EPYC (AVX512), torch 2.15.0, 2026-11-21: `python speeds.py`*",
    ]
    some = shown("table: m/speeds | columns: of it | rows: memory")
    assert some.strip().splitlines()[:3] == ["| `--loader` | of it |", "| --- | ---: |", "| `memory` |  |"]


def test_figures_stand_within_a_line() -> None:
    assert shown("figure: m/speeds map.FULL :,.0f", "It is ") == "5,402"
    assert shown('figure: value("m/speeds memory.FULL") / value("m/speeds map.FULL") :.1f', "| ") == "3.3"
    two = "a <!-- figure: m/speeds map.of it :.0% --><!-- end --> b <!-- figure: m/speeds map.FULL :.0f --><!-- end -->"
    assert re.sub("<!--.*?-->", "", pages.rendered(two, Path("page.md"))[0]) == "a 69% b 5402"
    assert "must not begin a line" in problems_of("- <!-- figure: m/speeds map.FULL :,.0f -->1<!-- end -->")


def test_a_page_names_figures_and_lists_assertions_at_its_end() -> None:
    text = "It gains <!-- figure: gain --><!-- end -->.\n\n<!-- figures\n%s\n-->\n"
    gain = 'gain = value("m/speeds memory.FULL") / value("m/speeds map.FULL") :.1f'
    assert "-->3.3<!--" in pages.rendered(text % gain, Path("page.md"))[0]
    wrong = f'{gain}\nunused = m/speeds map.FULL\nassert value("m/speeds map.FULL") > 9e9'
    assert "unused is shown nowhere" in problems_of(text % wrong)
    assert "not so: value" in problems_of(text % wrong)


def test_code_is_that_of_the_script() -> None:
    assert shown("code: script.py LIMIT") == '\n```python\n# why it is ten\nLIMIT = 10\n"""of samples"""\n```\n'
    assert shown("code: script.py train").startswith("\n```python\n@profile\ndef train(loader):")
    assert shown('code: script.py train from "loss =" ') == "\n```python\nloss = step(\n    batch,\n)\n```\n"
    assert shown('code: script.py train from "for batch" to "return"').count("\n") == 8
    assert shown("code: script.py", "  ").splitlines()[1] == "  ```python"


def test_an_output_is_shown_without_its_command() -> None:
    assert shown("output: out.txt") == "\n```text\nepoch 1\n```\n"
    (pages.REPOSITORY / "long.txt").write_text("$ python script.py\nepoch 1\nstep 7\nepoch 2\n")
    assert shown("output: long.txt | lines: epoch 2; step") == "\n```text\nstep 7\nepoch 2\n```\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- table: m/speed -->\n<!-- end -->", "no stored table m/speed"),
        ("<!-- table: m/speeds | rows: device -->\n<!-- end -->", "'device' is not in list"),
        ("<!-- code: script.py evaluate -->\n<!-- end -->", "no definition evaluate"),
        ('<!-- code: script.py train from "nothing" -->\n<!-- end -->', "'nothing'"),
        ("<!-- output: out.txt | lines: epoch; loss -->\n<!-- end -->", "no line contains 'loss'"),
        ("<!-- table: m/speeds -->\n\n<!-- output: out.txt -->\n<!-- end -->", "it has no <!-- end -->"),
        ('<!-- assert: value("m/speeds map.FULL") > value("m/speeds memory.FULL") -->', "not so: "),
        ('<!-- assert: value("m/speeds map.IO") > 1 -->', "0 cells"),
        ('<!-- assert: open("file") -->', "name 'open' is not defined"),
    ],
)
def test_what_is_wrong_is_named_with_its_page(text: str, problem: str) -> None:
    assert problem in problems_of(text)
    assert problems_of(text).startswith("page.md: ")


def test_what_holds_is_no_problem_and_examples_are_left_alone() -> None:
    assert problems_of('<!-- assert: low("m/speeds memory.FULL") > 3 * high("m/speeds map.FULL") -->') == ""
    assert problems_of("as in `<!-- table: no/table -->`, then `<!-- end -->`") == ""


PAGES = pages.pages()
TEXTS = {page: page.read_text() for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_page_here_is_up_to_date(page: Path) -> None:
    new, problems = pages.rendered(TEXTS[page], page)
    assert not problems
    assert new == TEXTS[page], "run `make docs`"


def test_everything_stored_is_shown_on_a_page_here() -> None:
    everything = "\n".join(TEXTS.values())
    for file in results.RESULTS.glob("*/*"):
        name = str(file.relative_to(results.RESULTS))
        assert f"{name.removesuffix('.json')}" in everything or file.is_dir(), f"no page shows {name}"


def test_an_output_here_stands_below_its_command() -> None:
    for page, text in TEXTS.items():
        for marker in re.finditer(r"<!-- output: (results/example_output/\S+)(?: \| .*?)? -->", text):
            command = (REPOSITORY / marker[1]).read_text().partition("\n")[0].removeprefix("$ ")
            if marker[1].endswith("_speeds.txt"):  # shown once more, beside the text that explains the speeds
                continue
            assert command in text[: marker.start()].replace("\\\n    ", ""), f"{page.name}: {command}"
    assert {file.suffix for file in FOLDER.iterdir()} == {".txt"}
