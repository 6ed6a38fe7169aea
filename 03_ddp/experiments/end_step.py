"""What it costs a training step that the run survives: lesson 03's step with run.end_step and without, in turn.

torchrun --standalone --nproc-per-node 2 end_step.py
"""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from workshop.commandline import run_with_config
from workshop.config import DDPFlags
from workshop.distributed.agreement import slowest
from workshop.distributed.ddp import share_batch
from workshop.distributed.process_group import process_group
from workshop.errors import UserError
from workshop.loaders import build_loaders
from workshop.models import build_model
from workshop.run import Run
from workshop.step.optimizers import build_optimizer


@dataclass(frozen=True, kw_only=True)
class Config(DDPFlags):
    """The flags of lesson 03; by default no step is logged."""

    log_interval: int = 1_000_000
    """steps between two log lines"""
    block: int = 10
    """steps that are timed together, with ``end_step`` or without"""


def main(config: Config) -> None:
    """Train an epoch in blocks with and without ``end_step``; print the seconds of a step and their ratio."""
    with process_group() as ranks:
        config = share_batch(config, ranks)
        loader, _ = build_loaders(config, ranks)
        model = DistributedDataParallel(build_model(config).to(ranks.device))
        optimizer = build_optimizer(config, model)
        blocks: dict[bool, list[float]] = {True: [], False: []}
        with Run(config, ranks) as run:
            run.resume(model=model, optimizer=optimizer)
            run.loss_sum()
            started = time.perf_counter()
            for i, (inputs, targets) in enumerate(run.watch(loader), start=1):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs.to(ranks.device)), targets.to(ranks.device))
                loss.backward()
                optimizer.step()
                surviving = (i - 1) // config.block % 2 == 0
                if surviving:
                    run.end_step(loss)
                if i % config.block == 0:
                    if ranks.device.type == "cuda":
                        torch.cuda.synchronize()
                    blocks[surviving].append(slowest(time.perf_counter() - started, ranks.device) / config.block)
                    started = time.perf_counter()
            pairs = list(zip(blocks[True], blocks[False], strict=False))[2:]  # the first ones warm up
            if not pairs:
                raise UserError(f"{len(loader)} steps are too few: raise --limit_train, or lower --block")
            with_it, without = (statistics.mean(seconds) for seconds in zip(*pairs, strict=True))
            cost = with_it / without  # of means: only some blocks have an agreement of the ranks in them
            run.log(f"{len(pairs)} pairs of {config.block} steps on {ranks.world_size} rank(s):")
            run.log(f"a step with end_step takes {cost:.4f} times as long as one without")
            run.note("", end_step_cost=cost, step_seconds=without)
            run.log_epoch(1, 1.0, config.lr, 0.0, 0.0, None)


if __name__ == "__main__":
    run_with_config(main, Config)
