"""Does sharding change what a model learns? Lesson 04 (DDP) and lesson 05 (FSDP2) train the same vision transformer.

    python experiments/same_losses.py                     # 1, 2 and 4 ranks on this machine: about two minutes
    python experiments/same_losses.py --ranks 1,2 --quick true       # fewer samples

All runs have the same seed and the same global batch size, so every step has the same samples however many ranks share
it. You should see losses that differ only by rounding, because sums are taken in another order.
"""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from lab.flags import Parser, make_output_folder
from lab.launching import reason, torchrun
from lab.results import write_results
from lab.tables import format_table
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.paths import REPOSITORY, default_data_dir

LESSONS = {"DDP": "04_mixed_precision", "FSDP2": "05_fully_sharded"}
FLAGS = (
    "--model",
    "vit",
    "--global_batch_size",
    "64",
    "--num_workers",
    "0",
    "--limit_val",
    "320",
    "--log_interval",
    "1000",
)
MAX_RANKS = 64


def train(lesson: str, ranks: int, data_dir: Path, num_samples: int) -> dict[str, Any]:
    """Train one epoch with a lesson's script on ``ranks`` CPU ranks; return what its summary.json says of the epoch.

    Raises:
        UserError: the run failed.
    """
    with tempfile.TemporaryDirectory() as run_dir:
        flags = [*FLAGS, "--data_dir", str(data_dir), "--run_dir", run_dir, "--limit_train", str(num_samples)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*torchrun(ranks), "train.py", *flags],
            cwd=REPOSITORY / lesson,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UserError(f"{lesson} on {ranks} rank(s): {reason(done.stderr) or f'status {done.returncode}'}")
        return json.loads(Path(run_dir, "summary.json").read_text())["epochs"][0]


def compare(ranks: list[int], data_dir: Path, num_samples: int) -> dict[str, Any]:
    """Return the results of both lessons for each number of ranks, and the largest relative difference of a loss."""
    rows = [
        {"method": method, "ranks": number, **train(lesson, number, data_dir, num_samples)}
        for number in ranks
        for method, lesson in LESSONS.items()
    ]
    first = rows[0]
    for row in rows:
        row["difference"] = max(abs(row[name] / first[name] - 1) for name in ("train_loss", "val_loss"))
    return {"samples": num_samples, "rows": rows, "largest_difference": max(row["difference"] for row in rows)}


def main() -> None:
    """Train all runs; print and save their losses."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, with commas (default: %(default)s)")
    parser.add_argument("--data_dir", type=Path, default=default_data_dir(), help="folder of MNIST (%(default)s)")
    parser.add_switch("--quick", "train on 640 samples in place of 2,560")
    parser.add_out("same_losses.json")
    flags = parser.parse_args()
    if not re.fullmatch(r"\d+(,\d+)*", flags.ranks) or not all(
        1 <= int(n) <= MAX_RANKS for n in flags.ranks.split(",")
    ):
        raise UserError(f"--ranks takes numbers from 1 to {MAX_RANKS} with commas between them, got {flags.ranks}")
    make_output_folder(flags.out)
    figures = compare([int(n) for n in flags.ranks.split(",")], flags.data_dir, 640 if flags.quick else 2560)
    table = [
        [r["method"], str(r["ranks"]), f"{r['train_loss']:.6f}", f"{r['val_loss']:.6f}", f"{r['val_accuracy']:.2%}",
         f"{r['difference']:.0e}"]
        for r in figures["rows"]
    ]  # fmt: skip
    print(format_table(["", "ranks", "train loss", "val loss", "accuracy", "difference"], table))
    print(f"\nlargest relative difference of a loss from the first row: {figures['largest_difference']:.0e}")
    file = flags.out / "same_losses.json"
    write_results(file, torch.device("cpu"), figures)
    print(f"written: {file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
