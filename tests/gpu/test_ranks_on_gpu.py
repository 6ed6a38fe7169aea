"""Several ranks over NCCL, on a GPU each, or all on one: their results, and what happens when one of them fails."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY, SHARE_GPU, Train, run_to_end

CONFIGS = REPOSITORY / "configs"
DIGITS: list[object] = [
    "--limit_train",
    640,
    "--limit_val",
    128,
    "--num_workers",
    0,
    "--dropout",
    "false",
    "--epochs",
    2,
]
DIGITS += ["--global_batch_size", 64, "--optimizer", "sgd", "--lr", 0.01]
"""10 steps an epoch; Adam would hide gradients that are wrong by a factor"""
UNET: list[object] = [
    "--config",
    CONFIGS / "unet3d.yaml",
    "--config",
    CONFIGS / "unet3d_tiny.yaml",
    "--train_crops",
    256,
]
UNET += ["--val_crops", 32, "--loader", "device", "--epochs", 2]
GPT: list[object] = ["--width", 64, "--depth", 4, "--sequence_length", 64, "--limit_train", 128, "--limit_val", 32]
GPT += ["--global_batch_size", 16, "--num_workers", 0, "--epochs", 2]
FP32, BF16 = ["--precision", "fp32"], ["--precision", "bf16", "--fused", "true"]


@dataclass(frozen=True)
class Case:
    """A training that several ranks, one rank, and a CPU must do alike."""

    lesson: str
    flags: Sequence[object]
    difference: float
    """largest relative difference of the losses"""
    on_gpu: Sequence[object] = ()
    """further flags, but not of the CPU"""
    on_ranks: Sequence[object] = ()
    """further flags of several ranks"""
    ranks: int = 2


CASES = {
    "03": Case("03_ddp", DIGITS, 1e-2),  # PyTorch's default on a GPU: convolutions in TF32, which keeps three digits
    "04": Case("04_mixed_precision", [*UNET, *FP32], 1e-3),
    "04 in a graph": Case("04_mixed_precision", [*UNET, *FP32], 3e-2, [*BF16, "--cuda_graph", "true"]),
    "05": Case("05_fully_sharded", [*GPT, *FP32], 1e-3),
    "05 in bf16": Case("05_fully_sharded", [*GPT, *FP32], 3e-2, BF16),
    "05 with replicas": Case("05_fully_sharded", [*GPT, *FP32], 1e-3, (), ["--replicas", 2], ranks=4),
}
SECONDS = 12
"""timeout of the process group"""
MARGIN = 240
"""seconds for the start, for NCCL's watchdog, and for the end of all ranks, beside the timeout"""


@pytest.mark.parametrize("name", CASES)
def test_ranks_learn_what_one_rank_and_a_cpu_learn(name: str, train: Train, train_ranks: Train, on_cpu: Train) -> None:
    case = CASES[name]
    several = train_ranks(case.ranks, case.lesson, *case.flags, *case.on_gpu, *case.on_ranks)
    one = train(case.lesson, *case.flags, *case.on_gpu, run="one rank")
    assert several.losses == pytest.approx(one.losses, rel=case.difference)
    assert several.losses == pytest.approx(on_cpu(case.lesson, *case.flags).losses, rel=case.difference)
    assert several.summary["world_size"] == case.ranks


@pytest.mark.parametrize("name", ["03", "05"])
def test_ranks_stop_together_and_one_or_two_go_on(name: str, train: Train, train_ranks: Train) -> None:
    """Lesson 03 on one rank, lesson 05 on two: the batches are the same."""
    case = CASES[name]
    whole = train(case.lesson, *case.flags, run="whole")
    each_step = ["--log_interval", 1]  # the ranks also look for the signal then
    stopped = train_ranks(2, case.lesson, *case.flags, *each_step, fault=("all", 4, "SIGUSR1"))
    assert stopped.status == 0, stopped.stderr
    assert "stopped and saved in epoch 1" in stopped.stdout
    resume = [case.lesson, *case.flags, "--resume", "true"]
    resumed = train(*resume, run="ranks") if name == "03" else train_ranks(2, *resume)
    assert resumed.losses == pytest.approx(whole.losses, rel=case.difference)


def needs_gpu(device: torch.device) -> None:
    """Skip a test of ranks that share a GPU, or of NCCL."""
    if device.type == "cpu":
        pytest.skip("needs a GPU that ranks can share")


def with_timeout(seconds: float) -> dict[str, str]:
    """Return the environment in which NCCL on a null GPU waits for so many seconds; PyTorch's timeout is not for it."""
    if settings := os.environ.get("NULLGPU_SETTINGS"):
        return {"NULLGPU_SETTINGS": json.dumps(json.loads(settings) | {"timeout": seconds}, separators=(",", ":"))}
    return {}


def test_ranks_end_when_one_of_them_is_killed(train_ranks: Train, device: torch.device) -> None:
    needs_gpu(device)
    done = train_ranks(2, "03_ddp", *DIGITS, share=True, fault=(1, 3, "SIGKILL"))
    assert done.status == 128 + signal.SIGKILL
    assert done.stderr.splitlines()[-1] == "error: rank 1 was ended by SIGKILL"


def test_the_timeout_ends_ranks_of_which_one_does_not_answer(train_ranks: Train, device: torch.device) -> None:
    needs_gpu(device)
    flags = [*DIGITS, "--timeout_minutes", SECONDS / 60]
    limits = {"seconds": SECONDS + MARGIN, **with_timeout(SECONDS)}
    done = train_ranks(2, "03_ddp", *flags, share=True, fault=(1, 3, "SIGSTOP"), **limits)
    print(done.stderr)
    assert done.status != 0


MISMATCHED = f"""
import os, time
from datetime import timedelta
import torch, torch.distributed as dist
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", timeout=timedelta(seconds={SECONDS}), device_id=device)
rank = dist.get_rank()
dist.all_reduce(torch.ones(1 if rank else 2**24, device=device))
torch.cuda.synchronize()
print("rank", rank, "has its result", flush=True)
time.sleep(1000 * rank)
"""


def test_the_timeout_ends_ranks_that_reduce_tensors_of_other_sizes(tmp_path: Path, device: torch.device) -> None:
    """Rank 0 needs 64 MiB from rank 1, which sends 4 bytes. What NCCL says of it is not sure: `pytest -rP` shows it."""
    needs_gpu(device)
    script = tmp_path / "mismatched.py"
    script.write_text(MISMATCHED)
    words = [sys.executable, SHARE_GPU, "--ranks", 2, script]
    status, stdout, stderr = run_to_end(words, tmp_path, SECONDS + MARGIN, **with_timeout(SECONDS))
    print(stdout, stderr)
    assert status != 0
    assert "rank 0 has its result" not in stdout
