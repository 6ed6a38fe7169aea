"""The reports name the thing that limits a loop, and what to change first, in loops whose limit is known."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Run

LOOP = """
import time, torch
def train(model, batches, dtype=torch.float32):
    model = model.cuda().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches:
        optimizer.zero_grad()
        model(x.cuda(non_blocking=True).to(dtype)).sum().backward()
        optimizer.step()
Linear, Sequential = torch.nn.Linear, torch.nn.Sequential
"""
SLOW_LOADER = """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.zeros(64)
train(Linear(64, 64), torch.utils.data.DataLoader(Slow(), 4))
"""
TINY_KERNELS = """
train(Sequential(*[Linear(16, 16) for _ in range(60)]), [torch.zeros(4, 16, device="cuda")] * 14)
"""
LARGE_PRODUCTS = """
x = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
train(Sequential(*[Linear(8192, 8192, bias=False) for _ in range(4)]), [x] * 10, torch.bfloat16)
"""


def ran(nullgpu: Run, folder: Path, text: str, *options: object) -> tuple[str, dict[str, Any]]:
    """Run a script; return what was printed, and the figures of its first rank."""
    script, figures = folder / "train.py", folder / "figures.json"
    script.write_text(text)
    snapshot = ("--snapshot", folder / "memory.pickle")
    done = nullgpu(*options, *snapshot, "--json", figures, "python", script)
    assert done.status == 0, done.stderr
    found = json.loads(figures.read_text())
    return done.stdout, found["clock" if "--clock" in options else "report"]["ranks"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "limit", "advice"),
    [
        (SLOW_LOADER, "data", "the loader limits it"),
        (TINY_KERNELS, "the host", "it is launch-bound"),
        (LARGE_PRODUCTS, "", ""),
    ],
    ids=["a slow loader", "tiny kernels", "large products"],
)
def test_the_limit_is_named(nullgpu: Run, tmp_path: Path, loop: str, limit: str, advice: str) -> None:
    said, rank = ran(nullgpu, tmp_path, LOOP + loop, "--clock", "a100")
    if limit:
        assert max(rank["waits"], key=rank["waits"].get) == limit
        assert f"first thing to change: {advice}" in said
    else:
        assert rank["busy"] > 0.9 and not rank["advice"], "the GPU itself is the limit"


def test_memory_in_pieces_is_named_with_its_remedy(nullgpu: Run, tmp_path: Path) -> None:
    growing = "import torch\nfor length in range(100, 300, 10):\n    torch.zeros(length << 18, device='cuda').add_(1)\n"
    said, rank = ran(nullgpu, tmp_path, growing, "--report")
    assert rank["reserved"] > 5 * rank["peak"]
    assert "times as much as was in use" in said
    assert "expandable_segments:True, or batches that are padded to a few lengths" in rank["advice"]


@pytest.mark.slow
def test_waits_of_ddps_timers_are_not_the_scripts(nullgpu: Run, tmp_path: Path) -> None:
    text = """
import torch
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(15):
    optimizer.zero_grad()
    loss = model(torch.zeros(4, 64, device="cuda")).sum()
    loss.backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""
    said, rank = ran(nullgpu, tmp_path, text, "--world", 2, "--report")
    waits = [row for row in rank["lines"] if row[0] == "wait"]
    assert waits and not any("train.py" in place for _, _, place, _ in waits)
    assert "without a wait" in said


@pytest.mark.slow
def test_a_checkpoint_in_each_epoch_is_advised_as_one(nullgpu: Run, tmp_path: Path) -> None:
    save = f"    torch.save(model.state_dict(), {str(tmp_path / 'model.pt')!r})\n"
    loop = LOOP.replace("        optimizer.step()\n", "        optimizer.step()\n    " + save)
    _, rank = ran(
        nullgpu, tmp_path, loop + "train(Linear(64, 64), [torch.zeros(4, 64, device='cuda')] * 6)", "--report"
    )
    assert rank["advice"].startswith("the checkpoint at") and "async_save" in rank["advice"]


@pytest.mark.slow
def test_a_tensor_that_a_line_makes_is_not_called_a_loaders(nullgpu: Run, tmp_path: Path) -> None:
    made = "        weight = torch.tensor([0.5], device='cuda')\n"
    loop = LOOP.replace("        optimizer.step()\n", made + "        optimizer.step()\n")
    _, rank = ran(
        nullgpu, tmp_path, loop + "train(Linear(64, 64), [torch.zeros(4, 64, device='cuda')] * 6)", "--report"
    )
    assert rank["advice"].startswith("the copy at") and "make it on the GPU" in rank["advice"]


def test_speeds_of_a_run_without_a_clock_are_marked(nullgpu: Run) -> None:
    assert "nothing was computed" in nullgpu("--world", 8, "python", "-c", "print('tokens/s')").stderr
