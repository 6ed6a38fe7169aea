"""What fills my memory? Weights, gradients, optimizer state, activations: a table, without a GPU, in seconds.

    python experiments/what_fills_memory.py                                        # the lesson's models
    python experiments/what_fills_memory.py --model gpt_1b --batch_size 1,4,16     # one model, with these batches

You should see that the *state* (weights, gradients and AdamW's two running means: 16 bytes per parameter) is the same
with every batch, and that the rest grows with the batch. Each row is then computed again with each of three cures: the
state sharded over 8 ranks (FSDP2), the activations recomputed (activation checkpointing), the batch computed in 4 parts
(gradient accumulation). The last column names those that take at least a quarter off the peak. On a GPU, each step is
really made as well: the third table has the peak that PyTorch's allocator measures, and a snapshot is written beside it
for https://docs.pytorch.org/memory_viz.
"""

import argparse
import gc
from dataclasses import replace

import torch

from lab import results
from lab.flags import Parser
from memory_model import LESSON, NOT_COUNTED, STATE_BYTES, UPDATES, WORKLOADS, Setup, build, predict, workload
from will_it_fit import words
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
SHOWN = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "batch")
SHARDED_OVER, PARTS = 8, 4
"""ranks, and parts of a batch, of the cures that are tried"""
ADVICE = ("shard", "recompute", "split the batch")
HELPS = 0.25
"""a cure is recommended if it takes at least this share off the peak"""
GB = 1e9


def numbers(text: str) -> list[int]:
    """Read positive whole numbers that are separated by commas."""
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"takes positive numbers, separated by commas, got '{text}'")
    return [int(word) for word in text.split(",")]


def cures(setup: Setup) -> list[int | None]:
    """Return the peak in bytes with each cure, in the order of `ADVICE`; None where it is impossible."""
    return [
        predict(replace(setup, way="blocks", ranks=SHARDED_OVER)).peak,
        predict(replace(setup, checkpointing=True)).peak,
        predict(replace(setup, parts=PARTS)).peak if setup.batch_size >= PARTS else None,
    ]


def advice(peak: int, with_cures: list[int | None]) -> str:
    """Return which cures take at least a quarter off the peak, the one that takes most first."""
    found = sorted((least, name) for name, least in zip(ADVICE, with_cures, strict=True) if least is not None)
    return ", ".join(name for least, name in found if least <= (1 - HELPS) * peak) or "no cure alone"


def measure_on_gpu(setup: Setup, snapshot: str = "") -> int | None:
    """Return the most bytes of tensors in a real step on a GPU; None if its memory is not enough.

    Args:
        setup: what to train.
        snapshot: file for a snapshot of each allocation in the step.
    """
    gc.collect()  # what is left of the row before
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    try:
        with torch.device("cuda"):
            model = build(setup)
            optimizer = torch.optim.AdamW(model.parameters(), **UPDATES[setup.update])
            inputs, targets = workload(setup.model).batch(setup.batch_size)
        for number in range(3):  # the optimizer's state is made in the first step; libraries are loaded there as well
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.memory._record_memory_history()
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=setup.precision == "bf16"):
                outputs = model(inputs)
            LESSON.loss_function(outputs.float(), targets).backward()
            optimizer.step()
        peak = torch.cuda.max_memory_allocated() - before
        if snapshot:
            torch.cuda.memory._dump_snapshot(snapshot)
        return peak
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def store_measured(setups: dict[str, Setup]) -> None:
    """Make each step on a GPU, and store its peak."""
    measure_on_gpu(next(iter(setups.values())))  # so that the memory that libraries keep is not counted below
    rows: list[list[results.Cell]] = []
    for name, setup in setups.items():
        found = measure_on_gpu(setup, f"memory_{setup.model}_{setup.batch_size}_{setup.precision}.pickle")
        rows.append([name, "out of memory" if found is None else found / GB])
    formats = {"peak": ",.3f"}
    results.store("allocated", title="Really allocated", columns=["GB", "peak"], rows=rows, formats=formats, unit="GB")


def main() -> None:
    """Compute, on a GPU also measure; store the tables."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=words(WORKLOADS), metavar="MODEL,...", help=f"some of {', '.join(WORKLOADS)}")
    parser.add_argument("--batch_size", type=numbers, default=[1, 16, 64], metavar="N,...", help="default: 1,16,64")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--update", choices=UPDATES, default="foreach", help="the optimizer's (default: %(default)s)")
    arguments = parser.parse_args()
    rows = ROWS
    if arguments.model:
        rows = [(model, batch, arguments.precision) for model in arguments.model for batch in arguments.batch_size]
    setups = {
        f"`{model}`, batch {batch}, {precision}": Setup(
            model=model, batch_size=batch, precision=precision, update=arguments.update
        )
        for model, batch, precision in rows
    }
    found = {name: predict(setup) for name, setup in setups.items()}
    columns = ["weights", *SHOWN[1:], "peak"]
    results.store(
        "what_fills_memory",
        title="What the memory holds at the moment of the step when it holds most",
        columns=["GB", *columns],
        rows=[[name, *(one.parts[part] / GB for part in SHOWN), one.peak / GB] for name, one in found.items()],
        formats=dict.fromkeys(columns, ",.3f"),
        unit="GB, computed",
        spread="AdamW",
    )
    helps: list[list[results.Cell]] = []
    for name, one in found.items():
        peaks = cures(setups[name])
        state = STATE_BYTES * one.parameters / one.peak
        in_gb = ["-" if peak is None else peak / GB for peak in peaks]
        helps.append([name, one.peak / GB, one.moment, state, *in_gb, advice(one.peak, peaks)])
    columns = [f"sharded over {SHARDED_OVER} ranks", "recomputed", f"in {PARTS} parts"]
    results.store(
        "what_helps",
        title="When that moment is, the share of the state (16 bytes per parameter), and the peak with each cure",
        columns=["GB", "peak", "it is in", "state", *columns, "what helps"],
        rows=helps,
        formats={"peak": ",.3f", "state": ".0%"} | dict.fromkeys(columns, ",.3f"),
        unit="GB, computed",
    )
    if torch.cuda.is_available():
        store_measured(setups)
    print(f"\n{NOT_COUNTED}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
