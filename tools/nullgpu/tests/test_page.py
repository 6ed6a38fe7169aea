"""The pages of this project: they show what the commands print, name every file, and stand on their own."""

import re
from pathlib import Path

import pytest

import nullgpu as package
from conftest import Run
from nullgpu import build

PROJECT = Path(__file__).resolve().parents[1]
SOURCES = PROJECT / "src/nullgpu"
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]


def shape(text: str) -> str:
    """Return a text without its numbers, and without the spaces before them."""
    return re.sub(r" *-?\d[\d,.]*", " 0", text)


@pytest.mark.slow
@pytest.mark.skipif(not build.version().startswith("2.15"), reason="the page shows a report of PyTorch 2.15")
def test_the_report_on_the_page_is_the_one_that_is_printed(
    nullgpu: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    done = nullgpu("--report", "--snapshot", tmp_path / "memory.pickle", "python", "docs/example.py")
    shown = re.findall(r"```text\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[1]
    assert shape(done.stdout.replace(str(tmp_path / "memory.pickle"), "memory.pickle")) == shape(shown)
    counted = r"([\d,.]+)  (kernel launches|waits of the CPU|copies between)"  # not times, which are a machine's
    assert re.findall(counted, done.stdout) == re.findall(counted, shown)


def test_the_map_names_every_module() -> None:
    named = re.findall(r"^(\w+)  +\S", package.__doc__ or "", re.MULTILINE)
    found = {file.stem for file in SOURCES.glob("*.py")} - {"__init__", "__main__"}
    assert sorted(named) == sorted(found)


def test_the_page_names_every_file_in_c() -> None:
    page = PAGES[0].read_text()
    files = {file.name for file in (SOURCES / "native").iterdir()}
    headers_of = {f"{Path(name).stem}.h" for name in files if name.endswith(".cpp")}  # named with their .cpp
    assert [name for name in sorted(files - headers_of) if f"`{name}`" not in page] == ["without_formats.h"]


def test_links_stay_within_the_project() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            file = (page.parent / target).resolve()
            assert file.exists() and file.is_relative_to(PROJECT), f"{page.name}: {target}"


def test_nothing_here_needs_the_project_in_which_it_stands() -> None:
    for file in [*SOURCES.rglob("*.py"), *(PROJECT / "tests").glob("*.py"), *(SOURCES / "native").iterdir()]:
        text = file.read_text()
        assert not re.search(r"^\s*(from|import) (lab|workshop|clinic)\b", text, re.MULTILINE), file
        assert not re.search(r"\b0[1-5]_[a-z_]+/|lab/studies", text) or file == Path(__file__), file
