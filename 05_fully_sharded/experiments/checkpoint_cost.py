"""Checkpoints at size: their bytes, the seconds that saving takes, and how often it pays to save.

    python experiments/checkpoint_cost.py
    python experiments/checkpoint_cost.py --gpu_hours_per_failure 10000     # of a machine that fails more often

You should see that the time between two checkpoints that costs least grows with the square root of the time that one
takes, and that the 120 seconds that this lesson's job has before its time limit are enough, except for the largest
model on the slowest file system.

A run that saves every t seconds loses a share s / t of its time by saving, where s is the time of a save, and after
each failure t / 2 on average. The sum is smallest at t = sqrt(2 s M), where M is the mean time between two failures of
the job (Young 1974, https://doi.org/10.1145/361147.361115; Daly 2006, https://doi.org/10.1016/j.future.2004.11.016).
"""

import argparse
import math

from lab import results
from lab.flags import Parser
from workshop.config import require_positive
from workshop.errors import run_reporting_user_errors

BYTES_PER_PARAMETER = 12
"""weight and the two running means of Adam in float32; gradients are not saved"""
GPU_HOURS_PER_FAILURE = 51_000
"""Llama 3's training: 419 unexpected interruptions in 54 days on up to 16,384 H100, so 21.2 million GPU-hours over 419
(Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.4). Most clusters fail more often."""
PARAMETERS = {"1 billion": (1e9, 8), "7 billion": (7e9, 64), "70 billion": (70e9, 512)}
"""and the number of GPUs that such a model is trained on here"""
GB_PER_SECOND = (1.0, 10.0, 100.0)
"""that all ranks together write: a shared file server, a small parallel file system, a large one"""


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Return the seconds between two saves that lose the least time (Young's formula)."""
    return math.sqrt(2 * save_seconds * seconds_between_failures)


def lost_share(interval: float, save_seconds: float, seconds_between_failures: float) -> float:
    """Return the share of the time that is spent on saving and on what failures take back."""
    return save_seconds / interval + interval / 2 / seconds_between_failures


def row(name: str, speed: float, arguments: argparse.Namespace) -> list[results.Cell]:
    """Return the row of one model on one file system."""
    parameters, gpus = PARAMETERS[name]
    seconds = BYTES_PER_PARAMETER * parameters / 1e9 / speed
    between_failures = 3600 * arguments.gpu_hours_per_failure / gpus
    interval = best_interval(seconds, between_failures)
    enough = "yes" if seconds < arguments.seconds_before_limit else "no"
    lost = lost_share(interval, seconds, between_failures)
    return [f"{name} on {gpus} GPUs, {speed:g} GB/s", seconds * speed, seconds, enough, interval / 60, lost]


def main() -> None:
    """Compute and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--gpu_hours_per_failure", type=float, default=GPU_HOURS_PER_FAILURE, help="default: 51000")
    parser.add_argument(
        "--seconds_before_limit", type=float, default=120.0, help="that a job has to save (default: 120)"
    )
    arguments = parser.parse_args()
    require_positive(arguments, "gpu_hours_per_failure", "seconds_before_limit")
    enough = f"{arguments.seconds_before_limit:g} s enough?"
    results.store(
        "checkpoint_cost",
        title="Checkpoints at size",
        columns=["weights and file system", "GB", "seconds", enough, "save every, minutes", "time lost"],
        rows=[row(name, speed, arguments) for name in PARAMETERS for speed in GB_PER_SECOND],
        formats={"GB": ",.0f", "seconds": ",.3g", "save every, minutes": ",.0f", "time lost": ".2%"},
        spread=f"computed; a failure in {arguments.gpu_hours_per_failure:,.0f} GPU-hours",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
