"""Compute what lesson 05's page on memory shows, and keep it in results/memory.json.

    python lab/measure_memory.py                # everything: half an hour of one CPU
    python lab/measure_memory.py what_fills     # one part of it

The bytes are the same on every machine; only ``two_ranks`` measures, on two CPU ranks of this one. Then
`python -m cogapp -r -I . 05_fully_sharded/experiments/memory.md` renders the page.
"""

import sys

from lab.flags import Parser
from lab.launching import run_and_read
from lab.results_file import save_results
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError, nearest
from workshop.paths import REPOSITORY

LESSON_05 = REPOSITORY / "05_fully_sharded"
FILE = REPOSITORY / "results" / "memory.json"
WHAT, FIT = "what_fills_memory.py", "will_it_fit.py"
SEVEN, SEVENTY = ("--model", "gpt_7b"), ("--model", "gpt_70b", "--checkpointing", "true")
PARTS: dict[str, tuple[str | int, ...]] = {
    "what_fills": (WHAT,),
    "two_ranks": (FIT, "--check", "true"),
    "seven_ways": (FIT, *SEVEN, "--ranks", 8),
    "seven_64": (FIT, *SEVEN, "--ranks", 64, "--ways", "blocks"),
    "seven_1024": (FIT, *SEVEN, "--ranks", 1024, "--ways", "blocks", "--checkpointing", "false"),
    "seven_1024_recomputed": (FIT, *SEVEN, "--ranks", 1024, "--ways", "blocks", "--checkpointing", "true"),
    "seven_groups": (FIT, *SEVEN, "--ranks", 64, "--ways", "blocks", "--replicas", 8, "--checkpointing", "false"),
    "seventy": (FIT, *SEVENTY, "--ranks", 64, "--ways", "blocks"),
    "bars": (FIT, "--model", "vit3d", "--batch_size", 4, "--ranks", "1,2,8,64", "--ways", "ddp,blocks"),
    "gpu_unet": (FIT, "--model", "unet3d", "--ways", "ddp,blocks", "--budget_gb", "8,24,48,80,141"),
    "gpu_vit3d": (FIT, "--model", "vit3d", "--ways", "blocks", "--budget_gb", "8,24,48,80,141"),
    "gpu_seven": (FIT, *SEVEN, "--ways", "blocks", "--checkpointing", "true", "--budget_gb", "8,24,48,80,141"),
    "gpu_seventy": (FIT, *SEVENTY, "--ways", "blocks", "--ranks", 64, "--budget_gb", "8,24,48,80,141"),
}
"""script and flags of each part"""


def main() -> None:
    """Run the parts that are named on the command line, or all; save the figures of each as soon as it ends."""
    parser = Parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of: {', '.join(PARTS)}")
    arguments = parser.parse_args()
    if unknown := next((name for name in arguments.parts if name not in PARTS), None):
        raise UserError(f"no part '{unknown}'; {nearest(unknown, PARTS)}")
    for name in arguments.parts or PARTS:
        script, *flags = PARTS[name]
        figures = run_and_read([sys.executable, f"experiments/{script}", *flags], LESSON_05, show=True)
        typed = " ".join(["python", f"experiments/{script}", *map(str, flags)])
        save_results(FILE, name, figures | {"typed": typed}, f"python lab/measure_memory.py {name}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
