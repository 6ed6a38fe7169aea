"""What fills my memory? Weights, gradients, optimizer state, activations: a table, without a GPU.

    python experiments/what_fills_memory.py                                        # the lesson's models
    python experiments/what_fills_memory.py --model gpt_1b --batch_size 1,4,16     # one model, with these batches

You should see that the *state* (weights, gradients and AdamW's two running means: 16 bytes per parameter) is the same
with every batch, and that what is kept for backward grows with the batch. Each row is then computed again with each of
three cures: the state sharded over 8 ranks (FSDP2), the activations recomputed (activation checkpointing), the batch
computed in 4 parts (gradient accumulation). The last column names those that take at least a quarter off the peak. On a
GPU, the same steps are made on it too, and the third table has the peak beside the forecast.
"""

import argparse
from dataclasses import replace

import torch

from lab import results
from lab.flags import Parser
from memory_model import NOT_COUNTED, STATE_BYTES, UPDATES, WORKLOADS, Setup, measure, predict
from will_it_fit import GB, words
from workshop.errors import run_reporting_user_errors

ROWS = (
    ("gpt_tiny", 32, "fp32"),
    ("gpt2_124m", 1, "fp32"),
    ("gpt2_124m", 16, "fp32"),
    ("gpt2_124m", 16, "bf16"),
    ("gpt_1b", 4, "bf16"),
    ("gpt_7b", 1, "bf16"),
)
"""model, batch and precision of each row without flags"""
SHARDED_OVER, PARTS = 8, 4
"""ranks, and parts of a batch, of the cures that are tried"""
ADVICE = ("shard", "recompute", "split the batch")
HELPS = 0.25
"""a cure is recommended if it takes at least this share off the peak"""


def numbers(text: str) -> list[int]:
    """Read positive whole numbers that are separated by commas."""
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"takes positive numbers, separated by commas, got '{text}'")
    return [int(word) for word in text.split(",")]


def cures(setup: Setup) -> list[Setup | None]:
    """Return the setup with each cure, in the order of `ADVICE`; None where it is impossible."""
    return [
        replace(setup, way="blocks", ranks=SHARDED_OVER),
        replace(setup, checkpointing=True),
        replace(setup, parts=PARTS) if setup.batch_size >= PARTS else None,
    ]


def advice(peak: int, with_cures: list[int | None]) -> str:
    """Return which cures take at least a quarter off the peak, the one that takes most first."""
    found = sorted((least, name) for name, least in zip(ADVICE, with_cures, strict=True) if least is not None)
    return ", ".join(name for least, name in found if least <= (1 - HELPS) * peak) or "no cure alone"


def store_parts(setups: dict[str, Setup]) -> None:
    """Store what the memory of each setup holds, and the peak with each cure."""
    asked = [cured for setup in setups.values() for cured in (setup, *cures(setup)) if cured]
    found = dict(zip(asked, predict(*asked), strict=True))
    parts: list[list[results.Cell]] = []
    helps: list[list[results.Cell]] = []
    for name, setup in setups.items():
        one = found[setup]
        sizes = (one.weights, one.gradients, one.optimizer, one.kept, one.peak)
        parts.append([name, *(size / GB for size in sizes), one.moment])
        peaks = [found[cured].peak if cured else None for cured in cures(setup)]
        in_gb = ["-" if peak is None else peak / GB for peak in peaks]
        state = STATE_BYTES * one.parameters / one.peak
        helps.append([name, one.peak / GB, one.moment, state, *in_gb, advice(one.peak, peaks)])
    columns = ["weights", "gradients", "optimizer state", "kept for backward", "peak"]
    results.store(
        "what_fills_memory",
        title="What is stored, what forward keeps for backward, and the peak of the step",
        columns=["GB", *columns, "it is in"],
        rows=parts,
        formats=dict.fromkeys(columns, ",.3f"),
        unit="GB, computed",
        spread="AdamW",
    )
    columns = [f"sharded over {SHARDED_OVER} ranks", "recomputed", f"in {PARTS} parts"]
    results.store(
        "what_helps",
        title="The peak, the share of the state (16 bytes per parameter), and the peak with each cure",
        columns=["GB", "peak", "it is in", "state", *columns, "what helps"],
        rows=helps,
        formats={"peak": ",.3f", "state": ".0%"} | dict.fromkeys(columns, ",.3f"),
        unit="GB, computed",
    )


def store_measured(setups: dict[str, Setup]) -> None:
    """Make each step on the GPU of this machine; store its peak beside the forecast."""
    rows: list[list[results.Cell]] = []
    for name, forecast, found in zip(setups, predict(*setups.values()), measure(*setups.values()), strict=True):
        measured = ["out of memory", None] if found is None else [found.peak / GB, found.peak / forecast.peak - 1]
        rows.append([name, forecast.peak / GB, *measured])
    formats = {"forecast": ",.3f", "measured": ",.3f", "difference": "+.1%"}
    title = "The peak on this machine's GPU"
    results.store(
        "forecast_and_gpu", title=title, columns=["GB", *formats], rows=rows, formats=formats, unit="GB", spread="AdamW"
    )


def main() -> None:
    """Compute, on a GPU also measure; store the tables."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=words(WORKLOADS), metavar="MODEL,...", help=f"some of {', '.join(WORKLOADS)}")
    parser.add_argument("--batch_size", type=numbers, default=[1, 16, 64], metavar="N,...", help="default: 1,16,64")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--update", choices=UPDATES, default="fused", help="the optimizer's (default: %(default)s)")
    arguments = parser.parse_args()
    rows = list(ROWS)
    if arguments.model:
        rows = [(model, batch, arguments.precision) for model in arguments.model for batch in arguments.batch_size]
    setups = {
        f"`{model}`, batch {batch}, {precision}": Setup(
            model=model, batch_size=batch, precision=precision, update=arguments.update
        )
        for model, batch, precision in rows
    }
    store_parts(setups)
    if torch.cuda.is_available():
        store_measured(setups)
    print(f"\n{NOT_COUNTED}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
