"""What fills my memory? Weights, gradients, optimizer state, activations: a table, without a GPU, in seconds.

    python experiments/what_fills_memory.py                                        # the lesson's models
    python experiments/what_fills_memory.py --model unet3d --batch_size 1,16,64    # one model, with these batches

You should see that the *state* (weights, gradients and AdamW's two running means: 16 bytes per parameter) is the same
with every batch, and that the rest grows with the batch. Each row is then computed again with each of three cures: the
state sharded over 8 ranks (FSDP2), the activations recomputed (activation checkpointing), the batch computed in 4 parts
(gradient accumulation). The last column names those that take at least a quarter off the peak. On a GPU, each step is
really made as well: the peak that PyTorch's allocator measures stands beside the computed one, and a snapshot is
written for https://docs.pytorch.org/memory_viz.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lab import memory_tables
from lab.flags import Parser, make_output_folder
from lab.results import write_results
from lab.tables import format_table
from memory_model import (
    CLASSIFIERS,
    LESSON,
    NOT_COUNTED,
    STATE_BYTES,
    UPDATES,
    WORKLOADS,
    Prediction,
    Setup,
    build,
    predict,
    private_tools,
    workload,
)
from will_it_fit import GB, numbers, words
from workshop.entry import run_reporting_user_errors
from workshop.hardware import pick_device

ROWS = (
    ("vit", 64, "fp32"),
    ("unet3d", 1, "fp32"),
    ("unet3d", 16, "fp32"),
    ("unet3d", 64, "fp32"),
    ("unet3d", 64, "bf16"),
    ("vit3d", 4, "bf16"),
)
"""model, batch and precision of each row without flags"""
SHARDED_OVER, PARTS = 8, 4
"""ranks, and parts of a batch, of the cures that are tried; `lab/memory_tables.py` names them"""


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    known = (*WORKLOADS, *CLASSIFIERS)
    parser.add_argument("--model", type=words(known), metavar="MODEL,...", help=f"some of {', '.join(known)}")
    parser.add_argument(
        "--batch_size", type=numbers(int), default=[1, 16, 64], metavar="N,...", help="default: 1,16,64"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--update", choices=UPDATES, default="foreach", help="the optimizer's (default: %(default)s)")
    parser.add_switch("--activation_checkpointing", "as the lesson's flag")
    parser.add_out("what_fills_memory.json, and on a GPU snapshots")
    return parser.parse_args()


def setups(arguments: argparse.Namespace) -> list[Setup]:
    """Return what the table is made of."""
    rows = ROWS
    if arguments.model:
        rows = [(model, batch, arguments.precision) for model in arguments.model for batch in arguments.batch_size]
    same = {"update": arguments.update, "checkpointing": arguments.activation_checkpointing}
    return [Setup(model=model, batch_size=batch, precision=kind, **same) for model, batch, kind in rows]


def cures(setup: Setup) -> dict[str, int | None]:
    """Return the peak in bytes with each cure; None where it is impossible."""
    blocks = has_blocks(setup.model)
    sharded = replace(setup, way="blocks" if blocks else "root", ranks=SHARDED_OVER)
    return {
        memory_tables.SHARDED: predict(sharded).peak,
        memory_tables.RECOMPUTED: predict(replace(setup, checkpointing=True)).peak if blocks else None,
        memory_tables.PARTS: predict(replace(setup, parts=PARTS)).peak if setup.batch_size >= PARTS else None,
    }


def has_blocks(model: str) -> bool:
    """Return whether a model has blocks that can be sharded or computed again one by one."""
    with private_tools().FakeTensorMode():
        return bool(LESSON.blocks_of(build(Setup(model=model, depth=1 if workload(model).depth else 0))))


def row_of(setup: Setup, found: Prediction) -> dict[str, Any]:
    """Return a row of the tables as numbers."""
    return {
        "model": setup.model,
        "batch_size": setup.batch_size,
        "precision": setup.precision,
        "parameters": found.parameters,
        "peak": found.peak,
        "parts": found.parts,
        "moment": found.moment,
        "state_share": STATE_BYTES * found.parameters / found.peak,
        "cures": cures(setup),
        "cpu_seconds": found.seconds,
    }


def measure_on_gpu(setup: Setup, device: torch.device, snapshot: Path) -> int | None:
    """Return the most bytes of tensors in a real step on a GPU; None if its memory is not enough.

    Args:
        setup: what to train.
        device: the GPU.
        snapshot: file for a snapshot of each allocation in the step.
    """
    before = torch.cuda.memory_allocated(device)
    try:
        with device:
            model = build(setup)
            optimizer = torch.optim.AdamW(model.parameters(), **UPDATES[setup.update])
            inputs, targets = workload(setup.model).batch(setup.batch_size)
        for number in range(3):  # the optimizer's state is made in the first step; libraries are loaded there as well
            if number == 2:
                torch.cuda.reset_peak_memory_stats(device)
                torch.cuda.memory._record_memory_history()
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=setup.precision == "bf16"):
                outputs = model(inputs)
            LESSON.loss_function(outputs.float(), targets).backward()
            optimizer.step()
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.memory._dump_snapshot(str(snapshot))
        return peak
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the tables."""
    print("What the memory holds at the moment of the step when it holds most\n")
    print(format_table(*memory_tables.what_fills(rows)))
    print("\nWhen that moment is, the share of the state (16 bytes per parameter), and the peak with each cure\n")
    helps, cells = memory_tables.what_helps(rows)
    print(format_table(helps, cells, left=(0, 2, len(helps) - 1)))
    if any("measured" in row for row in rows):
        print("\nReally allocated on this GPU\n")
        measured = [f"{row['measured'] / GB:.3f}" if row["measured"] else "out of memory" for row in rows]
        names = map(memory_tables.what_is_trained, rows)
        print(format_table(["GB", "peak"], [[name, peak] for name, peak in zip(names, measured, strict=True)]))


def main() -> None:
    """Compute, on a GPU also measure; print and save."""
    arguments = parse_arguments()
    make_output_folder(arguments.out)
    device = pick_device()
    rows = []
    for setup in setups(arguments):
        row = row_of(setup, predict(setup))
        if device.type == "cuda":
            snapshot = arguments.out / f"{setup.model}_{setup.batch_size}_{setup.precision}.pickle"
            row["measured"] = measure_on_gpu(setup, device, snapshot)
            torch.cuda.empty_cache()
        rows.append(row)
    print_rows(rows)
    if device.type != "cuda":
        print("\nOn a GPU, the peak that is really allocated would stand beside the computed one; there is none here.")
    print(f"\n{NOT_COUNTED}")
    file = arguments.out / "what_fills_memory.json"
    write_results(file, device, {"update": arguments.update, "rows": rows})
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
