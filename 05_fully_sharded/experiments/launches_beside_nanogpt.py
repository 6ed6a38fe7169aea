"""How much does the CPU do for an update of GPT-2's small size: this lesson's script beside nanoGPT?

    git clone https://github.com/karpathy/nanoGPT
    python experiments/launches_beside_nanogpt.py --nanogpt nanoGPT      # two minutes on an idle machine

On a GPU it measures tokens/s too; without one it runs on a null GPU (tools/nullgpu), which computes nothing.
The models train in one process, in turns: nanoGPT's as its bench.py does it; the same with clipping and DDP, as its
train.py does it under torchrun; and this lesson's with `train_step`. Batches are 12 sequences of 1,024 tokens, in bf16
with a fused AdamW. What the CPU needs for an update is a lower limit of its time: a GPU that is faster waits for it.
"""

import gc
import json
import statistics
import subprocess
import sys
import tempfile
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
from lab.simulated import null_gpu
from lab.timing import alternately, median_range
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import REPOSITORY
from workshop.ranks import Ranks

LESSON: Any = load_script(REPOSITORY / "05_fully_sharded")
BATCH, TOKENS, VOCABULARY = 12, 1024, 50_304
STEPS = 10
"""that are timed in a round, after two others"""
CHUNKED = hasattr(nn.functional, "linear_cross_entropy")
"""whether this version of PyTorch has the loss in parts"""

Step = Callable[[], object]


def steps_of_nanogpt(inputs: torch.Tensor, targets: torch.Tensor, *, as_train: bool, compiled: bool) -> Step:
    """Return an update of nanoGPT: as its bench.py makes it or, with clipping and DDP, as its train.py."""
    from model import GPT, GPTConfig  # nanoGPT's

    config = GPTConfig(block_size=TOKENS, n_layer=12, n_head=12, n_embd=768, dropout=0.0, bias=False)
    model: nn.Module = GPT(config).to(inputs.device)
    how = {"weight_decay": 1e-2, "learning_rate": 1e-4, "betas": (0.9, 0.95), "device_type": "cuda"}
    optimizer = model.configure_optimizers(**how)
    model = torch.compile(model) if compiled else model
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


def measure(nanogpt: Path, rounds: int, compiled: bool) -> list[list[results.Cell]]:
    """Time all in turns on the GPU, which may be a null GPU; return the rows of the table."""
    sys.path.insert(0, str(nanogpt))
    ranks = LESSON.join_ranks(timeout_minutes=10)
    inputs, targets = torch.randint(VOCABULARY, (2, BATCH, TOKENS), device=ranks.device)
    theirs, ours = partial(steps_of_nanogpt, inputs, targets), partial(steps_of_lesson, ranks, inputs, targets)
    steps = {
        "nanoGPT, as in bench.py": theirs(as_train=False, compiled=False),
        "nanoGPT, as in train.py": theirs(as_train=True, compiled=False),
        "`--shard none`": ours(shard="none"),
        **({"`--shard none --chunked_loss true`": ours(shard="none", chunked_loss=True)} if CHUNKED else {}),
        "`--shard root`": ours(shard="root"),
        "`--shard blocks`": ours(shard="blocks"),
    }
    if compiled:
        steps |= {
            "nanoGPT, as in bench.py, compiled": theirs(as_train=False, compiled=True),
            "nanoGPT, as in train.py, compiled": theirs(as_train=True, compiled=True),
            "`--shard none --compile default`": ours(shard="none", compile="default"),
            "`--shard blocks --compile default`": ours(shard="blocks", compile="default"),
        }
    memory = {name: peak_gb(step) for name, step in steps.items()}
    launches = {name: launches_of(step) for name, step in steps.items()}
    gc.collect()
    gc.freeze()  # as train.py does: else Python's garbage collector looks at the objects of all these models
    found = alternately({name: partial(timed, step) for name, step in steps.items()}, rounds)
    torch.distributed.destroy_process_group()
    rows: list[list[results.Cell]] = []
    for name, times in found.items():
        host = [each for each, _ in times]
        base = [each for each, _ in found["nanoGPT, as in train.py" + ", compiled" * ("compile" in name)]]
        speed = [1e3 * BATCH * TOKENS / whole for _, whole in times]
        ratios = [mine / other for mine, other in zip(host, base, strict=True)]
        rows.append([name, launches[name], *map(median_range, (host, ratios, speed)), memory[name]])
    return rows


def main() -> None:
    """Measure on the GPU, or on a null GPU in a process of its own; store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--nanogpt", type=Path, required=True, help="folder of a clone of nanoGPT")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, help="write the rows to this file, and store no table")
    arguments = parser.parse_args()
    nanogpt, gpu = arguments.nanogpt.resolve(), torch.cuda.is_available()
    if not (nanogpt / "model.py").exists():
        raise UserError(f"no model.py in {nanogpt}: git clone https://github.com/karpathy/nanoGPT")
    if arguments.out:
        arguments.out.write_text(json.dumps(measure(nanogpt, arguments.rounds, not arguments.eager)))
        return
    columns = ["", "launches", "ms of the CPU", "ratio", "tokens/s", "peak GB"]
    if gpu:
        rows = measure(nanogpt, arguments.rounds, not arguments.eager)
    else:  # then tokens/s would be those of an infinitely fast GPU
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "rows.json")
            words = [*null_gpu("--gb", 100), sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
            done = subprocess.run(words, text=True, capture_output=True)
            if done.returncode:
                raise UserError(f"on a null GPU: {done.stderr[-1000:]}")
            rows = [[*row[:4], row[5]] for row in json.loads(out.read_text())]
        columns.remove("tokens/s")
    results.store(
        "launches_beside_nanogpt",
        title="An update of a GPT-2 of 124 million weights, 12 x 1,024 tokens, bf16, one process"
        + ("" if gpu else ", on a null GPU"),
        columns=columns,
        rows=rows,
        formats={"ms of the CPU": ".1f", "ratio": ".2f", "tokens/s": ",.0f", "peak GB": ".1f"},
        spread=f"median (lowest to highest) of {arguments.rounds} rounds; ratio: to the CPU's time of nanoGPT as in "
        "train.py in the same round, eager or compiled; peak: above what there is between two updates",
        command="python experiments/launches_beside_nanogpt.py --nanogpt nanoGPT",
    )


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
