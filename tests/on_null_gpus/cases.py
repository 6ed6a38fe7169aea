"""Run the lessons on null GPUs and on the CPU, and compare the losses.

    python tests/on_null_gpus/cases.py                        # all cases: some minutes on two cores
    python tests/on_null_gpus/cases.py --only "05"            # cases with this in their name
    python tests/on_null_gpus/cases.py --json cases.json      # the table as a file too

A null GPU (tools/nullgpu) runs PyTorch's CUDA code, and the CPU computes the values. Therefore the losses must be equal
to the losses of a CPU run. Launches, replays of a CUDA graph, waits, copies between CPU and GPU, and collectives
are counted on rank 0 and per update, as means over the updates after the first 11.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "data"), str(REPOSITORY / "tests")]

import quick_python  # noqa: E402
from sources import collect, generate, pack  # noqa: E402

DIGITS = "--limit_train 384 --limit_val 64 --batch_size 16 --num_workers 0 --dropout false --log_interval 3"
DIGITS_DROPOUT = DIGITS.replace("--dropout false", "--dropout true")
UNET = (
    "--config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml --unet_width 8 --train_crops 256 "
    "--val_crops 32 --global_batch_size 8 --loader device --epochs 1 --log_interval 4"
)
GPT = (
    "--width 64 --depth 2 --sequence_length 32 --limit_train 192 --limit_val 16 --batch_size 8 --num_workers 0 "
    "--log_interval 3"
)
ON_CPU = {"--cuda_graph true": "", "--cudnn_benchmark true": "", "--precision tf32": "--precision fp32"}
"""flags that only a GPU has, and what a CPU run gets in their place"""
ROUNDING = 1e-5
"""largest relative difference of losses that are computed in float32, in another order"""
SIXTEEN_BITS = 2e-2
"""the same in 16 bits: autocast for CUDA converts other operations than autocast for the CPU"""
OTHER_NUMBERS = 0.2
"""the same with dropout, for which a GPU draws other random numbers than the CPU"""
STOPPED_IN_STEP = 2
TIMEOUT = 600
"""seconds"""


@dataclass(frozen=True)
class Case:
    """A run of a lesson on null GPUs, and how near its losses are to those of the CPU."""

    name: str
    lesson: str
    flags: str
    gpus: int = 1
    torchrun: bool = False
    difference: float = ROUNDING
    """largest relative difference of a loss"""
    values: bool = True
    """false: nothing is computed, so the run only has to end"""
    cpu_lesson: str = ""
    """the lesson that the CPU runs, if it is another one"""
    stopped: str = ""
    """the case that this one stops in its first epoch and resumes; the losses must be the same"""
    like: str = ""
    """the case on null GPUs that must have the same losses, in place of a run on the CPU"""
    quick: bool = False
    """in make test"""


CASES = [
    Case("01", "01_single_gpu", DIGITS),
    Case("01, device loader, adadelta", "01_single_gpu", f"{DIGITS} --loader device --optimizer adadelta"),
    Case(
        "01, memory loader, pageable",
        "01_single_gpu",
        f"{DIGITS} --loader memory --non_blocking false --pin_memory false",
    ),
    Case("01, map loader, two workers", "01_single_gpu", DIGITS.replace("--num_workers 0", "--num_workers 2")),
    Case("01, shards loader", "01_single_gpu", f"{DIGITS} --loader shards"),
    Case("01, memory loader", "01_single_gpu", f"{DIGITS} --loader memory"),
    Case("01, device loader", "01_single_gpu", f"{DIGITS} --loader device"),
    Case("01, cifar10", "01_single_gpu", f"{DIGITS} --dataset cifar10 --model cifar_cnn --loader memory"),
    Case("01, monitor", "01_single_gpu", f"{DIGITS} --monitor true"),
    Case("01, trace", "01_single_gpu", f"{DIGITS} --trace true"),
    Case("02, two GPUs, as lesson 01", "02_dataparallel", DIGITS, gpus=2, cpu_lesson="01_single_gpu"),
    Case("03, one rank", "03_ddp", DIGITS),
    Case("03, two ranks", "03_ddp", f"{DIGITS} --batch_size 8", gpus=2, torchrun=True),
    Case("03, four ranks", "03_ddp", f"{DIGITS} --batch_size 4", gpus=4, torchrun=True),
    Case(
        "03, two ranks, stopped",
        "03_ddp",
        f"{DIGITS} --batch_size 8",
        gpus=2,
        torchrun=True,
        difference=0,
        stopped="03, two ranks",
    ),
    Case("04, fp32", "04_mixed_precision", f"{UNET} --precision fp32"),
    Case("04, tf32", "04_mixed_precision", f"{UNET} --precision tf32"),
    Case(
        "04, bf16, all options but compile",
        "04_mixed_precision",
        f"{UNET} --precision bf16 --channels_last true --fused true --cudnn_benchmark true "
        "--gradient_as_bucket_view true",
        difference=SIXTEEN_BITS,
    ),
    Case("04, fp16, not fused", "04_mixed_precision", f"{UNET} --precision fp16", difference=SIXTEEN_BITS),
    Case(
        "04, fp16, fused, CUDA graph",
        "04_mixed_precision",
        f"{UNET} --precision fp16 --fused true --cuda_graph true",
        difference=SIXTEEN_BITS,
    ),
    Case(
        "04, bf16, CUDA graph, two ranks",
        "04_mixed_precision",
        f"{UNET} --precision bf16 --cuda_graph true",
        gpus=2,
        torchrun=True,
        difference=SIXTEEN_BITS,
    ),
    Case(
        "04, digits, CUDA graph, sgd",
        "04_mixed_precision",
        f"{DIGITS} --loader device --precision bf16 --cuda_graph true --optimizer sgd --fused true",
        difference=SIXTEEN_BITS,
    ),
    Case(
        "04, short, CUDA graph",
        "04_mixed_precision",
        f"{DIGITS} --limit_train 224 --precision fp32 --cuda_graph true --fused true",
        quick=True,
    ),
    Case("04, compiled, without values", "04_mixed_precision", f"{DIGITS} --compile default", values=False),
    Case("05, fp32", "05_fully_sharded", f"{GPT} --precision fp32"),
    Case(
        "05, bf16, async, recomputed, accumulated",
        "05_fully_sharded",
        f"{GPT} --precision bf16 --fused true --async_save true --save_interval 4 --activation_checkpointing true "
        "--accumulate 2",
        difference=SIXTEEN_BITS,
    ),
    Case(
        "05, short, bf16, async, recomputed, accumulated",
        "05_fully_sharded",
        f"{GPT} --limit_train 40 --precision bf16 --async_save true --save_interval 3 --activation_checkpointing true "
        "--accumulate 2",
        difference=SIXTEEN_BITS,
        quick=True,
    ),
    Case(
        "05, two ranks, fp16",
        "05_fully_sharded",
        f"{GPT} --batch_size 4 --precision fp16 --save_interval 4 --sample 20",
        gpus=2,
        torchrun=True,
        difference=SIXTEEN_BITS,
    ),
    Case(
        "05, two ranks, bf16, async",
        "05_fully_sharded",
        f"{GPT} --batch_size 4 --precision bf16 --fused true --async_save true --save_interval 4",
        gpus=2,
        torchrun=True,
        difference=SIXTEEN_BITS,
    ),
    Case("05, four ranks", "05_fully_sharded", f"{GPT} --batch_size 2", gpus=4, torchrun=True),
    Case("05, HSDP, 2 x 2 ranks", "05_fully_sharded", f"{GPT} --batch_size 2 --replicas 2", gpus=4, torchrun=True),
    Case(
        "05, two ranks, bf16, async, stopped",
        "05_fully_sharded",
        f"{GPT} --batch_size 4 --precision bf16 --fused true --async_save true --save_interval 4",
        gpus=2,
        torchrun=True,
        difference=0,
        stopped="05, two ranks, bf16, async",
    ),
    Case("01, dropout", "01_single_gpu", DIGITS_DROPOUT, difference=OTHER_NUMBERS),
    Case(
        "02, two GPUs, dropout",
        "02_dataparallel",
        DIGITS_DROPOUT,
        2,
        difference=OTHER_NUMBERS,
        cpu_lesson="01_single_gpu",
    ),
    Case(
        "03, two ranks, dropout",
        "03_ddp",
        f"{DIGITS_DROPOUT} --batch_size 8",
        gpus=2,
        torchrun=True,
        difference=OTHER_NUMBERS,
    ),
    Case(
        "03, two ranks, dropout, stopped",
        "03_ddp",
        f"{DIGITS_DROPOUT} --batch_size 8",
        gpus=2,
        torchrun=True,
        difference=0,
        stopped="03, two ranks, dropout",
    ),
    Case(
        "04, dropout", "04_mixed_precision", f"{DIGITS_DROPOUT} --precision fp32 --fused true", difference=OTHER_NUMBERS
    ),
    Case(
        "04, dropout, CUDA graph",
        "04_mixed_precision",
        f"{DIGITS_DROPOUT} --precision fp32 --fused true --cuda_graph true",
        like="04, dropout",
    ),
]


def named(name: str) -> Case:
    """Return the case of this name."""
    (case,) = (case for case in CASES if case.name == name)
    return case


@dataclass
class Run:
    """What a run of a lesson left behind."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    losses: list[float]
    """of training and validation in each epoch; empty after an error"""
    report: dict[str, Any]
    """what rank 0 noted for the report of the null GPU; empty on the CPU"""

    @property
    def reason(self) -> str:
        """The line that says why it failed."""
        words = ("Error", "error:", "Exception")
        lines = [line for line in self.stderr.splitlines() if any(word in line for word in words)]
        lines = [line for line in lines if "traceback" not in line and "elastic" not in line]
        return lines[-1] if lines else self.stderr[-300:]


def make_data(folder: Path) -> None:
    """Generate a little of each data set, unless it is there."""
    folder.mkdir(exist_ok=True)
    for name in ("mnist", "cifar10"):
        generate(name, folder, train_samples=640, val_samples=128)
        pack(name, folder)
    generate("nbody", folder, cells=32)
    collect(folder, REPOSITORY / "workshop")


@functools.cache
def run_on_cpu(case: Case, data: Path, repository: Path = REPOSITORY) -> Run:
    """Run the case's lesson, of this or another copy of the repository, with the same number of ranks on the CPU."""
    flags = case.flags
    for flag, instead in ON_CPU.items():
        flags = flags.replace(flag, instead)
    name, *options = torchrun(case.gpus) if case.torchrun else ["python"]
    words = [str(quick_python.commands() / name), *options, "train.py", *flags.split()]
    with tempfile.TemporaryDirectory() as folder:
        return start(words, repository, case.cpu_lesson or case.lesson, data, Path(folder), CUDA_VISIBLE_DEVICES="")


@functools.cache
def run_on_null_gpu(case: Case, data: Path, repository: Path = REPOSITORY) -> Run:
    """Run the case on null GPUs; with ``case.stopped``, return the resumed run if both runs went well."""
    with tempfile.TemporaryDirectory() as folder:

        def run(script: list[str], *more: str) -> Run:
            options = ["--gpus", str(case.gpus), *(["--values"] if case.values else [])]
            ranks = ["-m", "torch.distributed.run", *torchrun(case.gpus)[1:]] if case.torchrun else []
            words = null_gpu(*options, "python", *ranks, *script, *case.flags.split(), *more)
            return start(words, repository, case.lesson, data, Path(folder), NULLGPU_STRICT="1")

        if not case.stopped:
            return run(["train.py"])
        fault = [
            "all",
            "workshop.log.Log.start_step",
            str(STOPPED_IN_STEP),
            "SIGUSR1",
        ]  # a lesson calls it in each step
        stopped = run([str(REPOSITORY / "tests/with_fault.py"), *fault, "train.py"])
        if stopped.status == 0:
            assert "stopped and saved in epoch 1" in stopped.stdout, stopped.stdout
            return run(["train.py"], "--resume", "true")
        return stopped


def torchrun(ranks: int) -> list[str]:
    """Return the words that start ranks on this machine."""
    return ["torchrun", "--standalone", f"--nproc-per-node={ranks}"]


def null_gpu(*words: str) -> list[str]:
    """Return the words that run a command on null GPUs."""
    return [sys.executable, "-m", "nullgpu", "--beside_gpu", *words]


def environment(**more: str) -> dict[str, str]:
    """Return an environment for a command: with one thread per process, and without what hides GPUs."""
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return env | {"OMP_NUM_THREADS": "1"} | more


def start(words: list[str], repository: Path, lesson: str, data: Path, folder: Path, **more: str) -> Run:
    """Run a command in a lesson's folder and wait for it; ``folder`` holds the run and the report."""
    report = folder / "report"
    report.mkdir(exist_ok=True)
    env = environment(PYTHONPATH=str(repository), NULLGPU_REPORT=str(report), **more)
    words = [*words, "--data_dir", str(data), "--run_dir", str(folder / "run")]
    began = time.perf_counter()
    done = subprocess.run(words, cwd=repository / lesson, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    seconds = time.perf_counter() - began
    epochs = read(folder / "run/summary.json").get("epochs", []) if done.returncode == 0 else []
    losses = [epoch[name] for epoch in epochs for name in ("train_loss", "val_loss")]
    return Run(done.returncode, done.stdout, done.stderr, seconds, losses, read(report / "rank0.json"))


def read(file: Path) -> dict[str, Any]:
    """Return what is in a JSON file; nothing if it is not there."""
    return json.loads(file.read_text()) if file.exists() else {}


def expected(case: Case, data: Path) -> Run:
    """Return the run whose losses the case must have."""
    if other := case.stopped or case.like:
        return run_on_null_gpu(named(other), data)
    return run_on_cpu(case, data)


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def row_of(case: Case, data: Path) -> dict[str, Any]:
    """Run a case; return its row of the table."""
    run = run_on_null_gpu(case, data)
    row: dict[str, Any] = {"case": case.name, "seconds": run.seconds}
    if run.status:
        return row | {"error": f"status {run.status}: {run.reason}"}
    step = run.report["step"]
    row |= {name: step[name] for name in ("launches", "waits", "collectives")}
    row |= {"replays": step["graph_launches"], "copies": step["copies_to_gpu"] + step["copies_from_gpu"]}
    row["peak"] = run.report["peak"]
    if case.values:
        other = expected(case, data)
        if other.status:
            return row | {"error": f"without null GPUs, status {other.status}: {other.reason}"}
        row["difference"] = largest_difference(run.losses, other.losses)
        if row["difference"] > case.difference:
            row["error"] = f"losses {run.losses} instead of {other.losses}"
    return row


HEADER = ("case", "launches", "replays", "waits", "copies", "collectives", "peak", "losses differ by", "seconds")
WIDTHS = (49, 10, 9, 7, 8, 13, 12, 18, 9)


def line_of(row: dict[str, Any]) -> str:
    """Return a row of the table as text."""
    counters = [f"{row[name]:.1f}".removesuffix(".0") if name in row else "" for name in HEADER[1:6]]
    peak = f"{row['peak'] / 1e6:.1f} MB" if "peak" in row else ""
    difference = f"{row['difference']:.0e}" if "difference" in row else "no values" if "peak" in row else ""
    cells = [row["case"], *counters, peak, difference, f"{row['seconds']:.0f}"]
    return "".join(one.ljust(width) for one, width in zip(cells, WIDTHS, strict=True)) + row.get("error", "")


def main() -> int:
    """Print the table; return 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="part of the names of the cases to run")
    parser.add_argument(
        "--store", action="store_true", help="store the table in results/, for the page of the null GPU"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the rows")
    arguments = parser.parse_args()
    rows = []
    print("".join(one.ljust(width) for one, width in zip(HEADER, WIDTHS, strict=True)))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            make_data(data)
        for case in CASES:
            if arguments.only in case.name:
                rows.append(row_of(case, data) | {"flags": case.flags})
                print(line_of(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.store:
        store(rows)
    return int(any("error" in row for row in rows))


def store(rows: list[dict[str, Any]]) -> None:
    """Store the table for the page of the null GPU."""
    from lab import results

    columns = {"peak, MB": "peak", "largest difference of the losses": "difference", "seconds": "seconds"}
    counted = ("launches", "replays", "waits", "copies", "collectives")
    table: list[list[results.Cell]] = []
    for row in rows:
        if "error" in row:
            table.append([row["case"], *[""] * len(counted), "", row["error"], row["seconds"]])
            continue
        difference = f"{row['difference']:.0e}" if "difference" in row else "no values"
        table.append([row["case"], *(row[name] for name in counted), row["peak"] / 1e6, difference, row["seconds"]])
    results.store(
        "nullgpu_cases",
        title="Lessons on the null GPU",
        columns=["", *counted, *columns],
        rows=table,
        formats=dict.fromkeys(counted, ",.1f") | {"peak, MB": ",.1f", "seconds": ",.0f"},
        spread="per update; relative difference to a run on the CPU",
    )


if __name__ == "__main__":
    sys.exit(main())
