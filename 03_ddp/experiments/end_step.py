"""What the end of a training step costs: lesson 03's step with what lets a run survive and without it, in turn.

    torchrun --standalone --nproc-per-node 2 experiments/end_step.py

You should see a ratio close to 1: the ranks ask each other about once a second whether one of them was told to stop,
and in the steps between they only count.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from workshop.distributed.process_group import process_group
from workshop.step.optimizers import build_optimizer

from lab.flags import default_folder, make_output_folder
from lab.records import write_record
from workshop.commandline import run_with_config
from workshop.config import DDPFlags, TrainConfig
from workshop.distributed.all_reduce_counter import share_batch
from workshop.errors import UserError
from workshop.loaders import build_loaders
from workshop.models import build_model
from workshop.profiling.throughput import max_over_ranks
from workshop.run.position import Progress


@dataclass(frozen=True, kw_only=True)
class Config(TrainConfig, DDPFlags):
    """The flags of lesson 03, and of the measurement."""

    block: int = 10
    """steps that are timed together, with their end or without"""
    out: Path = field(default_factory=default_folder)
    """folder for end_step.json"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("block")


def main(config: Config) -> None:
    """Train an epoch in blocks, every second one without the end of its steps; print what the end costs."""
    with process_group() as (ranks, device):
        config = share_batch(config, ranks)
        if ranks.is_main:
            make_output_folder(config.out)
        loader, _ = build_loaders(config, device, ranks)
        model = DistributedDataParallel(build_model(config).to(device))
        optimizer = build_optimizer(config, model)
        progress = Progress(config, device, ranks, config.out / "checkpoint.pt", log=print)
        blocks: dict[bool, list[float]] = {True: [], False: []}
        with progress.stop:
            progress.begin_epoch(loader)
            started = time.perf_counter()
            for i, (inputs, targets) in enumerate(loader, start=1):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
                loss.backward()
                optimizer.step()
                ended = (i - 1) // config.block % 2 == 0
                if ended:
                    progress.count_step(loss)
                    progress.save_or_stop()
                if i % config.block == 0:
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    blocks[ended].append(max_over_ranks(time.perf_counter() - started, device) / config.block)
                    started = time.perf_counter()
        pairs = list(zip(blocks[True], blocks[False], strict=False))[2:]  # the first ones warm up
        if not pairs:
            raise UserError(f"{len(loader)} steps are too few: raise --limit_train, or lower --block")
        with_it, without = (statistics.mean(seconds) for seconds in zip(*pairs, strict=True))
        cost = with_it / without  # of means: only some blocks have an agreement of the ranks in them
        if ranks.is_main:
            print(f"{len(pairs)} pairs of {config.block} steps on {ranks.world_size} rank(s):")
            print(f"a step with its end takes {cost:.4f} times as long as one without")
            figures = {"end_step_cost": cost, "step_seconds": without, "world_size": ranks.world_size}
            write_record(config.out / "end_step.json", device, figures)


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
