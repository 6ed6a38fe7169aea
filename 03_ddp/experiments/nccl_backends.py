"""Do the all-reduces of DDP overlap with backward? It depends on which of torch's two NCCL backends carries them.

    python experiments/nccl_backends.py                  # two GPUs of this machine, one rank on each

From torch 2.15 on, the name "nccl" stands for a new backend; the workshop selects the former one. This traces a few
training steps with each. You should see what share of the time of the all-reduce kernels other kernels of backward ran
at the same time. Only the last bucket of a step cannot overlap, because it is ready when backward has ended.
"""

import argparse
import gzip
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from workshop.errors import UserError, run_reporting_user_errors
from workshop.measuring.flags import Parser, make_output_folder, require_positive
from workshop.measuring.launching import reason, torchrun
from workshop.measuring.records import write_record
from workshop.measuring.tables import format_table

LESSON = Path(__file__).resolve().parent.parent
RANKS = 2
BACKENDS = {"former": "0", "new": "1"}
"""values of TORCH_DIST_USE_NCCL2"""
Interval = tuple[float, float]
"""start and end in milliseconds"""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=256, help="samples per rank (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of each run; the last six count (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn (default: %(default)s)")
    parser.add_argument("--model", default="resnet50", help="any classifier (default: %(default)s)")
    parser.add_out("nccl_backends.json")
    arguments = parser.parse_args()
    require_positive(arguments, "batch_size", "rounds", "steps")
    return arguments


def merged(intervals: list[Interval]) -> list[Interval]:
    """Return what the intervals cover, as intervals in order that do not touch."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def common_milliseconds(one: list[Interval], other: list[Interval]) -> float:
    """Return how long both are under way."""
    pairs = ((a, b) for a in merged(one) for b in merged(other))
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def overlap(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return, per step of a Chrome trace, the milliseconds of all-reduces, of backward, and of both at the same time.

    Backward's kernels are those launched while ``loss.backward()`` ran, found by the correlation ids of launches and
    kernels: autograd launches them from a thread of its own, so the GPU's range "backward" does not hold them.

    Raises UserError: the trace has no kernels, or no all-reduces among those of backward.
    """

    def interval(event: dict[str, Any]) -> Interval:
        return event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000

    ranges = [
        interval(event) for event in events if (event.get("cat"), event["name"]) == ("user_annotation", "backward")
    ]
    launched = {
        event["args"]["correlation"]: event["ts"] / 1000
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    compute: list[Interval] = []
    all_reduces: list[Interval] = []
    for event in events:
        if event.get("cat") == "kernel":
            at = launched.get(event["args"]["correlation"], -1.0)
            if any(start <= at <= end for start, end in ranges):
                is_all_reduce = "nccl" in event["name"] and "AllReduce" in event["name"]
                (all_reduces if is_all_reduce else compute).append(interval(event))
    if not compute or not all_reduces:
        found = f"{len(ranges)} backward passes, {len(compute)} of their kernels and {len(all_reduces)} all-reduces"
        raise UserError(f"the trace has {found}: this machine does not let a profiler see its GPU, or one rank trained")
    times = {
        "all_reduce_milliseconds": sum(end - start for start, end in merged(all_reduces)),
        "backward_milliseconds": sum(end - start for start, end in merged(compute)),
        "both_milliseconds": common_milliseconds(all_reduces, compute),
    }
    return {name: milliseconds / len(ranges) for name, milliseconds in times.items()}


def trace(folder: Path, arguments: argparse.Namespace, variable: str) -> dict[str, Any]:
    """Trace two ranks into ``folder``, with TORCH_DIST_USE_NCCL2 as ``variable``; return backend and overlap.

    Of the two ranks the one counts whose all-reduces took less time: the other one waits in them for this one.

    Raises UserError: the ranks failed, or see `overlap`.
    """
    samples = RANKS * arguments.batch_size
    flags = ["--config", "../configs/cifar10.yaml", "--epochs", 1, "--loader", "memory", "--num_workers", 0]
    flags += ["--model", arguments.model, "--batch_size", arguments.batch_size, "--optimizer", "sgd"]
    flags += ["--limit_train", arguments.steps * samples, "--limit_val", samples, "--trace", "true"]
    command = [*torchrun(RANKS), "train.py", *map(str, flags), "--run_dir", str(folder)]
    environment = os.environ | {"TORCH_DIST_USE_NCCL2": variable}
    result = subprocess.run(command, cwd=LESSON, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise UserError(reason(result.stderr))
    found = []
    for rank in range(RANKS):
        with gzip.open(folder / f"rank{rank}.pt.trace.json.gz", "rt") as lines:
            found.append(overlap(json.load(lines)["traceEvents"]))
    summary = json.loads((folder / "summary.json").read_text())
    quickest = min(found, key=lambda times: times["all_reduce_milliseconds"])
    return {"backend_class": summary["backend_class"], **quickest}


def main() -> None:
    """Trace both backends in turn; print and save the overlap in each run."""
    arguments = parse_arguments()
    if (gpus := torch.cuda.device_count()) < RANKS:
        raise UserError(f"this compares two NCCL backends, which takes {RANKS} GPUs; this machine shows {gpus}")
    make_output_folder(arguments.out)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for name, variable in BACKENDS.items():
                rows.append({"backend": name, **trace(Path(folder, f"{name}_{number}"), arguments, variable)})
                if len(rows) == 2 and rows[0]["backend_class"] == rows[1]["backend_class"]:
                    raise UserError(f"torch {torch.__version__} has only one NCCL backend, {rows[0]['backend_class']}")
    keys = ("all_reduce_milliseconds", "backward_milliseconds", "both_milliseconds")
    cells = [
        (row["backend_class"], *(f"{row[key]:.2f}" for key in keys), f"{row[keys[2]] / row[keys[0]]:.0%}")
        for row in rows
    ]
    header = ["ms per step", "all-reduces", "backward", "both at once", "share of all-reduces"]
    print(format_table(header, cells))
    figures = {"batch_size": arguments.batch_size, "model": arguments.model, "rows": rows}
    write_record(arguments.out / "nccl_backends.json", torch.device("cuda"), figures)


if __name__ == "__main__":
    run_reporting_user_errors(main)
