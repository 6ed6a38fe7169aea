"""What the end of a training step costs: lesson 03's step with what lets a run survive and without it, in turn.

    torchrun --standalone --nproc-per-node 2 experiments/end_step.py

You should see a ratio close to 1: about once a second the ranks exchange whether one of them got a signal to stop, and
in the steps between they only count.
"""

import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from lab.flags import default_folder, make_output_folder
from lab.launching import load_script
from lab.process_group import process_group
from lab.results import write_results
from workshop.commandline import run_with_config
from workshop.config import require_positive
from workshop.errors import UserError
from workshop.models import build_model
from workshop.profiling.throughput import max_over_ranks
from workshop.run.position import Position

lesson = load_script(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True, kw_only=True)
class EndStepConfig(lesson.Config):
    """The flags of lesson 03, and of the measurement."""

    block: int = 10
    """steps that are timed together, with their end or without"""
    out: Path = field(default_factory=default_folder)
    """folder for end_step.json"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "block")


def main(config: EndStepConfig) -> None:
    """Train an epoch in blocks, every second one without the end of its steps; print what the end costs."""
    with process_group() as (rank, world_size, device):
        config = replace(config, batch_size=lesson.batch_size_per_rank(config, world_size))
        if rank == 0:
            make_output_folder(config.out)
        loader = lesson.make_loader(config, "train", device, rank, world_size)
        model = build_model(config.model, config.dataset, dropout=config.dropout).to(device)
        ddp_model = DistributedDataParallel(model)
        optimizer = lesson.make_optimizer(config, model)
        position = Position(config, device, rank, world_size, config.out / "checkpoint.pt", log=print)
        blocks: dict[bool, list[float]] = {True: [], False: []}
        with position.stop:
            position.begin_epoch(loader)
            started = time.perf_counter()
            for i, (inputs, targets) in enumerate(loader, start=1):
                optimizer.zero_grad()
                loss = F.cross_entropy(ddp_model(inputs.to(device)), targets.to(device))
                loss.backward()
                optimizer.step()
                with_end = (i - 1) // config.block % 2 == 0
                if with_end:
                    position.count_step(loss)
                    if position.should_save():
                        position.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, None)
                if i % config.block == 0:
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    seconds = max_over_ranks(time.perf_counter() - started, device)
                    blocks[with_end].append(seconds / config.block)
                    started = time.perf_counter()
        pairs = list(zip(blocks[True], blocks[False], strict=False))[2:]  # the first ones warm up
        if not pairs:
            raise UserError(f"{len(loader)} steps are too few: raise --limit_train, or lower --block")
        with_it, without = (statistics.mean(seconds) for seconds in zip(*pairs, strict=True))
        cost = with_it / without  # of means, because only some blocks have a check of all ranks in them
        if rank == 0:
            print(f"{len(pairs)} pairs of {config.block} steps on {world_size} rank(s):")
            print(f"a step with its end takes {cost:.4f} times as long as one without")
            figures = {"end_step_cost": cost, "step_seconds": without, "world_size": world_size}
            write_results(config.out / "end_step.json", device, figures)


if __name__ == "__main__":
    run_with_config(main, EndStepConfig, __doc__)
