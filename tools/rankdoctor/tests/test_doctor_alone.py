"""The project stands alone: no file of it leads to another folder of the repository that it lies in."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
OF_THE_COURSE = {"lab", "workshop", "clinic", "conftest", "sources", "data", "experiments"}
OWN_FOLDERS = ("src", "docs", "tests", "corpus")
FILES = sorted(
    file
    for file in (*PROJECT.glob("*"), *(file for folder in OWN_FOLDERS for file in (PROJECT / folder).rglob("*")))
    if file.suffix in (".py", ".md", ".toml", ".yml") and file != Path(__file__) and ".egg-info" not in str(file)
)
OTHER_FOLDERS = r"(?<![\w/.-])(?:\.\./)*(?:0[1-9]_\w+|clinic|lab|results|slurm|workshop)/\w"
"""the beginning of a path into the course"""
RENDERED = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
"""a table that the workshop writes from what it has measured, with the command of the study"""


def name_of(file: Path) -> str:
    return str(file.relative_to(PROJECT))


def text_of(file: Path) -> str:
    return RENDERED.sub("", file.read_text())


def imported_by(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}


@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".py"], ids=name_of)
def test_no_file_imports_something_of_the_course(file: Path) -> None:
    assert {name.partition(".")[0] for name in imported_by(file)} & OF_THE_COURSE == set()


@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".md"], ids=name_of)
def test_every_link_leads_to_a_file_of_the_project(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=[\"']([^\"']+)", text_of(file)):
        path, _, anchor = (target[0] or target[1]).partition("#")
        if re.match(r"\w+:", path):
            continue
        found = (file.parent / path).resolve() if path else file
        assert found.exists() and found.is_relative_to(PROJECT), path
        assert not anchor or anchor in anchors(found), f"{path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "corpus.toml"], ids=name_of)
def test_no_file_names_a_path_out_of_the_project(file: Path) -> None:
    """The corpus is left out, because it has paths of other repositories."""
    assert re.findall(OTHER_FOLDERS, text_of(file)) == []
    up = re.findall(r"(?:\.\./)+[\w./-]*", text_of(file))
    assert [path for path in up if not (file.parent / path).resolve().is_relative_to(PROJECT)] == []


def test_the_names_of_the_past_are_gone() -> None:
    """One name: of the distribution, of the import and of the command."""
    old = re.compile(r"\b_doctor\b|doctor/run\.py|-m doctor\b|\b_nullgpu\b|(?<!RANK)DOCTOR_SETTINGS|`doctor/")
    assert [name_of(file) for file in FILES if file.name != "CHANGELOG.md" and old.search(file.read_text())] == []


def test_the_license_is_in_the_folder() -> None:
    assert (PROJECT / "LICENSE").read_text().startswith("MIT License")


def test_the_action_installs_and_starts_the_command() -> None:
    """The steps are commands of bash; the action's own folder is where the project lies."""
    steps = re.findall(r"^ +run: (.*)$", (PROJECT / "action.yml").read_text(), re.MULTILINE)
    assert steps == [
        'python -m pip install --quiet "$RANKDOCTOR"',
        "python -m rankdoctor --format github $OPTIONS $COMMAND",
    ]
    for step in steps:
        subprocess.run(["bash", "-n", "-c", step], check=True)
