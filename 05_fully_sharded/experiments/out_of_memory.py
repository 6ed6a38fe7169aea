"""Run out of memory on purpose, and cure it: the lesson's train.py on null GPUs of 16 and 80 GiB.

    python ../data/prepare.py text
    python experiments/out_of_memory.py                      # all rows: some minutes
    python experiments/out_of_memory.py --only "1 rank"      # rows with this in their name

You should see that one rank with 16 samples does not fit into 16 GiB, that each cure makes it fit, and that the model
of 6.6 billion parameters needs two of them at the same time. A cell is the peak that train.py prints, or "out of
memory" where PyTorch's allocator has ended it. The last column is the forecast for the same step.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.simulated import null_gpu
from memory_model import NOT_COUNTED, Setup, predict
from what_fills_memory import numbers
from will_it_fit import GB
from workshop.errors import UserError, run_reporting_user_errors

LESSON_FOLDER = Path(__file__).resolve().parents[1]
STEPS = 3


@dataclass(frozen=True)
class Row:
    """A run of train.py as rank 0 of a number of ranks."""

    model: str
    ranks: int
    samples: int
    """in a step, over all ranks"""
    cure: str = ""
    """further flags"""

    @property
    def name(self) -> str:
        """What the table shows."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        samples = f"{self.samples // self.ranks} sample{'s' if self.samples > self.ranks else ''}"
        return f"`{self.model}`, {ranks} with {samples}{f', `{self.cure}`' if self.cure else ''}"

    @property
    def setup(self) -> Setup:
        """The same step, for the forecast."""
        parts = re.search(r"--accumulate (\d+)", self.cure)
        return Setup(
            model=self.model,
            ranks=self.ranks,
            batch_size=self.samples // self.ranks,
            way="blocks",
            precision="bf16",
            checkpointing=RECOMPUTE in self.cure,
            parts=int(parts[1]) if parts else 1,
        )


RECOMPUTE = "--activation_checkpointing true"
ROWS = (
    Row("gpt2_124m", 1, 16),
    Row("gpt2_124m", 1, 16, "--accumulate 2"),
    Row("gpt2_124m", 1, 16, RECOMPUTE),
    Row("gpt2_124m", 2, 16),
    Row("gpt2_124m", 8, 16),
    Row("gpt2_124m", 8, 128),
    Row("gpt_7b", 2, 2),
    Row("gpt_7b", 2, 2, RECOMPUTE),
    Row("gpt_7b", 8, 8),
    Row("gpt_7b", 8, 8, RECOMPUTE),
    Row("gpt_7b", 16, 16, RECOMPUTE),
)


def peak_of_script(row: Row, gb: int) -> float | str:
    """Return the peak in GB that train.py prints on a null GPU of so many GiB, or "out of memory".

    Raises:
        UserError: no null GPU is possible here, or the script has failed for another reason.
    """
    flags: list[object] = ["--model", row.model, "--sequence_length", 1024 if row.model == "gpt2_124m" else 2048]
    flags += ["--precision", "bf16", "--global_batch_size", row.samples, *row.cure.split(), "--num_workers", 0]
    flags += ["--limit_train", STEPS * row.samples, "--limit_val", row.samples]
    try:
        start = (*null_gpu("--gb", gb, "--world", row.ranks), "python")
        return train(LESSON_FOLDER, *flags, start=start, quiet=True)["peak_memory_bytes"] / GB
    except UserError as error:
        if "CUDA out of memory" in str(error):
            return "out of memory"
        raise UserError(str(error).removeprefix("nullgpu: error: ")) from None


def main() -> None:
    """Run each row on each size of GPU; store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--gb", type=numbers, default=[16, 80], metavar="N,...", help="memory in GiB (default: 16,80)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their name")
    arguments = parser.parse_args()
    chosen = [row for row in ROWS if arguments.only in row.name]
    if not chosen:
        raise UserError(f"no row has '{arguments.only}' in its name: {'; '.join(row.name for row in ROWS)}")
    rows: list[list[results.Cell]] = []
    for row, forecast in zip(chosen, predict(*(row.setup for row in chosen)), strict=True):
        rows.append([row.name, *(peak_of_script(row, gb) for gb in arguments.gb), forecast.peak / GB])
        print(*rows[-1], sep="  ", flush=True)
    columns = [*(f"GPU of {gb} GiB" for gb in arguments.gb), "forecast"]
    results.store(
        "out_of_memory",
        title="Peak memory of the lesson's script on null GPUs",
        columns=["GB", *columns],
        rows=rows,
        formats=dict.fromkeys(columns, ",.2f"),
        unit="GB per rank, bf16, AdamW",
        spread="samples of 1,024 tokens, and 2,048 for `gpt_7b`",
    )
    print(f"\n{NOT_COUNTED}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
