"""What the pages show of runs that were made for them: a job's log and a trace."""

from pathlib import Path

import pytest

from conftest import REPOSITORY
from lab import example_figures, render_first

PAGE = (REPOSITORY / "01_single_gpu" / "README.md").read_text()


def test_the_log_is_shown_below_its_command() -> None:
    log = render_first.job_log()
    assert log in PAGE
    assert f"```bash\n{example_figures.COMMANDS['job'][1]}\n```\n" in PAGE.partition(log)[0]
    assert "samples/s" not in log


def test_every_line_of_the_log_is_explained() -> None:
    table = PAGE.partition("| line of the log |")[2]
    explained = [line.split("`")[1].split("...")[0] for line in table.splitlines()[2:] if line.startswith("| `")]
    lines = [line for line in render_first.job_log().splitlines()[1:-3] if "/python, Python" not in line]
    assert all(any(start in line for start in filter(None, explained)) for line in lines)


def test_the_log_of_another_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(example_figures.COMMANDS, "job", ("01_single_gpu", "sbatch job.slurm"))
    with pytest.raises(ValueError, match="the command has changed"):
        render_first.job_log()


def test_the_command_of_the_trace_is_on_its_page() -> None:
    page = (REPOSITORY / "01_single_gpu" / "profilers.md").read_text()
    assert example_figures.COMMANDS["trace"][1] in page.replace(" \\\n    ", " ")


def test_what_was_not_made_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(render_first, "ABOUT", tmp_path / "not there")
    assert "`python lab/example_figures.py trace`" in render_first.example_figure("trace", "x.png", "what one sees")
