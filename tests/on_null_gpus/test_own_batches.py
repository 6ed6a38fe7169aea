"""The lines of whole_batches.py on a GPU: no copy and no wait in a step; and in copies of the lessons' train.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["null_fixtures"]
REPOSITORY = Path(__file__).resolve().parents[2]
LOOP = """
import torch
from torch import nn
from whole_batches import batches, shift_and_noise

inputs, targets = torch.randn(320, 50).cuda(), torch.randint(10, (320,)).cuda()
model = nn.Linear(50, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(4):
    for x, y in batches(inputs, targets, 32, epoch, shift_and_noise):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
GENERAL = """    if config.loader != "map":
        return build_loader(config, split, ranks)  # shards, memory, device or dali: loaders.md compares them
"""
OWN = """    images, targets = (tensor[:256] for tensor in mnist.arrays(config.data_dir, split))
    sampler = DistributedBatchSampler(len(images), config.batch_size, shuffle=split == "train", seed=config.seed)
    return WholeBatches(images.float() / 255, targets, sampler)
"""


@pytest.mark.slow
def test_batches_that_are_cut_on_a_gpu_make_the_cpu_wait_once_an_epoch(null_gpus: None, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    words = [sys.executable, "-m", "nullgpu", "--beside_gpu", "--json", "found.json", "--report", "python", "loop.py"]
    paths = f"{REPOSITORY}:{REPOSITORY / '01_single_gpu/experiments'}"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHONPATH": paths}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    step = json.loads((tmp_path / "found.json").read_text())["report"]["ranks"][0]["step"]
    assert step["launches"] > 10
    assert step["waits"] <= 0.2 and step["copies_to_gpu"] <= 0.2


@pytest.mark.slow
def test_a_copy_of_the_script_takes_them_in_place_of_its_loader(
    user_environment: dict[str, str], tmp_path: Path
) -> None:
    script = (REPOSITORY / "01_single_gpu/train.py").read_text()
    assert script.count(GENERAL) == 1
    head = "from whole_batches import WholeBatches\n\nfrom workshop.datasets import mnist\n"
    own = script.replace(GENERAL, OWN).replace("from workshop.loaders import", f"{head}from workshop.loaders import")
    (tmp_path / "train.py").write_text(own)
    environment = user_environment | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / '01_single_gpu/experiments'}"}
    for flags in (["--epochs", "2"], ["--benchmark", "true", "--benchmark_seconds", "0.2"]):
        words = [sys.executable, "train.py", *flags]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.rglob("summary.json")
    losses = [epoch["val_loss"] for epoch in json.loads(summary.read_text())["epochs"]]
    assert losses[1] < losses[0] < 2.4


@pytest.mark.slow
def test_the_line_of_the_page_shares_the_samples_in_a_copy_of_lesson_03(
    user_environment: dict[str, str], tmp_path: Path
) -> None:
    """A reader took it literally: without rank and number, each rank trained and validated on everything."""
    page = (REPOSITORY / "01_single_gpu/own_script.md").read_text()
    line = re.search(r"`(WholeBatches\(inputs, .*?config\.seed\)\))`", page)
    assert line
    general = """    if config.loader != "map":
        return build_loader(config, split, ranks)  # shards, memory, device or dali, as in lesson 01
"""
    own = f"""    inputs, targets = (tensor[:256] for tensor in mnist.arrays(config.data_dir, split))
    inputs = inputs.float() / 255
    return {line[1]}
"""
    script = (REPOSITORY / "03_ddp/train.py").read_text()
    assert script.count(general) == 1
    head = "from whole_batches import WholeBatches\n\nfrom workshop.datasets import mnist\n"
    script = script.replace(general, own).replace("from workshop.loaders import", f"{head}from workshop.loaders import")
    (tmp_path / "train.py").write_text(script)
    environment = user_environment | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / '01_single_gpu/experiments'}"}
    losses = []
    for ranks in ("1", "2"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        words = [*torchrun, "train.py", "--global_batch_size", "32", "--epochs", "2", "--run_dir", f"on_{ranks}"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        summary = json.loads((tmp_path / f"on_{ranks}/summary.json").read_text())
        losses.append([epoch[which] for epoch in summary["epochs"] for which in ("train_loss", "val_loss")])
    assert losses[1] == pytest.approx(losses[0], rel=0.03), "dropout differs, shares would double the loss"
