"""Every lesson runs on null GPUs, with the losses of the CPU."""

from pathlib import Path

import pytest
from cases import CASES, Case, expected, largest_difference, run_on_null_gpu
from possible import skip_if_impossible

skip_if_impossible()
pytest_plugins = ["null_fixtures"]
pytestmark = pytest.mark.usefixtures("null_library")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[] if case.quick else [pytest.mark.thorough]) for case in CASES]
)
def test_a_lesson_on_null_gpus_has_the_losses_of_the_cpu(case: Case, null_data: Path) -> None:
    run = run_on_null_gpu(case, null_data)
    assert run.status == 0, run.stderr[-3000:]
    assert run.report["step"]["launches"] + run.report["step"]["graph_launches"] > 0
    if case.values:  # otherwise all values are zeros
        other = expected(case, null_data)
        assert other.status == 0, other.stderr[-3000:]
        assert largest_difference(run.losses, other.losses) <= case.difference, (run.losses, other.losses)
