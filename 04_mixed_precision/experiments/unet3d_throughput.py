"""IO, SYNTHETIC and FULL of the full U-Net on a GPU: with all options, as a CUDA graph, in fp32; then on all GPUs.

python experiments/unet3d_throughput.py
python experiments/unet3d_throughput.py --tiny true      # a small model, to try this on a CPU

One process measures all rows of one GPU, so starting PyTorch, CUDA and NCCL is paid once, and the row with a CUDA graph
finds the algorithms that cuDNN chose, and the code that was compiled, for the row before. Each row is stored at once.
If this is stopped and called again on the same day, it goes on at the next row.
"""

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.timing import mean_std
from workload import FOLDER, LESSON
from workshop.config import load_config
from workshop.errors import run_reporting_user_errors
from workshop.jsonfile import read_json
from workshop.paths import REPOSITORY
from workshop.profiling import throughput

UNET = ("--config", "../configs/unet3d.yaml")
OPTIONS = (*UNET, "--config", "../configs/unet3d_opt.yaml")
ONE_BUCKET = ("--bucket_cap_mb", 1024)
"""on one GPU no gradients are sent; with DDP's small buckets, torch.compile cuts the model into as many pieces, and
compiles about twice as long"""
TINY = (*UNET, "--config", "../configs/unet3d_tiny.yaml", "--crop_size", 8, "--unet_width", 4)
BATCH = 64
"""samples per step and GPU in unet3d.yaml"""
KINDS = ("IO", "SYNTHETIC", "FULL")


@dataclass(frozen=True)
class Run:
    """What a row measures."""

    flags: tuple[object, ...]
    steps: int = 10
    """fewest steps of a trial"""
    ranks: int | None = None
    """number of ranks, or None for the process of this script"""


def runs(gpus: int) -> dict[str, Run]:
    """Return the runs by name."""
    found = {
        "all options": Run((*OPTIONS, *ONE_BUCKET)),
        "all options, CUDA graph": Run(
            (*OPTIONS, *ONE_BUCKET, "--cuda_graph", "true"), LESSON.GraphedStep.EAGER_STEPS + 2
        ),
        "fp32, no options": Run((*UNET, "--loader", "device", "--precision", "fp32"), steps=2),
    }
    if gpus > 1:
        found[f"all options, {gpus} GPUs"] = Run((*OPTIONS, "--global_batch_size", BATCH * gpus), ranks=gpus)
    return found


@contextmanager
def fewest_steps(steps: int) -> Iterator[None]:
    """Let a trial have at least so many steps: a step in fp32 takes more than half a second, and ten are too many."""
    before, throughput.FEWEST_STEPS = throughput.FEWEST_STEPS, steps
    try:
        yield
    finally:
        throughput.FEWEST_STEPS = before


def measure(run: Run, ranks: Any, *more: object) -> dict[str, Any]:  # noqa: ANN401, workshop.ranks.Ranks
    """Run the lesson's own `train` in this process, which has joined as ``ranks``; return its throughput."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, fewest_steps(run.steps):
        words = [str(word).replace("../configs", str(REPOSITORY / "configs")) for word in (*run.flags, *more)]
        config = load_config(LESSON.Config, [*words, "--run_dir", folder])
        config = LESSON.replace(
            config,
            batch_size=LESSON.batch_size_per_rank(config, 1),
            precision=LESSON.choose_precision(config.precision, ranks.device),
        )
        LESSON.train(config, ranks)
        return read_json(Path(folder, "throughput.json"))


def main() -> None:
    """Measure each, and store the table after each."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a trial (default: %(default)s)")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="a small model, for a CPU")
    arguments = parser.parse_args()
    chosen = runs(torch.cuda.device_count())
    if arguments.tiny == "true":
        chosen = {"tiny": Run(TINY), "tiny, bf16": Run((*TINY, "--precision", "bf16"))}
    measuring = ("--benchmark", "true", "--benchmark_seconds", arguments.seconds, "--mfu", "true")
    rows = [row for row in results.unfinished_rows("unet3d_throughput") if row[0] in chosen]
    done = {row[0] for row in rows}
    here = LESSON.join_ranks(timeout_minutes=10) if any(run.ranks is None for run in chosen.values()) else None
    for name, run in chosen.items():
        if name in done:
            continue
        began = time.monotonic()
        if run.ranks is None:
            found = measure(run, here, *measuring)
        else:
            found = train(FOLDER, *run.flags, *measuring, ranks=run.ranks)
        speeds = [mean_std(found[kind]["trials"]) for kind in KINDS]
        row = [name, *speeds, found["mfu"]["SYNTHETIC"], found["peak_memory_bytes"] / 1e9, time.monotonic() - began]
        rows.append(row)
        results.store(
            "unet3d_throughput",
            title="Throughput of the U-Net",
            columns=["", *KINDS, "MFU of SYNTHETIC", "peak GB", "seconds of this row"],
            rows=rows,
            formats=dict.fromkeys(KINDS, ",.1f")
            | {"MFU of SYNTHETIC": ".1%", "peak GB": ".1f", "seconds of this row": ".0f"},
            unit="samples/s",
            spread="mean ± standard deviation of 3 trials",
            finished=len(rows) == len(chosen),
        )
    if here is not None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_reporting_user_errors(main)
