"""Seconds of the first and of later epochs on MNIST: lesson 01, and the fast configuration of lesson 04.

python experiments/mnist_epochs.py
"""

from pathlib import Path

import torch

from lab import results
from lab.flags import Parser
from lab.launching import train
from workshop.errors import run_reporting_user_errors
from workshop.hardware import available_cpus

LESSONS = Path(__file__).resolve().parents[2]
MNIST = ("--config", "../configs/mnist.yaml")
FAST = (*MNIST, "--config", "../configs/mnist_fast.yaml")


def main() -> None:
    """Train each, and store the table after each."""
    parser = Parser(__doc__)
    parser.add_argument("--epochs", type=int, default=3, help="of each run (default: 3)")
    parser.add_argument("--limit_train", type=int, help="samples of lesson 01 (default: all)")
    arguments = parser.parse_args()
    few = ("--limit_train", arguments.limit_train) if arguments.limit_train else ()
    workers = max(1, available_cpus() - 2)  # two CPUs for the training process
    chosen: dict[str, tuple[str, tuple[object, ...]]] = {
        "lesson 01": ("01_single_gpu", (*MNIST, *few)),
        f"lesson 01, {workers} workers": ("01_single_gpu", (*MNIST, *few, "--num_workers", workers)),
        "fast": ("04_mixed_precision", FAST),
    }
    if torch.cuda.is_available():
        chosen["fast, CUDA graph"] = ("04_mixed_precision", (*FAST, "--cuda_graph", "true"))
    rows: list[list[results.Cell]] = []
    for name, (lesson, flags) in chosen.items():
        first, *later = train(LESSONS / lesson, *flags, "--epochs", arguments.epochs)["epochs"]
        seconds = ", ".join(f"{epoch['seconds']:.2f}" for epoch in later)
        last = (later or [first])[-1]
        rows.append([name, first["seconds"], seconds, last["samples_per_second"], last["val_accuracy"]])
        results.store(
            "mnist_epochs",
            title="Epochs on MNIST",
            columns=["", "first epoch, s", "later epochs, s", "samples/s of the last", "its accuracy"],
            rows=rows,
            formats={"first epoch, s": ".2f", "samples/s of the last": ",.0f", "its accuracy": ".2%"},
            spread="one run each; the first epoch includes the start of workers, kernels and compilation",
            finished=len(rows) == len(chosen),
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
