"""The pages as they are written for the site: the same text, without comments."""

import re
import tomllib
from pathlib import Path

import pytest

from lab.site import REPOSITORY, SETTINGS, navigation, pages, write_page

TEXT = """\
# A page

**Why.** Because.

Words of [the script](03_ddp/train.py), [the package](workshop) and <!-- figure: m/t a.b -->5<!-- end --> numbers.
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

With `<!-- table: m/t -->` as an example.

![A figure](figure.png)

<details><summary>Answer</summary>

Five.

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
    return tmp_path / "README.md"


def test_a_page_of_the_site_has_the_text_without_comments_and_the_files_that_it_links_to(page: Path) -> None:
    out = page.parent / "out"
    write_page(Path("README.md"), out)
    text = (out / "README.md").read_text()
    assert "[the script](03_ddp/train.py.md), [the package](workshop/files.md) and 5 numbers.\n| a |" in text
    assert re.findall("<!--.*", text) == ["<!-- table: m/t -->` as an example."]
    assert '<details markdown="1">\n<summary>Answer</summary>\n' in text
    assert "print()" in (out / "03_ddp" / "train.py.md").read_text()
    assert "- `log.py`" in (out / "workshop" / "files.md").read_text()
    assert (out / "figure.png").read_text() == "png"


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
