"""The same work by one device, by DataParallel and by DistributedDataParallel (DDP), side by side.

    python experiments/compare.py

You should see one table: samples per second, mean +/- standard deviation, and the ratio to one device. All take the
same samples in steps of the same global batch, and are measured alternately. Where there are not two GPUs, DataParallel
cannot be measured and its row says so; DDP then runs two ranks of one thread each. Flags that are not listed here go
to the train.py of all three lessons.
"""

import argparse
import sys
from dataclasses import replace

import torch

from contenders import KINDS, Contender, comparison_table, contenders, rows, shared_batch
from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import benchmark, check_flags, torchrun
from lab.results import write_results
from workshop.entry import run_reporting_user_errors
from workshop.hardware import available_cpus, pick_device
from workshop.paths import REPOSITORY


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return the flags of this script and those for train.py.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument(
        "--global_batch_size",
        type=int,
        help="samples per step, over all devices (default: 64, or the next number that the ranks of DDP can share)",
    )
    parser.add_argument("--ranks", type=int, help="ranks of DDP (default: one per GPU, without GPUs 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds of 3 trials of all configurations (default: %(default)s)"
    )
    parser.add_out("compare.json")
    arguments, train_flags = parser.parse_known_args()
    require_positive(arguments, "global_batch_size", "ranks", "seconds", "rounds")
    return arguments, train_flags


def measure(one: Contender, arguments: argparse.Namespace, flags: list[str]) -> Contender:
    """Return a contender with three trials of each kind more."""
    if one.reason:
        return one
    print(f"measuring: {one.name}", flush=True)
    batch = ["--global_batch_size" if one.lesson == "03_ddp" else "--batch_size", arguments.global_batch_size]
    start = [sys.executable] if one.ranks is None else torchrun(one.ranks)
    flags = [*flags, *batch, "--benchmark_seconds", arguments.seconds]
    found = benchmark(start, REPOSITORY / one.lesson, flags, arguments.out, one.threads)
    return replace(one, trials={kind: one.trials.get(kind, []) + found[kind] for kind in KINDS})


def main() -> None:
    """Measure all contenders alternately; print the table and write the figures."""
    arguments, train_flags = parse_arguments()
    # Unless asked for otherwise: all samples in memory and no loader processes, which would take CPUs from the ranks.
    flags = ["--loader", "memory", "--num_workers", "0", *train_flags]
    check_flags(REPOSITORY / "01_single_gpu", flags)
    make_output_folder(arguments.out)
    found = contenders(torch.cuda.device_count(), available_cpus(), arguments.ranks)
    arguments.global_batch_size = arguments.global_batch_size or shared_batch(found[-1].ranks)
    for _ in range(arguments.rounds):
        found = [measure(one, arguments, flags) for one in found]

    print(f"\n{comparison_table(rows(found))}")
    figures = {
        "global_batch_size": arguments.global_batch_size,
        "train_flags": flags,
        "rows": rows(found),
    }
    file = arguments.out / "compare.json"
    write_results(file, pick_device(), figures)
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
