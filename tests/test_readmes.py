"""Every command of the READMEs runs as it stands, every link leads somewhere, every figure is from a results file."""

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
from lab import render
from sources import generate

READMES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted(REPOSITORY.glob("[!.]*/*.md")),
    *sorted(REPOSITORY.glob("*/experiments/*.md")),
    *sorted(REPOSITORY.glob("*/exercises/*/README.md")),
]
HANGING = "torchrun --standalone --nproc-per-node 2 exercise_collective_per_batch.py"
NOT_RUN_HERE = {
    "make test": "is what runs this test, as make test-all",
    "git clone": "needs the network",
    "conda ": "needs conda; test_environment.py checks the file",
    "python data/prepare.py mnist\n": "needs the network; test_data_mnist.py downloads from a local server",
    "tensorboard ": "serves until stopped; test_tensorboard_serves starts it",
    "python ../exercise.py check ": "says what is wrong; test_clinic.py asks the same grader",
    "python experiments/save_and_reshard.py": "takes minutes; see test_sharded_checkpoints.py",
    "python experiments/will_it_fit.py --check true": "takes minutes; test_will_it_fit.py runs it",
    "python experiments/ladder.py --quick true": "test_ladder_04.py runs it",
    "python experiments/bandwidth.py --quick true": "test_bandwidth.py runs it",
    "python experiments/sequential_reads.py": "test_sequential_reads.py runs it",
    "python experiments/limited_memory.py --quick true": "test_see_sharding.py runs it",
    "python experiments/step_timeline.py": "test_see_sharding.py runs it, with a smaller model",
    "python experiments/recompute.py": "test_see_sharding.py runs it, with a smaller model",
    "torchrun --standalone --nproc-per-node 4 experiments/tensor_parallel.py": "test_beyond.py runs it",
    "torchrun --standalone --nproc-per-node 2 experiments/pipeline.py": "test_beyond.py runs it, with less work",
    "torchrun --standalone --nproc-per-node 2 experiments/composition.py": "test_beyond.py runs all combinations",
    "torchrun --standalone --nproc-per-node 2 experiments/flight_recorder.py": "test_pages_03.py runs it",
    "torchrun --standalone --nproc-per-node 2 experiments/unused_parameters.py": "test_pages_03.py runs it",
    f"{HANGING} --limit_train 640 --limit_val 129": "hangs, which is its fault; test_clinic.py ends it",
}


PRINTED = {
    "01_single_gpu/exercises/item_every_step/README.md": r'^ +6 "name": "aten::item"$',
    "03_ddp/README.md": r"^gradients: 2 all-reduce\(s\) per step, 4\.80 MB\nepoch 1  train loss ",
    "04_mixed_precision/README.md": r"^fp16 .* inf +0\nbf16 +0\.1001 +256 ",
    # two updates, as there are fewer digits here, so that the last update is traced too
    "03_ddp/exercises/accumulation/README.md": r"^backward +6 .*\noptimizer +2 (.*\n)+all-reduces +12 .*\n\Z",
}
"""a pattern of what the commands of a page print, where the page says the numbers"""


def shown_log(readme: Path) -> list[str]:
    """Patterns of the lines of a run that a page shows; numbers may differ.

    Left out are the lines of single steps, which a run with few data does not print, and the diagnosis of a benchmark,
    which depends on the speed.
    """
    blocks = [token.content for token in tokens(readme) if token.type == "fence" and token.info.strip() == "text"]
    lines = [line for block in blocks if block.startswith("writing to ") for line in block.splitlines()]
    kept = [
        re.sub(r"(?<=writing to )\S+(?=,)", "PATH", line) for line in lines if not re.search("  step |^Too noisy", line)
    ]
    kept = [re.sub(r"  \.\.\.$", "  REST", line) for line in kept]  # speeds, which the page leaves out
    named = [re.escape(re.sub(r"\.\.\.|\d[\d.,]*", "NUMBER", line)) for line in kept]
    named = [re.sub(r"(\\ )+", " +", line) for line in named]  # numbers are aligned
    patterns = {"NUMBER": r"\d[\d.,]*", "PATH": r"\S+", "REST": r".*"}
    return [re.sub("NUMBER|PATH|REST", lambda name: patterns[name[0]], line) for line in named]


def tokens(readme: Path) -> list[Token]:
    return MarkdownIt().parse(readme.read_text())


def commands_of(readme: Path) -> list[str]:
    """The commands of all bash blocks of a README that can be run here."""
    blocks = [token.content for token in tokens(readme) if token.type == "fence" and token.info.strip() == "bash"]
    commands = "".join(blocks).replace("\\\n", "").splitlines(keepends=True)
    last_job = "$(ls -t *.lprof | head -n 1 | cut -d. -f1 | cut -d_ -f1)"
    return [c.strip().replace("<jobid>", last_job) for c in commands if not c.startswith(tuple(NOT_RUN_HERE))]


def copy_of_repository(folder: Path) -> Path:
    """A copy as a fresh clone would be, with the environment that runs the tests as its .venv."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in files.stdout.splitlines():
        if name.startswith("workshop/"):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(folder / name, (0, 0))  # older than the environment, so that make does not install into it
    quick_environment(folder / ".venv")
    (folder / "workshop").symlink_to(REPOSITORY / "workshop")  # else it were another clone's, for a script run in here
    return folder


def quick_environment(folder: Path) -> None:
    """The environment that runs the tests, in which Python starts at once."""
    (folder / "bin").mkdir(parents=True)
    for file in [*Path(sys.prefix).iterdir(), *Path(sys.prefix, "bin").iterdir()]:
        if file.name not in ("bin", "activate"):
            (folder / file.relative_to(sys.prefix)).symlink_to(file)
    activate = Path(sys.prefix, "bin", "activate").read_text()
    (folder / "bin" / "activate").write_text(activate.replace(sys.prefix, str(folder)))
    for command in quick_python.MODULES:
        (folder / "bin" / command).unlink()
        (folder / "bin" / command).symlink_to(quick_python.commands() / command)


def folder_of(readme: Path) -> Path:
    """The folder in which a page's commands are typed: the lesson's, for pages about its experiments and exercises."""
    lesson = next((folder for folder in readme.parents if folder.name[:1] == "0"), None)
    return lesson or readme.parent


def name_of(readme: Path) -> str:
    return str(readme.relative_to(REPOSITORY))


SAMPLES = {"03_ddp/README.md": 1300, "03_ddp/exercises/accumulation/README.md": 1300}
"""training samples of each data set, where a page needs more than `FEW`: one saves after 20 batches of 64"""
FEW = 560
"""as few as the other pages can do with: one needs a batch of 512"""


@pytest.fixture(scope="module")
def few_data(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with so many training samples of each data set, and 120 validation samples."""
    folders = {samples: tmp_path_factory.mktemp("few") for samples in {FEW, *SAMPLES.values()}}
    for samples, folder in folders.items():
        for name in ("mnist", "cifar10"):
            generate(name, folder, train_samples=samples, val_samples=120)
        generate("nbody", folder, cells=32)
    return folders


@pytest.fixture
def slurm_folder() -> Iterator[str]:
    """A folder for a cluster that a page starts; not in tmp_path, as the name of a socket may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        yield f"{folder}/state"


LESSON_PAGE = re.compile(r"\d\d_\w+/")
LESSON_README = re.compile(r"\d\d_\w+/README\.md$")


def pages_with_commands() -> list:
    """The pages as parameters; those beside the lessons are marked, because their commands take many minutes."""
    pages = [page for page in READMES if commands_of(page)]
    beside = {page for page in pages if LESSON_PAGE.match(name_of(page)) and not LESSON_README.match(name_of(page))}
    return [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.thorough] if page in beside else []) for page in pages
    ]


@pytest.mark.pages
@pytest.mark.parametrize("readme", pages_with_commands())
def test_commands_run_as_they_stand(
    readme: Path,
    tmp_path: Path,
    few_data: dict[int, Path],
    slurm_folder: str,
    user_environment: dict[str, str],
    request: pytest.FixtureRequest,
) -> None:
    commands = commands_of(readme)
    data = few_data[SAMPLES.get(name_of(readme), FEW)]
    environment = user_environment | {"WORKSHOP_DATA": str(data)}
    if any(re.match(r"([A-Z]+=\S+ )?(sbatch|srun|\S*local_cluster.sh)\b", command) for command in commands):
        environment |= request.getfixturevalue("slurm").environment | {"SBATCH_WAIT": "1"}
    copy = copy_of_repository(tmp_path / "workshop")
    path = f"{copy}/.venv/bin{os.pathsep}{environment['PATH']}"
    environment |= {"PATH": path, "PYTHONPATH": str(copy), "WORKSHOP_SLURM_DIR": slurm_folder}
    folder = copy / folder_of(readme).relative_to(REPOSITORY)
    shell = ["bash", "-x", "-euo", "pipefail", "-c", "\n".join(commands)]
    result = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
    logs = "".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in folder.glob("*.log"))
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}{logs}"
    assert re.search(PRINTED.get(name_of(readme), ""), result.stdout, re.MULTILINE), result.stdout
    for line in shown_log(readme):
        assert re.search(f"^{line}$", result.stdout, re.MULTILINE), f"the page shows {line!r}, but: {result.stdout}"


def test_the_log_that_a_page_shows_is_compared() -> None:
    patterns = shown_log(REPOSITORY / "01_single_gpu" / "README.md")
    assert patterns
    assert any(
        re.search(pattern, "epoch 1  train loss 2.3  val loss 2.3  accuracy 9.00%  0.1 s  10,234 samples/s")
        for pattern in patterns
    )


PROGRAMS = "python|torchrun|sbatch|srun|salloc|kill|pip|cp|cat|watch|ssh|sudo|source|module|nsys"
A_COMMAND = rf"(# .*\n)?({PROGRAMS}|[A-Z_]+=\S+) "


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_commands_that_are_not_run_say_why(readme: Path) -> None:
    for token in tokens(readme):
        if token.type == "fence" and token.info.strip() == "text" and re.match(A_COMMAND, token.content):
            assert "# not tested" in token.content, f"{name_of(readme)}: {token.content}"


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_links_lead_somewhere(readme: Path) -> None:
    for token in tokens(readme):
        for child in token.children or []:
            target = child.attrGet("href") or child.attrGet("src")
            if target and not re.match(r"\w+:", str(target)):
                path, _, anchor = str(target).partition("#")
                file = readme.parent / path if path else readme
                assert file.exists(), f"{name_of(readme)} links to {target}"
                assert not anchor or anchor in anchors(file), f"{name_of(readme)} links to {target}"


def anchors(readme: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found = tokens(readme)
    headings = [found[i + 1].content for i, token in enumerate(found) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tensorboard_serves(user_environment: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(
        command, env=user_environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            for _ in range(300):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
                        assert b"TensorBoard" in answer.read()
                        return
                except urllib.error.URLError:
                    assert server.poll() is None, "tensorboard has ended"
                    time.sleep(0.1)
            pytest.fail("no answer from tensorboard")
        finally:
            server.terminate()


LESSON_PAGES = sorted(REPOSITORY.glob("0*/README.md"))


@pytest.mark.parametrize("readme", LESSON_PAGES, ids=name_of)
def test_the_first_exercise_comes_early(readme: Path) -> None:
    page = readme.read_text()
    before, _, _ = page.lower().partition("exercise 1")
    assert len(before.split()) <= len(page.split()) / 3


@pytest.mark.parametrize("page", [*LESSON_PAGES, *(p for p in READMES if p.name != "README.md")], ids=name_of)
def test_tables_are_narrow_enough(page: Path) -> None:
    assert all(line.count("|") <= 9 for line in page.read_text().splitlines() if line.startswith("|")), "over 8 columns"


def test_every_lesson_has_its_three_files() -> None:
    for lesson in REPOSITORY.glob("0*_*"):
        assert {"README.md", "train.py", "job.slurm"} <= {file.name for file in lesson.iterdir()}


NOT_SHOWN = {
    ("03_ddp", "imports"): "they follow from the rest",
    ("03_ddp", "Config"): "`train.py --help` explains the flags, the page those that it uses",
    ("03_ddp", "benchmark"): "the same calls with other arguments",
    ("04_mixed_precision", "imports"): "they follow from the rest",
    ("04_mixed_precision", "Config"): "`train.py --help` explains the flags, the page those that it uses",
    ("04_mixed_precision", "make_loader"): "chooses between images and volumes",
    ("04_mixed_precision", "make_model"): "chooses between classifiers and the U-Net",
    ("04_mixed_precision", "benchmark"): "the same calls with other arguments",
    ("05_fully_sharded", "imports"): "they follow from the rest",
    ("05_fully_sharded", "Config"): "`train.py --help` explains the flags, the page those that it uses",
    ("05_fully_sharded", "benchmark"): "the same calls with other arguments",
}
"""definitions in the lessons' scripts that differ from the script before, but not on the page; with the reason"""
REMOVED = {"05_fully_sharded": {"autocast", "GraphedStep", "Step", "state_of"}}
"""definitions that are only in the script before; the page names each of them and says why it is gone"""


@pytest.mark.parametrize("lesson", sorted(render.BUILDS_ON))
def test_a_readme_shows_all_that_changed(lesson: str) -> None:
    page = (REPOSITORY / lesson / "README.md").read_text()
    changed = render.changed(lesson)
    for name, hunks in changed.items():
        missing = [hunk for hunk in hunks if page.count(hunk) != 1]
        assert bool(missing) == ((lesson, name) in NOT_SHOWN), (name, missing)
    assert {name for of, name in NOT_SHOWN if of == lesson} <= changed.keys()
    base = render.definitions(render.BUILDS_ON[lesson])
    kept = {render.RENAMED.get((lesson, name), name) for name in render.definitions(lesson)}
    removed = REMOVED.get(lesson, set())
    assert base.keys() - kept == removed, "what was deleted, no page would show"
    assert all(f"`{name}`" in page for name in removed)


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_figures_are_those_of_the_results_files(readme: Path) -> None:
    check = [sys.executable, "-m", "cogapp", "--check", "-I", ".", "-I", "03_ddp/experiments", str(readme)]
    result = subprocess.run(check, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, f"run `make docs`: {result.stdout}{result.stderr}"
