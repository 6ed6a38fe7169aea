"""How many matrix products do all ranks together compute in a second? It is an upper bound for this machine.

Started like a training script, as ranks. They wait for each other only to start at the same time.

    torchrun --standalone --nproc-per-node 2 experiments/matrix_products.py --out /tmp
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lab.flags import Parser
from lab.process_group import process_group
from workshop.entry import run_reporting_user_errors
from workshop.profiling.calibration import repeats_for
from workshop.profiling.throughput import max_over_ranks

CPU_SIZE, ACCELERATOR_SIZE = 512, 4096
"""rows and columns: large enough to keep the device busy"""
TRIALS = 3


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for matrix_products.json")
    return parser.parse_args()


def seconds_for(products: int, matrix: torch.Tensor) -> float:
    """Return how long the slowest rank takes for that many products of a square matrix with itself."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(products):
        matrix @ matrix
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return max_over_ranks(time.perf_counter() - started, matrix.device)


def main() -> None:
    """Measure several trials; rank 0 writes the products per second of all ranks together."""
    arguments = parse_arguments()
    with process_group() as (rank, world_size, device):
        size = CPU_SIZE if device.type == "cpu" else ACCELERATOR_SIZE
        matrix = torch.rand(size, size, device=device)
        products = repeats_for(arguments.seconds, lambda products: seconds_for(products, matrix), first=10)
        trials = [world_size * products / seconds_for(products, matrix) for _ in range(TRIALS)]
        if rank == 0:
            (arguments.out / "matrix_products.json").write_text(json.dumps({"MATRIX": trials}) + "\n")


if __name__ == "__main__":
    run_reporting_user_errors(main)
