"""The pages as they are written for the site: the same text, in the site's dialect, with links that lead somewhere."""

import re
import tomllib
from pathlib import Path

import pytest

from lab.site import (
    CONFIG,
    SETTINGS,
    as_site_page,
    navigation,
    remove_former,
    site_target,
    tracked_pages,
    with_site_links,
    write_pages,
)

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("site")
    return folder, write_pages(folder)


def test_every_page_is_there_but_no_hint_and_no_solution(written: tuple[Path, list[Path]]) -> None:
    folder, pages = written
    assert {Path("README.md"), Path("03_ddp/README.md"), Path("clinic/README.md")} <= set(pages)
    assert all((folder / page).is_file() for page in pages)
    assert not list(folder.rglob("hints.md")) and not list(folder.rglob("why.md"))


def test_what_makes_tables_is_not_shown(written: tuple[Path, list[Path]]) -> None:
    folder, pages = written
    for page in pages:
        assert "[[[cog\n" not in (folder / page).read_text()
        assert "import cog" not in (folder / page).read_text()


def test_every_link_leads_to_a_file(written: tuple[Path, list[Path]]) -> None:
    folder, pages = written
    for page in pages:
        text = re.sub(r"^```.*?^```", "", (folder / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s#`]+)", text):
            if "://" not in target:
                assert (folder / page.parent / target).is_file(), f"{page}: {target}"


def test_the_navigation_has_each_page_once(written: tuple[Path, list[Path]]) -> None:
    _, pages = written
    config = tomllib.loads(CONFIG % {"nav": navigation(pages)})

    def leaves(entries: list) -> list[str]:
        values = [value for entry in entries for value in entry.values()]
        return [leaf for value in values for leaf in (leaves(value) if isinstance(value, list) else [value])]

    listed = leaves(config["project"]["nav"])
    assert sorted(listed) == sorted(page.as_posix() for page in pages)
    assert listed[0] == "README.md"
    lessons = [page for page in listed if re.match(r"\d\d_\w+/README", page)]
    assert lessons == sorted(lessons)
    names = [Path(page).stem for page in listed if page.startswith("05_fully_sharded/experiments/")]
    assert names[:4] == ["README", "two_ranks", "memory", "tensor_parallel"]  # as that README lists them


def test_lists_and_folded_parts_are_in_the_dialect_of_the_site() -> None:
    page = "A text:\n- one\n- two,\n  continued\n\n<details><summary>Answer</summary>\n\n| a |\n| - |\n\n</details>\n"
    assert as_site_page(page) == (
        "A text:\n\n- one\n- two,\n    continued\n\n"
        '<details markdown="1">\n<summary>Answer</summary>\n\n| a |\n| - |\n\n</details>\n'
    )
    assert as_site_page("text\n```text\n- no list\n  here\n```\n") == "text\n```text\n- no list\n  here\n```\n"
    item = "- one:\n\n  ```text\n  - no item\n  ```\n\n  more\n"
    assert as_site_page(item) == "- one:\n\n    ```text\n    - no item\n    ```\n\n    more\n"


def test_code_is_shown_as_a_page_and_folders_by_their_readme() -> None:
    pages = set(tracked_pages())
    assert site_target(REPOSITORY / "03_ddp" / "train.py", pages) == "03_ddp/train.py.md"
    assert site_target(REPOSITORY / "clinic", pages) == "clinic/README.md"
    assert site_target(REPOSITORY / "workshop", pages) is None
    assert site_target(REPOSITORY / ".ci" / "run", pages) == "dot-ci/run.md"
    page = Path("03_ddp/README.md")
    text = "[its script](train.py#L7), [the package](../workshop), `[no](train.py)`, [far](https://pytorch.org)\n"
    found = with_site_links(page, text, pages)
    assert found == "[its script](../03_ddp/train.py.md), the package, `[no](train.py)`, [far](https://pytorch.org)\n"


def test_only_a_former_build_is_removed(tmp_path: Path) -> None:
    for folder in ("pages", "html", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").touch()
    remove_former(tmp_path)
    assert len(list(tmp_path.rglob("file"))) == 3  # no build was ever made here
    (tmp_path / SETTINGS).touch()
    remove_former(tmp_path)
    assert list(tmp_path.rglob("file")) == [tmp_path / "own" / "file"]
