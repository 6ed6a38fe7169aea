"""Every command of the pages runs as it stands and prints what the page shows; every link leads somewhere."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import quick_python
from conftest import REPOSITORY
from sources import collect, generate

PAGES = sorted(
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    if (REPOSITORY / name).exists()
)
NOT_RUN_HERE = {
    "make test": "is what runs this test",
    "make preflight": "test_preflight.py runs it",
    "sbatch slurm/preflight.slurm": "test_preflight.py runs it",
    "git clone": "needs the network",
    "conda ": "needs conda; test_environment.py checks the file",
    "python data/prepare.py mnist\n": "needs the network; test_data_files.py downloads from a local server",
    "tensorboard ": "serves until stopped; test_tensorboard_serves starts it",
    "python experiments/will_it_fit.py --published true": "test_experiments_05.py runs it",
    "python ../exercise.py check ": "says what is wrong; test_clinic.py asks the same grader",
}
"""how commands begin that are not run, and why"""


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def tokens(page: Path) -> list[Token]:
    return MarkdownIt().parse(page.read_text())


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return [token.content for token in tokens(page) if token.type == "fence" and token.info.strip() == language]


def commands_of(page: Path) -> list[str]:
    """The commands of all bash blocks of a page that can be run here."""
    commands = "".join(blocks(page, "bash")).replace("\\\n", "").splitlines(keepends=True)
    last_job = "$(ls -t *.lprof | head -n 1 | cut -d. -f1)"
    return [
        command.rstrip("\n").replace("<jobid>", last_job)
        for command in commands
        if not command.startswith(tuple(NOT_RUN_HERE))
    ]


def shown_log(page: Path) -> list[str]:
    """Patterns of the lines of a run that a page shows: numbers, and with them MB or GB, may differ; "..." is any text.

    Left out are the lines of single steps, which a run with few data does not print, the diagnosis of a benchmark, and
    outputs that are shown with their speeds: their commands take minutes and are not run here.
    """
    files = (REPOSITORY / "results/example_output").glob("*_speeds.txt")
    with_speeds = {file.read_text().partition("\n")[2].strip() for file in files}
    shown = [block for block in blocks(page, "text") if re.match(r"(\d\d:\d\d:\d\d  )?writing to ", block)]
    lines = [line for block in shown if block.strip() not in with_speeds for line in block.splitlines()]
    kept = [line for line in lines if not re.search("  step |^Too noisy", line)]
    numbers = [re.sub(r"\.\.\.|\d[\d.,]*", "0", re.sub(r"(?<=writing to )\S+(?=,)", "0", line)) for line in kept]
    patterns = [re.sub("0", r".*", re.sub(r"(\\ )+", " +", re.escape(line))) for line in numbers]
    return [re.sub(r"\b[GM]B\b", "[GM]B", pattern) for pattern in patterns]


def copy_of_repository(folder: Path) -> Path:
    """A copy as a fresh clone would be; its .venv is the environment that runs the tests, in which Python is quick."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in files:
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    for name in (
        "pyproject.toml",
        "constraints.txt",
        *(str(file.relative_to(REPOSITORY)) for file in REPOSITORY.glob("tools/*/pyproject.toml")),
    ):
        os.utime(folder / name, (0, 0))  # older than the environment, so that make does not install into it
    (folder / ".venv/bin").mkdir(parents=True)
    for file in [*Path(sys.prefix).iterdir(), *Path(sys.prefix, "bin").iterdir()]:
        if file.name not in ("bin", "activate", "installed", *quick_python.MODULES):
            (folder / ".venv" / file.relative_to(sys.prefix)).symlink_to(file)
    for command_name in quick_python.MODULES:
        (folder / ".venv/bin" / command_name).symlink_to(quick_python.commands() / command_name)
    (folder / ".venv/installed").touch()
    activate = Path(sys.prefix, "bin", "activate").read_text()
    (folder / ".venv/bin/activate").write_text(activate.replace(sys.prefix, str(folder / ".venv")))
    return folder


def folder_of(page: Path) -> Path:
    """The folder in which a page's commands are typed: the lesson's, for pages about its experiments and exercises."""
    return next((folder for folder in page.parents if re.match(r"\d\d_", folder.name)), page.parent)


@pytest.fixture(scope="module")
def few_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with few samples: as many as the commands need that save after 20 steps of 64."""
    folder = tmp_path_factory.mktemp("few")
    for name in ("mnist", "cifar10"):
        generate(name, folder, train_samples=1300, val_samples=120)
    generate("nbody", folder, cells=32)
    collect(folder, None)
    return folder


@pytest.fixture
def slurm_folder() -> Iterator[str]:
    """A folder for a cluster that a page starts; not in tmp_path, as the name of a socket may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        yield f"{folder}/state"


def pages_with_commands() -> list:
    """The pages as parameters; the later lessons and all side pages are marked, because their commands take long."""
    in_test = re.compile(r"(01_\w+/|data/|)README\.md")
    pages = {name_of(page): page for page in PAGES if commands_of(page)}
    return [
        pytest.param(page, id=name, marks=[] if in_test.fullmatch(name) else [pytest.mark.thorough])
        for name, page in pages.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_commands())
def test_commands_run_as_they_stand(
    page: Path,
    tmp_path: Path,
    few_data: Path,
    slurm_folder: str,
    user_environment: dict[str, str],
    request: pytest.FixtureRequest,
) -> None:
    commands = commands_of(page)
    environment = user_environment | {"WORKSHOP_DATA": str(few_data), "WORKSHOP_SLURM_DIR": slurm_folder}
    if any(re.match(r"([A-Z]+=\S+ )?(sbatch|srun|\S*local_cluster.sh)\b", command) for command in commands):
        environment |= request.getfixturevalue("slurm").environment | {"SBATCH_WAIT": "1"}
    copy = copy_of_repository(tmp_path / "workshop")
    environment |= {"PATH": f"{copy}/.venv/bin{os.pathsep}{environment['PATH']}", "PYTHONPATH": str(copy)}
    folder = copy / folder_of(page).relative_to(REPOSITORY)
    shell = ["bash", "-x", "-euo", "pipefail", "-c", "\n".join(commands)]
    result = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
    logs = "".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in folder.glob("*.log"))
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}{logs}"
    for line in shown_log(page):
        assert re.search(f"^{line}$", result.stdout, re.MULTILINE), f"the page shows {line!r}, but: {result.stdout}"


A_COMMAND = (
    r"(# .*\n)?(python|torchrun|sbatch|srun|salloc|kill|pip|cp|cat|watch|ssh|sudo|source|module|nsys|[A-Z_]+=\S+) "
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_not_run_say_why(page: Path) -> None:
    for content in blocks(page, "text"):
        if re.match(A_COMMAND, content):
            assert re.search("# not (tested|run)", content), content


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for child in (child for token in tokens(page) for child in token.children or []):
        target = str(child.attrGet("href") or child.attrGet("src") or "")
        if target and not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{name_of(page)} links to {target}"
            assert not anchor or anchor in anchors(file), f"{name_of(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found = tokens(page)
    headings = [found[i + 1].content for i, token in enumerate(found) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tensorboard_serves(user_environment: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), "--port", str(port)]
    until = time.monotonic() + 300
    with subprocess.Popen(command, env=user_environment, stderr=subprocess.DEVNULL) as server:
        try:
            while time.monotonic() < until and server.poll() is None:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                        assert b"TensorBoard" in answer.read()
                        return
                except urllib.error.URLError:
                    time.sleep(0.1)
            pytest.fail("no answer from tensorboard")
        finally:
            server.terminate()
