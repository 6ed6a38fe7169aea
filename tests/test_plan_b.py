"""Plan B: the recorded output stands for commands of the lessons' pages, and is complete."""

import re
from pathlib import Path

import pytest

from conftest import REPOSITORY
from lab.example_output import FOLDER

PAGE = (REPOSITORY / "instructors" / "plan_b.md").read_text()


def test_the_recorded_files_of_the_table_exist_and_none_is_there_twice() -> None:
    linked = re.findall(r"\]\(\.\./results/example_output/(\w+\.txt)\)", PAGE)
    assert len(linked) == len(set(linked)) > 10
    assert set(linked) <= {file.name for file in FOLDER.iterdir()}


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.stem)
def test_a_recorded_file_has_output_and_nothing_of_the_machine_that_made_it(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) > 2 and "Traceback" not in text
    assert str(REPOSITORY) not in text and "/tmp/" not in text and "/root" not in text


def test_a_page_that_is_named_has_something_folded_in_that_section() -> None:
    rows = re.findall(r"^\| \d\d, \[.*?\]\(\.\./(\S+?\.md)#([\w-]+)\) \| .*? \| page\b", PAGE, re.MULTILINE)
    assert len(rows) >= 10
    for file, anchor in rows:
        text = re.sub(r"^```.*?^```", "", (REPOSITORY / file).read_text(), flags=re.DOTALL | re.MULTILINE)
        sections = re.split(r"^#+ ", text, flags=re.MULTILINE)
        headings = [re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lower()).replace(" ", "-") for part in sections]
        section = sections[headings.index(anchor)]
        assert "<details>" in section, (file, anchor)
