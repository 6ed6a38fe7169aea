"""Run the lessons on a GPU, and compare them with null GPUs: waits, copies, replays, launches, memory and losses.

    python lab/studies/gpu_cases.py null --null_half FILE                 # first, on a machine with a C++ compiler
    python lab/studies/gpu_cases.py gpu --null_half FILE --folder DIR     # on the GPU

A GPU machine often has no compiler, so the null GPU's half is a file that can be carried there. If a case is missing in
the file, `gpu` runs it on a null GPU too, where one can be compiled. Each case is stored at once, and not run again.
Two ranks share one GPU: NCCL takes them for two nodes. Small cases are not timed, so several run at a time.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests/on_null_gpus")]

import cases  # noqa: E402

from lab import results  # noqa: E402
from lab.flags import Parser  # noqa: E402
from lab.launching import free_port, reason  # noqa: E402
from workshop.errors import UserError, run_reporting_user_errors  # noqa: E402
from workshop.hardware import available_cpus  # noqa: E402
from workshop.jsonfile import read_json, write_json  # noqa: E402
from workshop.paths import default_data_dir  # noqa: E402

SKIPPED = 11
"""updates before the counted ones, where the null GPU's half does not say it"""
OF_CASE, OF_LARGE = 60.0, 40.0
"""seconds after which a case is cut"""
FIVE = "05_fully_sharded"
GPT = "--sequence_length 1024 --precision bf16"
BOXES = "--config ../configs/unet3d.yaml --loader device --train_crops 1280 --val_crops 64 --epochs 1"
GPT_1B = f"--model gpt_1b {GPT} --batch_size 4 --limit_train 64 --limit_val 4"
LARGE = (
    cases.Case(
        "GPT-2 124M, bf16",
        FIVE,
        f"--model gpt2_124m {GPT} --batch_size 8 --limit_train 256 --limit_val 8",
        values=False,
    ),
    cases.Case("GPT 1B, bf16", FIVE, GPT_1B, values=False),
    cases.Case("GPT 1B, bf16, recomputed", FIVE, f"{GPT_1B} --activation_checkpointing true", values=False),
    cases.Case("U-Net, fp32", "04_mixed_precision", f"{BOXES} --precision fp32", values=False),
    cases.Case(
        "U-Net, bf16", "04_mixed_precision", f"{BOXES} --precision bf16 --channels_last true --fused true", values=False
    ),
    cases.Case(
        "ResNet-50",
        "01_single_gpu",
        "--config ../configs/cifar10.yaml --model resnet50 --batch_size 32 --limit_train 640 --limit_val 128 "
        "--epochs 1 --num_workers 0 --loader memory",
        values=False,
    ),
)
"""trainings that fill a GPU; on null GPUs without values"""
Row = dict[str, Any]


def chosen_cases(large: bool, only: str) -> list[cases.Case]:
    """Return the cases of one or two ranks; a resumed run is compared by the tests, and lesson 02 has no ranks."""
    if large:
        return [case for case in LARGE if only in case.name]
    # The profiler runs once in a process, and a GPU draws other random numbers than a CPU.
    left_out = ("monitor", "trace", "dropout")
    return [
        case
        for case in cases.CASES
        if case.values and not case.stopped and case.gpus <= 2 and not case.lesson.startswith("02")
        if only in case.name and not any(word in case.name for word in left_out)
    ]


# The null GPU's half.


def null_row(case: cases.Case, data: Path) -> Row:
    """Run a case on null GPUs and, if they compute its values, on the CPU."""
    run = cases.run_on_null_gpu(case, data)
    row: Row = {"lesson": case.lesson, "flags": case.flags, "gpus": case.gpus, "status": run.status}
    row |= {name: run.report.get(name) for name in ("step", "updates", "counted", "peak", "reserved", "torch")}
    row |= {"losses": run.losses, "reason": run.reason if run.status else ""}
    return row | {"cpu": cases.run_on_cpu(case, data).losses} if case.values else row


def is_known(case: cases.Case, known: dict[str, Row]) -> bool:
    """Return whether the null GPU's half has this case."""
    row = known.get(case.name, {})
    return row.get("status") == 0 and row["flags"] == case.flags


def why_no_null_gpus() -> str:
    """Return why there can be no null GPUs on this machine; "" if there can."""
    asked = subprocess.run(cases.null_gpu("true"), env=cases.environment(), capture_output=True, text=True)
    return reason(asked.stderr) if asked.returncode else ""


def add_null_rows(wanted: list[cases.Case], file: Path, data: Path) -> None:
    """Run what is missing in the file, and store each case at once."""
    known = read_json(file)
    for case in wanted:
        if is_known(case, known):
            continue
        began = time.monotonic()
        known[case.name] = null_row(case, data)
        write_json(file, known)
        why = known[case.name]["reason"]
        print(f"null GPU: {case.name:45} {time.monotonic() - began:6.1f} s  {why}", flush=True)


# The GPU's half.


def gpu_row(case: cases.Case, known: Row, data: Path, gpu: str, count: int, limit: float) -> Row:
    """Run a case on the GPU, its ranks on one GPU if there are not enough."""
    began = time.monotonic()
    on_null = gpu.startswith("null GPU")  # CUPTI of a null GPU counts nothing, but it has counters of its own
    skip = 0 if on_null or not case.values else known["updates"] - known["counted"] if known.get("updates") else SKIPPED
    port = str(free_port())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = []
        for rank in range(case.gpus):
            report = folder / f"report{rank}"
            report.mkdir()
            env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES" or value}
            env |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": path_of_python(), "NULLGPU_REPORT": str(report)}
            if case.gpus > 1:
                env |= {"RANK": str(rank), "WORLD_SIZE": str(case.gpus), "GROUP_RANK": str(rank)}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo"}
                # NCCL refuses two ranks of a host on one GPU, but these are two hosts to it.
                sharing = {"LOCAL_RANK": "0", "NCCL_HOSTID": f"node{rank}", "NCCL_IB_DISABLE": "1"}
                env |= sharing if count < case.gpus else {"LOCAL_RANK": str(rank)}
            counting = [str(Path(__file__).with_name("gpu_counts.py")), str(folder / f"rank{rank}.json"), str(skip)]
            folders = ["--data_dir", str(data), "--run_dir", str(folder / "run")]
            words = [sys.executable, *counting, "train.py", *case.flags.split(), *folders]
            log = (folder / f"log{rank}").open("w")
            processes.append(
                subprocess.Popen(words, cwd=REPOSITORY / case.lesson, env=env, stdout=log, stderr=subprocess.STDOUT)
            )
        statuses = wait_for(processes, began + limit)
        row: Row = {"lesson": case.lesson, "flags": case.flags, "gpus": case.gpus, "status": max(map(abs, statuses))}
        row |= {"seconds": time.monotonic() - began, "reason": ""}
        if row["status"]:
            texts = [(folder / f"log{rank}").read_text() for rank in range(case.gpus)]
            row["reason"] = f"cut off after {limit:.0f} s" if CUT in statuses else reason(texts[0]) or reason(texts[-1])
            row["log"] = [text[-3000:] for text in texts]
        row |= read_json(folder / "rank0.json")
        if on_null:
            row |= counters_of_null_gpu(read_json(folder / "report0/rank0.json"))
        epochs = read_json(folder / "run/summary.json").get("epochs", [])
        return row | {"losses": [epoch[name] for epoch in epochs for name in ("train_loss", "val_loss")]}


CUT = -999
"""the status of a process that was ended because it took too long"""


def wait_for(processes: list[subprocess.Popen], until: float) -> list[int]:
    """Wait for all; when one has failed or the time is over, end the others; return the exit statuses."""
    while any(one.poll() is None for one in processes):
        if time.monotonic() > until or any(one.returncode for one in processes):
            late = time.monotonic() > until
            for one in processes:
                if one.poll() is None:
                    one.kill()
                    one.wait()
                    one.returncode = CUT if late else one.returncode
            break
        time.sleep(0.1)
    return [one.returncode for one in processes]


def path_of_python() -> str:
    """Return where Python looks for the workshop."""
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def counters_of_null_gpu(report: Row) -> Row:
    """Return the counters of a null GPU under the names of gpu_counts.py."""
    if not report.get("step"):
        return {}
    step = report["step"]
    copies = step["copies_to_gpu"] + step["copies_from_gpu"] + step["copies_on_gpu"]
    found = {"waits": step["waits"], "copies": copies, "replays": step["graph_launches"], "launches": step["launches"]}
    return found | {"counted": report["counted"]}


# The table.


def largest_difference(losses: list[float], others: list[float]) -> str:
    """Return the largest relative difference of two lists of losses as text; "" if there is nothing to compare."""
    if not losses or len(losses) != len(others):
        return ""
    return f"{cases.largest_difference(losses, others):.0e}"


def table_row(name: str, null: Row, gpu: Row) -> list[results.Cell]:
    """Return a row of the table: each figure of the null GPU and of the GPU."""
    counters = counters_of_null_gpu(null)
    row: list[results.Cell] = [name]
    for figure in ("waits", "copies", "replays", "launches"):
        row += [counters.get(figure), gpu.get(figure)]
    for figure in ("peak",):
        row += [one[figure] / 1e6 if one.get(figure) else None for one in (null, gpu)]
    if gpu["status"]:
        return [*row, f"failed: {gpu['reason']}"]
    return [*row, largest_difference(gpu["losses"], null.get("cpu") or null.get("losses") or [])]


def store(known: dict[str, Row], found: dict[str, Row], gpu: str, finished: bool) -> None:
    """Store the table of the cases that ran."""
    short = gpu.removeprefix("NVIDIA ")
    figures = ("waits", "copies", "replays", "launches", "peak, MB")
    on_gpu = {"launches": "kernels"}
    columns = [one for name in figures for one in (f"{name}: null GPU", f"{on_gpu.get(name, name)}: {short}")]
    results.store(
        "null_gpu_and_" + re.sub(r"\W+", "_", short.lower()).strip("_"),
        title=f"The lessons on {'a' if short.startswith('null') else 'an'} {short}, and on a null GPU",
        columns=["", *columns, f"losses: {short} and CPU"],
        rows=[table_row(name, known.get(name, {}), row) for name, row in found.items()],
        formats={name: ",.0f" if "MB" in name else ",.1f" for name in columns},
        spread="per update, after the first; the losses differ by at most this share",
        finished=finished,
    )


def store_large(known: dict[str, Row], found: dict[str, Row], gpu: str, finished: bool) -> None:
    """Store the memory and the time of the large trainings that ran."""
    short = gpu.removeprefix("NVIDIA ")
    rows: list[list[results.Cell]] = []
    for name, row in found.items():
        null, cells = known.get(name, {}), list[results.Cell]()
        for figure in ("peak", "reserved"):
            cells += [one[figure] / 1e9 if one.get(figure) else None for one in (null, row)]
        rows.append([name, *cells, row.get("ms"), row["reason"]])
    columns = [f"{figure}: {which}" for figure in ("peak", "reserved") for which in ("null GPU", short)]
    results.store(
        "large_lessons",
        title=f"Memory of large lessons on {short}, and on a null GPU",
        columns=["training", *columns, f"ms per update: {short}", "error"],
        rows=rows,
        formats=dict.fromkeys(columns, ".2f") | {f"ms per update: {short}": ".1f"},
        unit="GB",
        finished=finished,
    )


def run_on_gpu(wanted: list[cases.Case], null_half: Path, folder: Path, data: Path, large: bool) -> None:
    """Run the cases that are missing in the folder; store each at once, and the table.

    Raises:
        UserError: there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError("this machine has no NVIDIA GPU")
    gpu, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    known, file = read_json(null_half), folder / ("large_cases.json" if large else "cases.json")
    found: dict[str, Row] = read_json(file)
    todo = [case for case in wanted if found.get(case.name, {}).get("status", 1) != 0]
    missing = [case.name for case in wanted if not is_known(case, known)]
    without = why_no_null_gpus() if missing else ""
    if without:
        print(f"note: {len(missing)} cases have no null GPU beside them: {without}")
    storing = threading.Lock()

    def store_all() -> dict[str, Row]:
        ordered = {case.name: found[case.name] for case in wanted if case.name in found}
        if ordered:
            (store_large if large else store)(known, ordered, gpu, len(ordered) == len(wanted))
        return ordered

    def run(case: cases.Case) -> None:
        null = null_row(case, data) if case.name in missing and not without else known.get(case.name, {})
        row = gpu_row(case, null, data, gpu, count, OF_LARGE if large else OF_CASE)
        with storing:
            found[case.name] = row
            write_json(file, found)
            if case.name in missing and null:
                known[case.name] = null
                write_json(null_half, known)
            print(f"{case.name:45} {row['seconds']:6.1f} s  {row['reason']}", flush=True)
            store_all()

    with ThreadPoolExecutor(1 if large else max(1, available_cpus() // 4)) as pool:
        list(pool.map(run, todo))
    for name, row in store_all().items():
        if row["status"]:
            print(f"note: {name}: {row['reason']}")


def main() -> None:
    """Run one of the halves."""
    parser = Parser(__doc__)
    parser.add_argument("half", choices=("null", "gpu"), help="which half")
    parser.add_argument("--null_half", type=Path, required=True, help="file of the null GPU's half")
    parser.add_argument("--folder", type=Path, help="folder for the cases of the GPU")
    parser.add_argument("--large", choices=("true", "false"), default="false", help="large trainings")
    parser.add_argument("--only", default="", metavar="WORD", help="part of the names of the cases to run")
    arguments = parser.parse_args()
    if arguments.half == "gpu" and arguments.folder is None:
        raise UserError("gpu needs --folder")
    large = arguments.large == "true"
    wanted = chosen_cases(large, arguments.only)
    with tempfile.TemporaryDirectory() as name:
        data = default_data_dir() if large else Path(name)
        if wanted and not large:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                cases.make_data(data)
        if arguments.half == "null":
            add_null_rows(wanted, arguments.null_half, data)
        elif wanted:
            run_on_gpu(wanted, arguments.null_half, arguments.folder, data, large)


if __name__ == "__main__":
    run_reporting_user_errors(main)
