"""Tokens per second, MFU and memory of a language model of a billion weights: DDP, and FSDP2 in several forms.

    python experiments/sharded_throughput.py                 # on all GPUs of this machine
    python experiments/sharded_throughput.py --tiny true     # a small model, to try this on a CPU

Each row is measured in processes of its own, one for each GPU, which train on the same batch of random bytes in every
step. On one GPU nothing is sent, and each weight is whole: this shows what FSDP2 itself costs.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lab import results
from lab.flags import Parser
from lab.launching import PYTHON, run, torchrun
from lab.process_group import process_group
from lab.timing import mean_std
from sharded_models import LESSON, batches_of, replicated, sharded
from workshop.config import require_positive
from workshop.errors import UserError, run_reporting_user_errors
from workshop.explain import FITS
from workshop.hardware import peak_memory_bytes
from workshop.models.gpt import SIZES, gpt_size
from workshop.profiling.calibration import repeats_for
from workshop.profiling.mfu import utilization
from workshop.profiling.throughput import max_over_ranks

ROWS: dict[str, dict[str, Any]] = {
    "DDP": {"precision": "bf16"},
    "FSDP2": {"precision": "bf16"},
    "FSDP2, `--shard keep`": {"precision": "bf16", "shard": "keep"},
    "FSDP2, `--activation_checkpointing true`": {"precision": "bf16", "activation_checkpointing": True},
    "DDP, fp32": {"precision": "fp32"},
    "FSDP2, fp32": {"precision": "fp32"},
}
"""flags of train.py; in DDP, autocast does what bf16 asks for"""
TINY = {"model": "gpt_tiny", "width": 64, "depth": 2, "sequence_length": 32}
LEARNING_RATE = 1e-4  # the default is too high for a large model without a warm-up
FEWEST_STEPS, TRIALS = 3, 3


def measure_row(name: str, model: dict[str, Any], seconds: float, file: Path) -> None:
    """As one of the ranks: train as this row says; rank 0 writes what it has measured."""
    flags = model | ROWS[name] | {"lr": LEARNING_RATE}
    config = LESSON.Config(**flags)
    length = config.sequence_length
    flops = length * gpt_size(config.model, config.width, config.depth, config.vocabulary).flops_per_token(length)
    with process_group() as (rank, world_size, device):
        peak = utilization(config, flops, device)  # first, while all of the memory is free
        built = replicated(device, **flags) if name.startswith("DDP") else sharded(rank, world_size, device, **flags)
        step = built[-1]
        ((inputs, targets),) = batches_of(rank, config.batch_size, length)
        inputs, targets = inputs.to(device), targets.to(device)

        def time_of(steps: int) -> float:
            started = time.perf_counter()
            for _ in range(steps):
                step(inputs, targets)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return max_over_ranks(time.perf_counter() - started, device)

        steps = repeats_for(seconds, time_of, FEWEST_STEPS)  # also warms up
        speeds = [steps * config.batch_size / time_of(steps) for _ in range(TRIALS)]  # samples/s of each rank
        tokens = [world_size * length * speed for speed in speeds]
        mfu = peak.mfu(sum(speeds) / TRIALS)
        if rank == 0:
            file.write_text(json.dumps([mean_std(tokens), mfu, peak_memory_bytes(device) / 1e9]))


def row_of(name: str, gpus: int) -> list[results.Cell]:
    """Start the ranks that measure a row, and return it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.json")
        start = torchrun(gpus) if gpus > 1 else [PYTHON]
        words = [*start, Path(__file__).resolve(), *sys.argv[1:], "--row", name, "--write", file]
        try:
            run(words, Path.cwd(), quiet=True)
        except UserError as error:
            if FITS not in str(error):
                raise
            return [name, "out of memory", None, None]  # other rows may need less
        return [name, *json.loads(file.read_text())]


def main() -> None:
    """Measure each row on all GPUs, and store the table after each."""
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=SIZES, default="gpt_1b", help="as in train.py (default: %(default)s)")
    parser.add_argument("--sequence_length", type=int, default=1024, help="as in train.py (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=4, help="samples per rank (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (default: 1)")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="a small model, for a CPU")
    parser.add_argument("--row", metavar="NAME", help="the row that a rank which this script starts measures")
    parser.add_argument("--write", type=Path, help="file that it writes the row to")
    arguments = parser.parse_args()
    require_positive(arguments, "sequence_length", "batch_size", "seconds")
    model = {"model": arguments.model, "sequence_length": arguments.sequence_length}
    model = (TINY if arguments.tiny == "true" else model) | {"batch_size": arguments.batch_size}
    if arguments.row is not None:
        measure_row(arguments.row, model, arguments.seconds, arguments.write)
        return
    gpus = torch.cuda.device_count()
    config = LESSON.Config(**model)
    weights = gpt_size(config.model, config.width, config.depth, config.vocabulary).parameters / 1e6
    batch = f"{config.batch_size} samples of {config.sequence_length:,} bytes"
    rows: list[list[results.Cell]] = []
    for name in ROWS:
        rows.append(row_of(name, gpus))
        results.store(
            "sharded_throughput",
            title=f"Training a language model of {weights:,.1f} million weights, in bf16 where nothing else is said",
            columns=["", "tokens/s", "MFU", "peak GB"],
            rows=rows,
            formats={"tokens/s": ",.0f", "MFU": ".1%", "peak GB": ".1f"},
            spread=f"mean ± standard deviation of {TRIALS} trials on {max(gpus, 1)} device(s), each with {batch}",
            finished=len(rows) == len(ROWS),
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
