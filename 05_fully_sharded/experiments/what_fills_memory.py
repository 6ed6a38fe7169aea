"""What fills my memory? Weights, gradients, optimizer state, activations: a table, without a GPU, in seconds.

    python experiments/what_fills_memory.py                                        # the lesson's models
    python experiments/what_fills_memory.py --model unet3d --batch_size 1,16,64    # one model, with these batches

You should see that the *state* (weights, gradients and the two moments of AdamW: 16 bytes per parameter) is the same
with every batch, and that the rest grows with the batch. Where the state is most of it, shard it (FSDP2). Where
it is the activations, recompute them (activation checkpointing), accumulate gradients, or take a smaller batch. On a
GPU, each step is really made as well: the peak that PyTorch's allocator measures stands beside the computed one, and a
snapshot is written for https://docs.pytorch.org/memory_viz.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

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
MOSTLY = 0.6
"""from this share of the peak on, one thing fills the memory; below it, and above 1 minus this, two things do"""


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


def cure(share: float) -> str:
    """Return what to do if so large a share of the peak is state."""
    if share >= MOSTLY:
        return "shard the state"
    if share <= 1 - MOSTLY:
        return "recompute, accumulate, or a smaller batch"
    return "both help"


def row_of(setup: Setup, found: Prediction) -> dict[str, Any]:
    """Return a row of the table as numbers."""
    share = STATE_BYTES * found.parameters / found.peak
    return {
        "model": setup.model,
        "batch_size": setup.batch_size,
        "precision": setup.precision,
        "parameters": found.parameters,
        "peak": found.peak,
        "parts": found.parts,
        "state_share": share,
        "cure": cure(share),
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


def in_gb(count: float) -> str:
    """Return a number of bytes in GB, to a thousandth of one."""
    return f"{count / GB:.3f}"


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    measured = any("measured" in row for row in rows)
    shown = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "batch")
    cells = []
    for row in rows:
        on_gpu = [in_gb(row["measured"]) if row.get("measured") else "out of memory"] if measured else []
        cells.append(
            [
                row["model"],
                f"{row['parameters'] / 1e6:,.1f} M",
                str(row["batch_size"]),
                row["precision"],
                *(in_gb(row["parts"][part]) for part in shown),
                in_gb(row["peak"]),
                *on_gpu,
                f"{row['state_share']:.0%}",
                row["cure"],
            ]
        )
    header = ["model", "parameters", "batch", "format", "weights", *shown[1:], "peak"]
    header += [*(["on this GPU"] if measured else []), "state", "what helps"]
    print("GB (10^9 bytes) at the moment when most is in use\n")
    print(format_table(header, cells, left=(0, len(header) - 1)))


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
