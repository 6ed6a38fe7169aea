"""How far does it scale? Weak and strong scaling of this lesson's train.py over 1, 2, 4, ... ranks.

    python experiments/scaling.py                        # ranks of this machine: one per GPU, else one per CPU
    sbatch -N 2 experiments/scaling.slurm                # ranks of two nodes

You should see samples/s for loading alone (IO), training alone (SYNTHETIC), both (FULL), training without
communication (COMPUTE) and the same with a barrier in each step (BARRIER). The last columns show FULL over COMPUTE: the
share of the throughput that is left when the ranks communicate, with its spread. A rank on CPUs has one thread, because
one rank with more threads would use the CPUs of the others. Flags that are not listed here go to train.py.
"""

import argparse
import itertools
import statistics
from pathlib import Path

import torch

from lab.flags import Parser, make_output_folder, require_positive
from lab.launching import benchmark, check_flags
from lab.results import write_results
from lab.timing import cpu_share
from prediction import ddp_buckets
from ranks_of_a_job import in_slurm, launcher, slurm_tasks
from scaling_study import (
    KINDS,
    Setting,
    Trials,
    diagnosis,
    joined,
    plot,
    rows,
    scaling_table,
    settings,
)
from workshop.entry import run_reporting_user_errors
from workshop.errors import warn
from workshop.hardware import available_cpus, pick_device
from workshop.models import build_model

LESSON = Path(__file__).resolve().parent.parent


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; return the flags of this script and those for train.py.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument(
        "--max_ranks", type=int, help="stop at so many ranks (default: GPUs, else CPUs; tasks of a job)"
    )
    parser.add_argument("--threads_per_rank", type=int, help="CPU threads (default: 1; with GPUs, an equal share)")
    parser.add_argument("--batch_size", type=int, help="weak scaling: samples per rank (default: 64; quick, 8)")
    parser.add_argument(
        "--global_batch_size", type=int, help="strong scaling: samples over all ranks (default: that of --batch_size)"
    )
    parser.add_argument("--seconds", type=float, help="length of a trial (default: 1; quick, 0.1)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds of 3 trials of all configurations (default: %(default)s)"
    )
    parser.add_switch("--quick", "only to see it work: weak scaling alone, small batches, short trials")
    parser.add_out("scaling.json and scaling.png")
    arguments, train_flags = parser.parse_known_args()
    require_positive(arguments, *(name for name in vars(arguments) if name not in ("out", "quick")))
    return arguments, train_flags


def fill_in_defaults(arguments: argparse.Namespace) -> None:
    """Set what the command line left open by what is there: GPUs or CPUs, of this machine or of the job."""
    gpus = torch.cuda.device_count()
    there = slurm_tasks() if in_slurm() else gpus or available_cpus()
    arguments.max_ranks = arguments.max_ranks or there
    if arguments.max_ranks > there:
        warn(f"--max_ranks {arguments.max_ranks} is more than the {there} there are: ranks will share CPUs or fail")
    if there < gpus:
        warn(f"there are {gpus} GPUs, but this job has {there} task(s), one for each rank: --ntasks-per-node {gpus}")
    share = max(1, available_cpus() // (1 if in_slurm() else arguments.max_ranks))
    arguments.threads_per_rank = arguments.threads_per_rank or (share if gpus else 1)
    arguments.seconds = arguments.seconds or (0.1 if arguments.quick else 1.0)
    arguments.batch_size = arguments.batch_size or (8 if arguments.quick else 64)
    arguments.global_batch_size = arguments.global_batch_size or arguments.batch_size


def measure_training(setting: Setting, arguments: argparse.Namespace, train_flags: list[str]) -> Trials:
    """Return the trials of each kind, in samples/s."""
    flags = [*train_flags, "--batch_size", setting.batch_size, "--benchmark_seconds", arguments.seconds]
    found = benchmark(launcher(setting.ranks), LESSON, flags, arguments.out, arguments.threads_per_rank)
    speed = ", ".join(f"{kind} {statistics.mean(found[kind]):,.0f}" for kind in KINDS)
    print(f"{setting.ranks} rank(s), batch {setting.batch_size} each: {speed} samples/s", flush=True)
    return found


def main() -> None:
    """Measure all configurations alternately, in several rounds; then print, plot and write the results."""
    arguments, train_flags = parse_arguments()
    # Unless asked for otherwise: all samples in memory and no loader processes, which would take CPUs from the ranks.
    train_flags = ["--loader", "memory", "--num_workers", "0", *train_flags]
    config = check_flags(LESSON, train_flags)
    fill_in_defaults(arguments)
    make_output_folder(arguments.out)
    studies = settings(arguments.max_ranks, arguments.batch_size, arguments.global_batch_size)
    if arguments.quick:
        del studies["strong"]
    measured: dict[Setting, Trials] = {setting: {} for setting in itertools.chain(*studies.values())}
    shares = [cpu_share()]
    for _ in range(arguments.rounds):
        for setting in measured:
            measured[setting] = joined(measured[setting], measure_training(setting, arguments, train_flags))
            shares.append(cpu_share())

    if min(shares) < 0.8:
        warn(f"at times only {min(shares):.0%} of the CPUs were free: others compute here too, so trust no ratio")
    found = [row for scaling, study in studies.items() for row in rows(scaling, study, measured)]
    diagnoses = {scaling: diagnosis([row for row in found if row["scaling"] == scaling]) for scaling in studies}
    print(f"\nsamples/s, and FULL over COMPUTE: the median of pairs of trials\n{scaling_table(found)}\n")
    print("\n".join(diagnoses.values()))
    bucket_bytes = ddp_buckets(build_model(config.model, config.dataset).parameters())
    figures = {
        "cpu_share": min(shares),
        "threads_per_rank": arguments.threads_per_rank,
        "rounds": arguments.rounds,
        "train_flags": train_flags,
        "gradient_bytes": sum(bucket_bytes),
        "bucket_bytes": bucket_bytes,
        "diagnoses": diagnoses,
        "rows": found,
    }
    json_file, plot_file = arguments.out / "scaling.json", arguments.out / "scaling.png"
    write_results(json_file, pick_device(), figures)
    plot(found, plot_file)
    print(f"\nwritten: {json_file}, {plot_file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
