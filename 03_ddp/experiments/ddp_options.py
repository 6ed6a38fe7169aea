"""What DDP's options change: all-reduces per step, and speed with and without communication, on two CPU ranks.

    python experiments/ddp_options.py

You should see the number of all-reduces change with --bucket_cap_mb, and nothing else: on CPUs the differences in speed
are hardly larger than the noise.
"""

from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.timing import mean_std
from workshop.errors import run_reporting_user_errors

LESSON = Path(__file__).resolve().parents[1]
FLAGS = ("--config", "../configs/cifar10.yaml", "--loader", "memory", "--model", "resnet18", "--batch_size", 32)
OPTIONS: dict[str, tuple[object, ...]] = {
    "default settings": (),
    "`--bucket_cap_mb 5`": ("--bucket_cap_mb", 5),
    "`--bucket_cap_mb 100`": ("--bucket_cap_mb", 100),
    "`--forward_sync_buffers false`": ("--forward_sync_buffers", "false"),
    "`--gradient_as_bucket_view true`": ("--gradient_as_bucket_view", "true"),
}


def main() -> None:
    """Count the all-reduces of a short run of each, then measure its throughput."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a trial (default: 2)")
    seconds = parser.parse_args().seconds
    rows: list[list[results.Cell]] = []
    for name, option in OPTIONS.items():
        few = ("--limit_train", 256, "--limit_val", 64)
        counted = train(LESSON, *FLAGS, *option, *few, ranks=2, threads=1, on_cpu=True)
        trial = ("--benchmark", "true", "--benchmark_seconds", seconds)
        measured = train(LESSON, *FLAGS, *option, *trial, ranks=2, threads=1, on_cpu=True)
        speeds = [mean_std(measured[kind]["trials"]) for kind in ("SYNTHETIC", "COMPUTE")]
        megabytes = counted["all_reduce_bytes_per_step"] / 1e6
        rows.append([name, counted["all_reduces_per_step"], megabytes, *speeds])
        results.store(
            "ddp_options",
            title="Options of DDP",
            columns=["", "all-reduces per step", "MB", "SYNTHETIC", "COMPUTE"],
            rows=rows,
            formats={"all-reduces per step": ".0f", "MB": ".1f", "SYNTHETIC": ",.0f", "COMPUTE": ",.0f"},
            unit="SYNTHETIC and COMPUTE in samples/s",
            spread="mean ± standard deviation of 3 trials",
            finished=len(rows) == len(OPTIONS),
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
