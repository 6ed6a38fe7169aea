"""What DDP's options change: all-reduces per step, and speed with and without communication, on two CPU ranks.

    python experiments/ddp_options.py

You should see the number of all-reduces change with --bucket_cap_mb, and nothing else: on CPUs the differences in speed
are noise. All settings are measured in turn, so that a machine whose speed drifts favors none.
"""

from pathlib import Path
from typing import Any

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.timing import alternately, mean_std
from workshop.errors import run_reporting_user_errors

KINDS = ("SYNTHETIC", "COMPUTE")
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
    """Count the all-reduces of a short run of each, then measure their throughput in turn."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a trial (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="each is measured so often (default: 3)")
    arguments = parser.parse_args()
    few = ("--limit_train", 256, "--limit_val", 64)
    trial = ("--benchmark", "true", "--benchmark_seconds", arguments.seconds)

    def run(*flags: object) -> dict[str, Any]:
        return train(LESSON, *FLAGS, *flags, ranks=2, threads=1, on_cpu=True)

    counted = {name: run(*option, *few) for name, option in OPTIONS.items()}
    settings = {name: lambda o=option: run(*o, *trial) for name, option in OPTIONS.items()}
    measured = alternately(settings, arguments.rounds)
    rows: list[list[results.Cell]] = []
    for name, count in counted.items():
        trials = {kind: [one for found in measured[name] for one in found[kind]["trials"]] for kind in KINDS}
        speeds = [mean_std(trials[kind]) for kind in KINDS]
        rows.append([name, count["all_reduces_per_step"], count["all_reduce_bytes_per_step"] / 1e6, *speeds])
    results.store(
        "ddp_options",
        title="Options of DDP",
        columns=["", "all-reduces per step", "MB", *KINDS],
        rows=rows,
        formats={"all-reduces per step": ".0f", "MB": ".1f"} | dict.fromkeys(KINDS, ",.0f"),
        unit="SYNTHETIC and COMPUTE in samples/s",
        spread=f"mean ± standard deviation of {3 * arguments.rounds} trials",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
