"""How much does the CPU do for an update of GPT-2's small size: this lesson's script beside nanoGPT?

    git clone https://github.com/karpathy/nanoGPT
    nullgpu --gb 100 python experiments/launches_beside_nanogpt.py --nanogpt nanoGPT     # on an idle machine: minutes
    python experiments/launches_beside_nanogpt.py --nanogpt nanoGPT                      # on a GPU, tokens/s too

All train in one process, in turns: nanoGPT's model as its bench.py does it; the same with clipping and DDP, as its
train.py does it under torchrun; and this lesson's `train_step`. Batches are 12 sequences of 1,024 tokens, in bf16 with
a fused AdamW. A GPU that computes nothing shows what the CPU needs: a GPU that is faster than this waits for it.
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import ProfilerActivity, profile

from lab import results
from lab.flags import Parser
from lab.launching import load_script
from lab.timing import alternately, median_range
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import REPOSITORY
from workshop.ranks import Ranks

LESSON: Any = load_script(REPOSITORY / "05_fully_sharded")
BATCH, TOKENS, VOCABULARY = 12, 1024, 50_304
STEPS = 10
"""that are timed in a round, after two others"""

Step = Callable[[], object]


def steps_of_nanogpt(inputs: torch.Tensor, targets: torch.Tensor, *, as_train: bool, compiled: bool) -> Step:
    """Return an update of nanoGPT: as its bench.py makes it or, with clipping and DDP, as its train.py."""
    from model import GPT, GPTConfig  # nanoGPT's

    config = GPTConfig(block_size=TOKENS, n_layer=12, n_head=12, n_embd=768, dropout=0.0, bias=False)
    model: nn.Module = GPT(config).to(inputs.device)
    how = {"weight_decay": 1e-2, "learning_rate": 1e-4, "betas": (0.9, 0.95), "device_type": "cuda"}
    optimizer = model.configure_optimizers(**how)  # type: ignore[operator]
    model = torch.compile(model) if compiled else model  # type: ignore[assignment]
    model = DistributedDataParallel(model) if as_train else model
    autocast: AbstractContextManager = torch.autocast("cuda", torch.bfloat16)

    def step() -> None:
        with autocast:
            _, loss = model(inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if as_train:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def steps_of_lesson(ranks: Ranks, inputs: torch.Tensor, targets: torch.Tensor, **flags: object) -> Step:
    """Return an update as the lesson's script makes it."""
    size = {"model": "gpt2_124m", "batch_size": BATCH, "sequence_length": TOKENS}
    config = LESSON.Config(**size, precision="bf16", weight_decay=0.01, **flags)
    model = LESSON.distribute_model(config, ranks)
    loss = LESSON.compile_parts(model) if config.compile != "off" else LESSON.sum_of_losses
    optimizer = LESSON.make_optimizer(config, model)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    scaler = torch.amp.GradScaler(enabled=False)
    training = LESSON.Training(model, optimizer, scheduler, scaler, ranks, None, loss)
    model.train()

    def step() -> None:
        LESSON.train_step(config, training, inputs, targets)
        scheduler.step()

    return step


def timed(step: Step) -> tuple[float, float]:
    """Return the milliseconds that the CPU needs for an update, and those of an update when the GPU has ended it."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    began, launched = time.perf_counter(), []
    for _ in range(STEPS):
        before = time.perf_counter()
        step()
        launched.append(time.perf_counter() - before)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(launched), 1e3 * (time.perf_counter() - began) / STEPS


def launches_of(step: Step) -> int:
    """Return the number of kernels that an update launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    on_gpu = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith("Mem") for event in on_gpu)


def main() -> None:
    """Time all in turns, and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--nanogpt", type=Path, required=True, help="folder of a clone of nanoGPT")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    if not (arguments.nanogpt / "model.py").exists():
        raise UserError(f"no model.py in {arguments.nanogpt}: git clone https://github.com/karpathy/nanoGPT")
    if not torch.cuda.is_available():
        raise UserError("there is no GPU: write nullgpu --gb 100 before python")
    sys.path.insert(0, str(arguments.nanogpt.resolve()))
    ranks = LESSON.join_ranks(timeout_minutes=10)
    inputs, targets = torch.randint(VOCABULARY, (2, BATCH, TOKENS), device=ranks.device)
    theirs, ours = partial(steps_of_nanogpt, inputs, targets), partial(steps_of_lesson, ranks, inputs, targets)
    steps = {
        "nanoGPT, as in bench.py": theirs(as_train=False, compiled=False),
        "nanoGPT, as in train.py": theirs(as_train=True, compiled=False),
        "`--shard none`": ours(shard="none"),
        "`--shard none --chunked_loss true`": ours(shard="none", chunked_loss=True),
        "`--shard root`": ours(shard="root"),
        "`--shard blocks`": ours(shard="blocks"),
    }
    if not arguments.eager:
        steps |= {
            "nanoGPT, as in bench.py, compiled": theirs(as_train=False, compiled=True),
            "nanoGPT, as in train.py, compiled": theirs(as_train=True, compiled=True),
            "`--shard none --compile default`": ours(shard="none", compile="default"),
            "`--shard blocks --compile default`": ours(shard="blocks", compile="default"),
        }
    memory = {name: peak_gb(step) for name, step in steps.items()}
    launches = {name: launches_of(step) for name, step in steps.items()}
    found = alternately({name: partial(timed, step) for name, step in steps.items()}, arguments.rounds)
    rows: list[list[results.Cell]] = []
    for name, rounds in found.items():
        host = [each for each, _ in rounds]
        base = [each for each, _ in found["nanoGPT, as in train.py" + ", compiled" * ("compile" in name)]]
        ratios = [mine / other for mine, other in zip(host, base, strict=True)]
        speed = [1e3 * BATCH * TOKENS / whole for _, whole in rounds]
        row = [name, launches[name], median_range(host), median_range(ratios), median_range(speed), memory[name]]
        rows.append(row)
    device = torch.cuda.get_device_name()
    results.store(
        "launches_beside_nanogpt",
        title=f"An update of a GPT-2 of 124 million weights, 12 x 1,024 tokens, bf16, one process, {device}",
        columns=["", "launches", "ms of the CPU", "ratio", "tokens/s", "peak GB"],
        rows=rows,
        formats={"ms of the CPU": ".1f", "ratio": ".2f", "tokens/s": ",.0f", "peak GB": ".1f"},
        spread=f"median (lowest to highest) of {arguments.rounds} rounds; ratio: to the CPU's time of nanoGPT "
        "as in train.py in the same round, eager or compiled; on a null GPU, tokens/s are those of an infinitely fast GPU",
        command="nullgpu --gb 100 python experiments/launches_beside_nanogpt.py --nanogpt nanoGPT",
    )
    torch.distributed.destroy_process_group()


def peak_gb(step: Step) -> float:
    """Make the first updates; return the most memory in GB that an update adds to what is there before it."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


if __name__ == "__main__":
    run_reporting_user_errors(main)
