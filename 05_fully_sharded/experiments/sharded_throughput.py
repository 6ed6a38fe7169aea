"""Throughput, MFU and memory of a vision transformer of 1.6 billion weights: DDP, and FSDP2 in several forms.

    python experiments/sharded_throughput.py
    python experiments/sharded_throughput.py --tiny true     # a small model, to try this on a CPU

On one GPU nothing is sent, and each weight is whole: this shows what FSDP2 itself costs.
"""

from pathlib import Path

import torch

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.timing import mean_std
from workshop.errors import run_reporting_user_errors

LESSONS = Path(__file__).resolve().parents[2]
VIT = ("--config", "../configs/vit3d.yaml")
TINY = (*VIT, "--config", "../configs/vit3d_tiny.yaml", "--limit_train", 32, "--global_batch_size", 4)
RUNS: dict[str, tuple[str, tuple[object, ...]]] = {
    "DDP": ("04_mixed_precision", ()),
    "FSDP2": ("05_fully_sharded", ()),
    "FSDP2, `--shard keep`": ("05_fully_sharded", ("--shard", "keep")),
    "FSDP2, `--activation_checkpointing true`": ("05_fully_sharded", ("--activation_checkpointing", "true")),
}
"""lesson and flags"""


def main() -> None:
    """Measure each on all GPUs, and store the table after each."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (default: 1)")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="a small model, for a CPU")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    model = TINY if arguments.tiny == "true" else VIT
    rows: list[list[results.Cell]] = []
    for name, (lesson, flags) in RUNS.items():
        measuring = ("--benchmark", "true", "--benchmark_seconds", arguments.seconds, "--mfu", "true")
        found = train(LESSONS / lesson, *model, *flags, *measuring, ranks=gpus if gpus > 1 else None)
        speeds = [mean_std(found[kind]["trials"]) for kind in ("SYNTHETIC", "FULL")]
        rows.append([name, *speeds, found["mfu"]["SYNTHETIC"], found["peak_memory_bytes"] / 1e9])
        results.store(
            "sharded_throughput",
            title="A vision transformer of 1.6 billion weights" if model is VIT else "A small vision transformer",
            columns=["", "SYNTHETIC", "FULL", "MFU of SYNTHETIC", "peak GB"],
            rows=rows,
            formats={"SYNTHETIC": ",.1f", "FULL": ",.1f", "MFU of SYNTHETIC": ".1%", "peak GB": ".1f"},
            unit=f"samples/s, on {max(gpus, 1)} device(s)",
            spread="mean ± standard deviation of 3 trials",
            finished=len(rows) == len(RUNS),
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
