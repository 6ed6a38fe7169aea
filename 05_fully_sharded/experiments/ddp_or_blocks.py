"""DDP or FSDP2 for a model that fits: the lesson's train.py on simulated GPUs, with `--shard none` and `blocks`.

    python ../data/prepare.py text
    python experiments/ddp_or_blocks.py           # some minutes

Rank 0 of many runs on a null GPU with its clock. You should see that `blocks` computes for a shorter time in 16 bits
and sends more, and that its collectives grow with the parts of a batch. The time of the CPU is left out: it is this
machine's.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab import results
from lab.flags import Parser
from lab.launching import train
from lab.simulated import null_gpu
from workshop.errors import run_reporting_user_errors

LESSON_FOLDER = Path(__file__).resolve().parents[1]
OPERATIONS = ("_to_copy", "add", "_fused_rms_norm", "_fused_rms_norm_backward", "_fused_adamw_")
"""those that differ: conversions, sums of the residual stream, norms, the optimizer"""


@dataclass(frozen=True)
class Work:
    """What one rank of many does in an update."""

    model: str
    sequence_length: int
    ranks: int
    samples: int
    """of a part, for each rank"""
    parts: int


WORKS = (Work("gpt2_124m", 1024, 8, 8, 1), Work("gpt_1b", 2048, 64, 4, 1), Work("gpt_1b", 2048, 64, 4, 4))


def row_of(work: Work, shard: str, updates: int) -> list[results.Cell]:
    """Run train.py as rank 0, and return a row of the table."""
    batch = work.samples * work.parts * work.ranks
    flags: list[object] = ["--model", work.model, "--sequence_length", work.sequence_length, "--shard", shard]
    flags += ["--precision", "bf16", "--global_batch_size", batch, "--accumulate", work.parts, "--num_workers", 0]
    steps = max(1, min(updates, 4096 // batch))  # of an epoch: the text is short
    flags += ["--limit_train", steps * batch, "--limit_val", work.ranks, "--epochs", -(-updates // steps)]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        start = (
            *null_gpu("--clock", "a100", "--gpus", 8, "--world", work.ranks, "--report", "--json", figures),
            "python",
        )
        peak = train(LESSON_FOLDER, *flags, start=start, quiet=True)["peak_memory_bytes"] / 1e9
        found = json.loads(figures.read_text())
    clock, report = found["clock"]["ranks"][0], found["report"]["ranks"][0]["step"]
    differing = sum(clock["operations"].get(name, 0.0) for name in OPERATIONS) / clock["updates"]
    name = f"`{work.model}` on {work.ranks}, {work.parts} part{'s' if work.parts > 1 else ''}, `--shard {shard}`"
    return [
        name,
        1e3 * clock["busy"] * clock["seconds"],
        1e3 * differing,
        report["collectives"],
        report["collective_bytes"] / 1e9,
        peak,
    ]


def main() -> None:
    """Run each amount of work with DDP and with FSDP2; store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--updates", type=int, default=8, help="updates of each run, of which three do not count")
    parser.add_argument("--only", default="", metavar="MODEL", help="models with this in their name")
    arguments = parser.parse_args()
    rows = []
    for work in (work for work in WORKS if arguments.only in work.model):
        for shard in ("none", "blocks"):
            rows.append(row_of(work, shard, arguments.updates))
            print(*rows[-1], sep="  ", flush=True)
    columns = ["GPU computes, ms", "of it in what differs, ms", "collectives", "GB in them", "peak GB"]
    results.store(
        "ddp_or_blocks",
        title="DDP and FSDP2 where both fit",
        columns=["rank 0", *columns],
        rows=rows,
        formats=dict(zip(columns, (",.0f", ",.0f", ",.0f", ",.1f", ",.1f"), strict=True)),
        unit="per update on a simulated A100, bf16, fused AdamW",
        spread="conversions, sums of the residual stream, norms and optimizer differ; the CPU's time is left out",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
