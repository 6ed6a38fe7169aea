"""Every lesson runs on null GPUs, with the losses of the CPU."""

import subprocess
from pathlib import Path

import pytest
from cases import CASES, REPOSITORY, Case, environment, expected, largest_difference, null_gpu, run_on_null_gpu

pytest_plugins = ["null_fixtures"]
pytestmark = pytest.mark.usefixtures("null_gpus")
LONG = [pytest.mark.thorough, pytest.mark.rehearsal]


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=[] if case.quick else LONG) for case in CASES])
def test_a_lesson_on_null_gpus_has_the_losses_of_the_cpu(case: Case, null_data: Path) -> None:
    run = run_on_null_gpu(case, null_data)
    assert run.status == 0, run.stderr[-3000:]
    assert run.report["step"]["launches"] + run.report["step"]["graph_launches"] > 0
    if case.values:  # otherwise all values are zeros
        other = expected(case, null_data)
        assert other.status == 0, other.stderr[-3000:]
        assert largest_difference(run.losses, other.losses) <= case.difference, (run.losses, other.losses)


@pytest.mark.slow
def test_more_ranks_than_gpus_get_the_lessons_own_message(null_data: Path, tmp_path: Path) -> None:
    """The environment is that of rank 0 of `torchrun --nproc-per-node 2`."""
    of_rank_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    script = [str(REPOSITORY / "03_ddp/train.py"), "--data_dir", str(null_data), "--run_dir", str(tmp_path)]
    command = null_gpu("--gpus", "1", "python", *script)
    env = environment(PYTHONPATH=str(REPOSITORY), **of_rank_0)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "torchrun started 2 ranks on this node, which has 1 GPU(s)" in done.stderr


@pytest.mark.slow
def test_weights_and_gradients_lie_alike_in_channels_last(null_data: Path, tmp_path: Path) -> None:
    """DDP warns otherwise, and copies: the first convolution has one input channel, where two layouts look alike."""
    flags = ["--channels_last", "true", "--precision", "bf16", "--limit_train", "640", "--limit_val", "64"]
    script = [str(REPOSITORY / "04_mixed_precision/train.py"), "--data_dir", str(null_data), "--run_dir", str(tmp_path)]
    done = subprocess.run(
        null_gpu("python", *script, *flags),
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "strides" not in done.stderr, done.stderr[-3000:]
