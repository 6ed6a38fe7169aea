"""The slides: which parts of the pages they show, and that everything fits on them."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lab import slides
from lab.slides import (
    HEIGHT,
    Selection,
    blocks_of,
    deck,
    fitted,
    free_height,
    height_of,
    self_contained,
    shown,
    wrapped,
)

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted(REPOSITORY.glob("0*/README.md"))
PAGE = """\
# Lesson 09: a page

**Why.** Because
of this.

**Questions**

- One?

| section | minutes | |
| --- | ---: | --- |
| [Run it](#run-it) | 5 | |

## Run it

Words that [explain](../README.md). Then type:

```bash
python train.py
```

It prints the following, and more.

```text
writing to runs
```

<details><summary>Details that no question asks for</summary>

Not shown.

</details>

<!-- [[[cog
import cog
]]] -->
| a |
| - |
| 1 |

*Measured somewhere.*
<!-- [[[end]]] -->

## Guess

**Your guess.** How long?
<details><summary>Answer</summary>

A second.

| s |
| - |
| 1 |

More than
one reason.
*Measured somewhere.*

</details>

<!-- slide -->

- a list that is shown

- - a list that is not

<!-- no slide -->

**Exercise 1.** Not on slides.

## Key points

- All of this.
"""


def selected(text: str) -> list[slides.Slide]:
    return Selection(REPOSITORY / "01_single_gpu" / "README.md").of(list(blocks_of(text)))


def test_what_of_a_page_is_on_slides() -> None:
    found = [(slide.title, [block.text for block in slide.blocks]) for slide in selected(PAGE)]
    assert found == [
        ("Lesson 09: a page", ["**Why.** Because\nof this."]),
        ("Lesson 09", ["**Questions**", "- One?"]),
        ("Run it", ["Then type:", "python train.py", "writing to runs"]),
        ("Guess", ["**Your guess.** How long?"]),
        ("Guess: answer", ["A second.", "| s |\n| - |\n| 1 |", "*Measured somewhere.*"]),
        ("Guess", ["- a list that is shown\n\n- - a list that is not".partition("\n\n")[0]]),
        ("Key points", ["- All of this."]),
    ]


def test_the_other_text_is_in_the_notes_of_its_section() -> None:
    notes = {slide.title: "\n".join(slide.notes) for slide in selected(PAGE)}
    assert "Words that [explain](../README.md)." in notes["Run it"] and "| a |" in notes["Run it"]
    assert "one reason" in "\n".join(selected(PAGE)[4].notes)
    assert "Details" not in str(notes) and "Not shown" not in str(notes)


def test_links_into_the_repository_are_text() -> None:
    assert shown("[a](b.md#c) and [d](https://e.org)") == "a and [d](https://e.org)"
    assert shown("`exercise.py start x` ([exercise page](exercises/x/README.md))") == "`exercise.py start x`"
    assert shown("one\ntwo") == "one two" and shown("- one\n  two\n- three") == "- one two\n- three"


def test_a_command_that_is_cut_is_still_one_command() -> None:
    command = "torchrun --standalone --nproc-per-node 2 train.py --limit_train 3200 --log_interval 10"
    lines = wrapped(command, 60)
    assert all(len(line) <= 62 for line in lines.splitlines()) and len(lines.splitlines()) == 2
    assert lines.replace(" \\\n   ", "") == command


def test_a_table_that_is_too_long_is_cut_between_rows_and_keeps_its_heading() -> None:
    rows = "\n".join(f"| {number} |" for number in range(60))
    slide = slides.Slide("Many", "page", [slides.Block("table", f"| n |\n| - |\n{rows}")])
    parts = fitted(slide)
    assert len(parts) > 1 and all(height_of(part.blocks[0], part.size) <= HEIGHT for part in parts)
    assert all(part.blocks[0].text.startswith("| n |\n| - |\n| ") for part in parts)
    shown_rows = [row for part in parts for row in part.blocks[0].text.splitlines()[2:]]
    assert "\n".join(shown_rows) == rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_question_and_every_figure_of_a_page_is_on_a_slide(page: Path) -> None:
    text, made = slides.COG.sub("", page.read_text()), deck(page)
    body = re.sub(r"^<!--\n.*?^-->$", "", made, flags=re.DOTALL | re.MULTILINE)  # without the notes
    questions = re.findall(
        r"^(?:\*Optional\.\*\s+)?\*\*(?:Your guess|Exercise \d+)\.\*\*[^`*\n\[]{5,30}", text, re.MULTILINE
    )
    assert questions and all(question.split("\n")[0] in body for question in questions)
    for image in re.findall(r"^!\[.*?\]\((\S+?)\)", text, re.MULTILINE):
        assert str((page.parent / image).resolve()) in body
    assert "[[[" not in made and "<details" not in body
    assert text.count("```mermaid") == body.count('class="mermaid"')


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_estimate_says_that_every_slide_fits(page: Path) -> None:
    for slide in Selection(page).of(list(blocks_of(page.read_text()))):
        for part in fitted(slide):
            assert part.size in slides.SIZES
            assert sum(height_of(block, part.size) for block in part.blocks) <= free_height(part, 28), part.title


MEASURE = """
<style>svg[data-marpit-svg] { display: block !important; content-visibility: visible !important }</style><script>
addEventListener("load", () => setTimeout(() => {
  document.title = JSON.stringify([...document.querySelectorAll("section")].map((slide) => {
    const box = slide.getBoundingClientRect(), scale = box.width / 1280;
    const parts = [...slide.querySelectorAll("*")].filter((part) => !part.closest("footer, svg svg"));
    const edge = (side, from) => Math.max(...parts.map((part) => (part.getBoundingClientRect()[side] - from) / scale));
    const texts = parts.filter((part) => part.textContent.trim() && !part.closest("small"));
    const lowest = Math.min(...texts.map((part) => parseFloat(getComputedStyle(part).fontSize)));
    const empty = [...slide.querySelectorAll("img")].filter((image) => !image.naturalWidth).length;
    const undrawn = [...slide.querySelectorAll(".mermaid")].filter((part) => !part.querySelector("svg")).length;
    return [slide.querySelector("h1, h2").textContent, edge("bottom", box.top), edge("right", box.left), lowest,
      empty + undrawn];
  }));
}, 3000));
</script>
"""


@pytest.mark.thorough
@pytest.mark.skipif(not (slides.TOOLS / ".bin" / "marp").exists(), reason="`make slides` installs Marp")
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_in_a_browser_everything_is_on_its_slide_and_large_enough(tmp_path: Path) -> None:
    made = subprocess.run(["make", "slides"], cwd=REPOSITORY, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    for page in PAGES:
        file = tmp_path / f"{page.parent.name}.html"
        text = (REPOSITORY / "build" / "slides" / file.name).read_text()
        assert not re.findall(r"(?:src|href)=\"(?!https?:|data:|#)[^\"]+\.(?:png|js|css)\"", text), "one file"
        before, end, after = text.rpartition("</body>")
        file.write_text(before + MEASURE + end + after)
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,720"]
        command = [*browser, "--virtual-time-budget=9000", "--dump-dom", file.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
        measured = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1]))
        assert len(measured) > 15
        for title, bottom, right, letters, missing in measured:
            assert bottom <= 675 and right <= 1225, (page.parent.name, title, bottom, right)
            assert letters >= 16, (page.parent.name, title, letters)
            assert not missing, (page.parent.name, title)


def test_figures_are_put_into_the_file() -> None:
    figure = next((REPOSITORY / "results").glob("*.png"))
    assert self_contained(f'<img src="{figure}">').startswith('<img src="data:image/png;base64,iVBOR')
