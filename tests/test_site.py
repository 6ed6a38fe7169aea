"""The pages as they are written for the site and for the slides: the same text, without comments, in another form."""

import re
import tomllib
from pathlib import Path

import pytest

from lab import notebooks, slides
from lab.site import REPOSITORY, SETTINGS, navigation, pages, write_page

KINDS = ("code", "markdown")
TEXT = """\
# A page

**Why.** Because.

<!-- slide -->
Words of [the script](03_ddp/train.py), [the package](workshop) and <!-- figure: m/t a.b -->5<!-- end --> numbers.
<!-- slide -->
<!-- table: m/t -->
| a |
| - |
| 1 |

*Measured somewhere.*
<!-- end -->

<!-- assert: value("m/t a.b") > 4 and
     value("m/t a.b") < 6 -->

## A section

```bash
# not a heading
```

Not marked, with `<!-- slide -->` as an example.

<!-- slide -->
![A figure](figure.png)

<details><summary>Answer</summary>

Not marked.

</details>
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one page, a script and a figure."""
    for name, text in {
        "README.md": TEXT,
        "03_ddp/train.py": "print()\n",
        "workshop/log.py": "",
        "figure.png": "png",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("lab.site.REPOSITORY", tmp_path)
    monkeypatch.setattr(slides, "REPOSITORY", tmp_path)
    return tmp_path / "README.md"


def test_a_page_of_the_site_has_the_text_without_comments_and_the_files_that_it_links_to(page: Path) -> None:
    out = page.parent / "out"
    write_page(Path("README.md"), out)
    text = (out / "README.md").read_text()
    assert "[the script](03_ddp/train.py.md), [the package](workshop/files.md) and 5 numbers.\n| a |" in text
    assert re.findall("<!--.*", text) == ["<!-- slide -->` as an example."]
    assert '<details markdown="1">\n<summary>Answer</summary>\n' in text
    assert "print()" in (out / "03_ddp" / "train.py.md").read_text()
    assert "- `log.py`" in (out / "workshop" / "files.md").read_text()
    assert (out / "figure.png").read_text() == "png"


def test_the_slides_have_what_is_marked_below_its_heading(page: Path) -> None:
    made = slides.deck(page).split("---\n", 2)[2]  # after Marp's settings
    shown = made.split("\n\n---\n\n")
    assert [slide.strip().splitlines()[0] for slide in shown] == ["# A page", "# A page", "## A section"]
    assert shown[1].strip() == "# A page\n\nWords of the script, the package and 5 numbers.\n\n| a |\n| - |\n| 1 |"
    assert "![A figure](data:image/png;base64," in shown[2]
    assert "Not marked" not in made and "Measured" not in made


def test_every_page_is_on_the_site_once_but_no_hint_and_no_solution() -> None:
    every = pages()
    assert {Path("README.md"), Path("03_ddp/README.md"), Path("docs/glossary.md")} <= set(every)
    assert not {page.name for page in every} & {"hints.md", "why.md"}
    nav = tomllib.loads(SETTINGS % navigation(every))["project"]["nav"]
    listed = [page for entry in nav for page in ([entry] if isinstance(entry, str) else next(iter(entry.values())))]
    assert sorted(listed) == sorted(page.as_posix() for page in every)
    assert listed[:2] == ["README.md", "01_single_gpu/README.md"]


def test_items_of_lists_have_no_second_paragraph_and_no_code_which_the_site_would_show_elsewhere() -> None:
    texts = {page: (REPOSITORY / page).read_text() for page in pages()}
    texts = {page: re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE) for page, text in texts.items()}
    assert [page for page, text in texts.items() if re.search(r"^$\n^ {2,3}\S|^ +```", text, re.MULTILINE)] == []


@pytest.mark.parametrize("page", sorted(REPOSITORY.glob("0*/README.md")), ids=lambda page: page.parent.name)
def test_each_lesson_has_slides(page: Path) -> None:
    deck = slides.deck(page)
    assert deck.count("\n---\n") > 3
    assert "<!--" not in deck and "<details" not in deck


@pytest.mark.parametrize("page", sorted(REPOSITORY.glob("0*/README.md")), ids=lambda page: page.parent.name)
def test_a_notebook_has_the_text_and_the_commands_of_its_page(page: Path) -> None:
    made = notebooks.notebook(page, "https://github.com/OWNER/NAME")
    sources = {kind: ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == kind] for kind in KINDS}
    commands = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S)
    cells = [source.removeprefix("%%bash\n") + "\n" for source in sources["code"][1:]]
    assert len(cells) >= 1 and set(cells) <= set(commands)
    left_out = [command for command in commands if command not in cells]
    assert all(command in "\n".join(sources["markdown"]) for command in left_out)
    assert not [command for command in left_out if "train.py" in command and "sbatch" not in command]
    shown = "\n".join(sources["markdown"])
    assert "## Key points" in shown and "<!--" not in shown
    for target in re.findall(r"\]\(https://github.com/OWNER/NAME/(?:raw|blob)/main/([^)#]+)", shown):
        assert (REPOSITORY / target).exists(), target
    assert not re.findall(r"\]\(\.\.?/", shown)
