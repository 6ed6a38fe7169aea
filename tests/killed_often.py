"""Run by test_survive.py: a run is killed 50 times around its saves, each time at another moment, and resumed.

Every life of the run is a fork of this process, which has imported torch once, with the parts that an optimizer and
the run's logger need later. Prints, as JSON, how many steps each life lost, and whether the weights at the end are
those of a run that was never killed.
"""

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.tensorboard
from torch import nn

from workshop.config import TrainConfig
from workshop.loaders.memory import MemoryLoader
from workshop.loaders.sampler import DistributedBatchSampler
from workshop.run import Run

LIVES, INTERVAL, EPOCHS = 50, 3, 80
CPU = torch.device("cpu")


class Unchanged:
    def set_epoch(self, epoch: int) -> None: ...

    def __call__(self, images: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return images


def train(folder: Path, shown: mmap.mmap) -> None:
    """A lesson in small; in ``shown`` its parent sees the steps found in the checkpoint, and those taken."""
    torch.manual_seed(1)
    config = TrainConfig(run_dir=folder, epochs=EPOCHS, batch_size=4, save_interval=INTERVAL, resume=True)
    sampler = DistributedBatchSampler(40, config.batch_size, shuffle=True, seed=1)
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    loader = MemoryLoader(data, torch.arange(40) % 2, sampler, Unchanged(), pin_memory=False)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def state() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    with Run(config, CPU) as run:
        checkpoint = run.load_checkpoint(matching=state())
        if checkpoint is not None:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        for epoch in range(run.next_epoch, EPOCHS + 1):
            sampler.set_epoch(epoch)
            loss_sum = torch.tensor(run.partial_loss_sum)
            for images, labels in run.batches(loader):
                if shown[:4] == bytes(4):
                    shown[:4] = struct.pack("i", run.position.finished_steps + run.position.step + 1)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach() * len(labels)
                run.end_step(loss)
                if run.should_save():
                    run.save(state(), loss_sum)
                shown[4:] = struct.pack("i", run.position.finished_steps + run.position.step)
            run.log_epoch(epoch, 1.0, 1e-3, loss_sum.item(), 0.0, None)
            run.save(state())


def live(folder: Path, kill_after: int | None, seconds: float) -> tuple[int, int, int]:
    """Train in a child, killed ``seconds`` after it has taken ``kill_after`` steps; return its status and two numbers.

    They are the number of steps it began after, and of those it has surely taken.
    """
    shown = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as silent:
            os.dup2(silent.fileno(), 1)
        status = 1
        try:
            train(folder, shown)
            status = 0
        finally:
            os._exit(status)
    if kill_after is not None:
        while True:
            first, taken = struct.unpack("ii", shown[:])
            if first and taken >= first - 1 + kill_after:
                break
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.0001)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    first, taken = struct.unpack("ii", shown[:])
    return status, first - 1, taken


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    chance = random.Random(0)
    taken, lost, statuses = 0, [], []
    for _ in range(LIVES):
        status, first, taken_now = live(folder / "killed", chance.randint(1, 7), chance.uniform(0, 0.02))
        statuses.append(status)
        lost.append(taken - first)
        taken = taken_now
    statuses.append(live(folder / "killed", None, 0)[0])
    statuses.append(live(folder / "whole", None, 0)[0])
    states = [torch.load(folder / name / "checkpoint.pt", weights_only=True)["model"] for name in ("killed", "whole")]
    equal = all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    print(json.dumps({"statuses": statuses, "lost": lost, "equal": equal, "steps": taken}))


if __name__ == "__main__":
    main()
