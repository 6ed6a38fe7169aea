"""IO, SYNTHETIC and FULL of the full U-Net on a GPU: with all options, as a CUDA graph, in fp32; then on all GPUs.

python experiments/unet3d_throughput.py
python experiments/unet3d_throughput.py --tiny true      # a small model, to try this on a CPU
"""

from pathlib import Path

import torch

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.timing import mean_std
from workshop.errors import run_reporting_user_errors

LESSON = Path(__file__).resolve().parents[1]
UNET = ("--config", "../configs/unet3d.yaml")
OPTIONS = (*UNET, "--config", "../configs/unet3d_opt.yaml")
TINY = (*UNET, "--config", "../configs/unet3d_tiny.yaml", "--crop_size", 8, "--unet_width", 4)
BATCH = 64
"""samples per step and GPU in unet3d.yaml"""
KINDS = ("IO", "SYNTHETIC", "FULL")
Run = tuple[int | None, tuple[object, ...]]
"""ranks, or None for one process, and flags"""


def runs(gpus: int) -> dict[str, Run]:
    """Return the runs by name."""
    found: dict[str, Run] = {
        "all options": (None, OPTIONS),
        "all options, CUDA graph": (None, (*OPTIONS, "--cuda_graph", "true")),
        "fp32, no options": (None, (*UNET, "--loader", "device", "--precision", "fp32")),
    }
    if gpus > 1:
        found[f"all options, {gpus} GPUs"] = (gpus, (*OPTIONS, "--global_batch_size", BATCH * gpus))
    return found


def main() -> None:
    """Measure each, and store the table after each."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (default: 1)")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="a small model, for a CPU")
    arguments = parser.parse_args()
    chosen = runs(torch.cuda.device_count())
    if arguments.tiny == "true":
        chosen = {"tiny": (None, TINY), "tiny, bf16": (None, (*TINY, "--precision", "bf16"))}
    rows: list[list[results.Cell]] = []
    for name, (ranks, flags) in chosen.items():
        measuring = ("--benchmark", "true", "--benchmark_seconds", arguments.seconds, "--mfu", "true")
        found = train(LESSON, *flags, *measuring, ranks=ranks)
        speeds = [mean_std(found[kind]["trials"]) for kind in KINDS]
        rows.append([name, *speeds, found["mfu"]["SYNTHETIC"], found["peak_memory_bytes"] / 1e9])
        results.store(
            "unet3d_throughput",
            title="Throughput of the U-Net",
            columns=["", *KINDS, "MFU of SYNTHETIC", "peak GB"],
            rows=rows,
            formats=dict.fromkeys(KINDS, ",.1f") | {"MFU of SYNTHETIC": ".1%", "peak GB": ".1f"},
            unit="samples/s",
            spread="mean ± standard deviation of 3 trials",
            finished=len(rows) == len(chosen),
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
