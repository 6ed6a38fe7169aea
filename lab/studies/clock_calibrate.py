"""How much a trace of the user's own run is worth to the null GPU's clock: trainings on an H200.

    python lab/studies/gpu_trainings.py --folder DIR          # on the GPU: writes DIR/trainings.json
    python lab/studies/clock_calibrate.py DIR/trainings.json  # here, without a GPU: some minutes

DIR/trainings.json has, for each training, the milliseconds of an update and the operations that took the longest. The
trainings are profiled on a null GPU, which gives traces of torch.profiler with all operations, and the times of the
operations on the real GPU are written into them. (Not of copies: the file has the mean of their calls, and in the first
updates the weights were copied to the GPU.) Then each training is simulated without and with its trace.
"""

import json
import subprocess
import sys
import tempfile
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402
from lab.simulated import null_gpu  # noqa: E402

TRAININGS = {
    "ResNet-50, TF32, 256 images": "resnet50 tf32",
    "GPT-2 124M, bf16, 12 x 1,024 tokens": "gpt2 fast",
    "ViT, TF32, 16 samples": "vit tf32",
    "U-Net 3-D, TF32, 64 cubes": "unet tf32",
    "U-Net 3-D, fp32, 64 cubes": "unet fp32",
}
"""the names of the trainings, and theirs in the file of a GPU"""
PROFILE = """
import sys, torch
sys.path.insert(0, "lab/studies")
import clock_workloads
from torch.profiler import ProfilerActivity, profile
clock_workloads.STEPS = 1
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
    getattr(clock_workloads, sys.argv[1])(sys.argv[2])
profiler.export_chrome_trace(sys.argv[3])
"""


def run(*words: object) -> None:
    """Run a command to its end."""
    done = subprocess.run([*map(str, words)], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(map(str, words))}: {done.stderr[-1500:]}")


def with_times(trace: dict[str, Any], measured: list[list[Any]]) -> tuple[dict[str, Any], float]:
    """Return the trace with the kernels of a real GPU, and the milliseconds of an update that they have.

    An operation of whose kernels not all are known loses its sizes, so that it is not looked up.

    Args:
        trace: of a null GPU, whose kernels have no duration.
        measured: name, sizes, calls and microseconds of the operations of a GPU.
    """
    rows = [row for row in measured if row[1] not in ("", "[]") and row[0] != "aten::copy_"]
    times = {(name, sizes): us / calls for name, sizes, calls, us in rows}
    launching = {event["args"].get("External id") for event in trace["traceEvents"] if event.get("cat") == "kernel"}
    events = [event for event in trace["traceEvents"] if event.get("cat") != "kernel"]
    kernels: list[dict[str, Any]] = []
    open_: list[dict[str, Any]] = []  # the operations around the current one
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    for event in sorted(operations, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        while open_ and (open_[-1]["tid"] != event["tid"] or event["ts"] >= open_[-1]["ts"] + open_[-1]["dur"]):
            open_.pop()
        open_.append(event)
        number = event["args"].get("External id")
        if number not in launching or event["name"] == "aten::copy_":
            continue
        us = times.get((event["name"], json.dumps(event["args"].get("Input Dims"))))
        if us is None:
            for outer in open_:
                outer["args"].pop("Input Dims", None)
        else:
            kernel = {"ph": "X", "cat": "kernel", "name": "measured", "ts": event["ts"], "dur": us}
            kernels.append(kernel | {"args": {"External id": number}})
    return {"traceEvents": events + kernels}, sum(kernel["dur"] for kernel in kernels) / 1e3


def simulated(name: str, *options: object) -> dict[str, Any]:
    """Return the figures of a training on a simulated H200."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        command = null_gpu("--clock", "h200", *options, "--json", figures)
        run(*command, "python", "lab/studies/clock_workloads.py", *name.split())
        return json.loads(figures.read_text())["clock"]["ranks"][0]


def main() -> None:
    """Simulate each training without and with its trace, and store the table."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit("error: give the file trainings.json that lab/studies/gpu_trainings.py has written on a GPU")
    found = {row["name"]: row for row in json.loads(Path(sys.argv[1]).read_text())}
    rows: list[list[results.Cell]] = []
    for title, name in TRAININGS.items():
        measured = found[name]["ms"]
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            run(*null_gpu(), "python", "-c", PROFILE, *name.split(), trace)
            filled, known = with_times(json.loads(trace.read_text()), found[f"{name} by operation"]["ops"])
            trace.write_text(json.dumps(filled))
            plain, own = simulated(name), simulated(name, "--calibrate", trace)
        ratios = [1e3 * it["seconds"] * it["busy"] / measured for it in (plain, own)]
        rows.append([title, measured, known / measured, *ratios])
        print(*rows[-1], sep=" | ", flush=True)
    wrong = [exp(median(abs(log(row[column])) for row in rows)) for column in (3, 4)]  # type: ignore[arg-type]
    results.store(
        "clock_calibrate",
        title=f"A trace of the own run: wrong by {wrong[0]:.2f} in the median without it, by {wrong[1]:.2f} with it",
        columns=["training", "measured", "in the trace", "curves", "with the trace"],
        rows=rows,
        formats={"measured": ",.2f", "in the trace": ".0%", "curves": ".2f", "with the trace": ".2f"},
        unit="ms per update, and the time of the GPU in comparison with it",
        spread="in the trace: what the 60 longest operations that were listed take of an update",
        command="python lab/studies/clock_calibrate.py DIR/trainings.json",
    )


if __name__ == "__main__":
    main()
