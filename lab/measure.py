"""Measure what the pages show, on an idle machine: each experiment stores its tables in results/<machine>/.

    python lab/measure.py                              # everything that is measured on CPUs: hours
    python lab/measure.py loaders compare              # some of it
    python lab/measure.py gpu --minutes 8 --out DIR    # on a machine with GPUs: the most important first

What is measured on CPUs does not see the GPUs. With `gpu`, only what fits into the minutes is started, and tables that
DIR (default: results/) has from an earlier call are skipped, so that a later call goes on. No failure ends the rest:
the last lines say what was not measured, and why. Then `make docs` renders the pages.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lab.flags import Parser
from lab.results import RESULTS
from workshop.errors import UserError, nearest, run_reporting_user_errors
from workshop.paths import REPOSITORY

STARTED = time.monotonic()
PYTHON = os.path.abspath(sys.executable)
TORCHRUN = "torchrun --standalone --nproc-per-node"
WILL_IT_FIT = "python experiments/will_it_fit.py"
SLOW_NETWORK = (
    "--name slow_network --model gpt_7b --ranks 64,8x8 --ways blocks --checkpointing false --batch_size 8 "
    "--accumulate 8 --adapters 1 --adapter_gb_per_second 25"
)
DEEPER = "--model gpt_70b --ranks 64 --ways blocks --checkpointing true"
MNIST, CIFAR = ("mnist --synthetic --shards",), ("cifar10 --synthetic --shards",)
BOXES = ("nbody --synthetic --cells 64",)
LARGE_BOXES = ("nbody --synthetic --cells 128",)
TEXT = ("text",)


@dataclass(frozen=True)
class Measurement:
    """A command that measures something and stores its tables."""

    name: str
    command: str
    """as it is typed in the folder of its lesson"""
    lesson: str
    data: tuple[str, ...] = ()
    """what `data/prepare.py` is called with before"""
    gpus: int = 0
    """that it needs; with 0 it sees none"""
    minutes: float = 0
    """rough time until its first table is stored, on a GPU"""


MNIST_LADDER = "--name precision_ladder_mnist --config ../configs/mnist.yaml --loader device --limit_train 59968"
ONE, TWO, THREE = "01_single_gpu", "02_dataparallel", "03_ddp"
FOUR, FIVE = "04_mixed_precision", "05_fully_sharded"
GPU = (
    Measurement("unet3d_throughput", "python experiments/unet3d_throughput.py", FOUR, LARGE_BOXES, 1, 2.2),
    Measurement("precision_ladder", "python experiments/ladder.py", FOUR, LARGE_BOXES, 1, 1),
    Measurement("loaders", "python experiments/throughput.py loaders --rounds 1", ONE, CIFAR, 1, 1),
    Measurement("sharded_throughput", "python experiments/sharded_throughput.py", FIVE, gpus=1, minutes=1),
    Measurement("mnist_loaders", "python experiments/throughput.py mnist_loaders --rounds 1", ONE, MNIST, 1, 1),
    Measurement("bandwidth", "python experiments/bandwidth.py --quick true", ONE, gpus=1, minutes=0.5),
    Measurement("precision_ladder_mnist", f"python experiments/ladder.py {MNIST_LADDER}", FOUR, MNIST, 1, 1),
    Measurement("format_errors", "python experiments/format_errors.py", FOUR, LARGE_BOXES, 1, 0.5),
    Measurement("underflow", "python experiments/underflow.py --steps 30", FOUR, LARGE_BOXES, 1, 1),
    Measurement("tensor_cores", "python experiments/tensor_cores.py", FOUR, gpus=1, minutes=0.5),
    Measurement("cpu_or_gpu", "python experiments/cpu_or_gpu.py --quick true", ONE, gpus=1, minutes=1),
    Measurement("compare", "python experiments/compare.py", TWO, CIFAR, 2, 1.5),
    Measurement("nccl_backends", "python experiments/nccl_backends.py", THREE, CIFAR, 2, 1),
    Measurement("allreduce", f"{TORCHRUN} gpu experiments/allreduce.py --max_mib 512", THREE, gpus=2, minutes=0.5),
    Measurement("scaling", "python experiments/scaling.py", THREE, CIFAR, 2, 3),
)
"""in the order of their importance"""
CPU = (
    Measurement("loaders", "python experiments/throughput.py loaders --seconds 3", ONE, CIFAR),
    Measurement("worker_counts", "python experiments/throughput.py worker_counts", ONE, MNIST),
    Measurement("models", "python experiments/throughput.py models", ONE, CIFAR),
    Measurement("first_changes", "python experiments/first_changes.py", ONE, MNIST + CIFAR),
    Measurement("loading_timelines", "python experiments/loading_timelines.py", ONE, MNIST),
    Measurement("sequential_reads", "python experiments/sequential_reads.py", ONE, MNIST),
    Measurement("bandwidth", "python experiments/bandwidth.py", ONE),
    Measurement("cpu_or_gpu", "python experiments/cpu_or_gpu.py", ONE),
    Measurement("simulated_gpu", "python experiments/simulated_gpu.py", ONE, CIFAR),
    Measurement("compare", "python experiments/compare.py", TWO, MNIST),
    Measurement("scaling", "python experiments/scaling.py", THREE, MNIST),
    Measurement("allreduce", f"{TORCHRUN} 2 experiments/allreduce.py --seconds 1", THREE),
    Measurement("ddp_options", "python experiments/ddp_options.py", THREE, CIFAR),
    Measurement("ddp_step", "python experiments/ddp_step.py", THREE, CIFAR),
    Measurement("bucket_timelines", "python experiments/bucket_timelines.py", THREE, CIFAR),
    Measurement("batches", "python experiments/large_batches.py batches", THREE, CIFAR),
    Measurement("higher_rate", "python experiments/large_batches.py higher_rate", THREE, CIFAR),
    Measurement("simulated_scaling", "python experiments/simulated_scaling.py", THREE, CIFAR),
    Measurement("unet3d", "python experiments/unet3d.py", FOUR, BOXES),
    Measurement("precision_ladder", "python experiments/ladder.py --rounds 5", FOUR, BOXES),
    Measurement("underflow", "python experiments/underflow.py", FOUR, BOXES),
    Measurement("format_errors", "python experiments/format_errors.py", FOUR, BOXES),
    Measurement("tensor_cores", "python experiments/tensor_cores.py", FOUR),
    Measurement("simulated_gains", "python experiments/simulated_gains.py", FOUR, LARGE_BOXES + MNIST),
    Measurement("success_rate", "python experiments/success_rate.py", FOUR, MNIST),
    Measurement("same_losses", "python experiments/same_losses.py", FIVE),
    Measurement("save_and_reshard", "python experiments/save_and_reshard.py", FIVE, TEXT),
    Measurement("one_step", f"{TORCHRUN} 2 experiments/one_step.py", FIVE),
    Measurement("accumulation", f"{TORCHRUN} 2 experiments/accumulation.py", FIVE),
    Measurement("small_updates", f"{TORCHRUN} 2 experiments/small_updates.py", FIVE),
    Measurement("recompute", "python experiments/recompute.py", FIVE),
    Measurement("what_fills_memory", "python experiments/what_fills_memory.py", FIVE),
    Measurement("will_it_fit_check", f"{WILL_IT_FIT} --check true", FIVE),
    Measurement("published_forecast", f"{WILL_IT_FIT} --published true", FIVE),
    Measurement("will_it_fit_gpt_7b", f"{WILL_IT_FIT} --model gpt_7b --ranks 8,64,1024,8x8 --ways ddp,blocks", FIVE),
    Measurement("will_it_fit_slow_network", f"{WILL_IT_FIT} {SLOW_NETWORK}", FIVE),
    Measurement("will_it_fit_gpt_70b", f"{WILL_IT_FIT} {DEEPER}", FIVE),
    Measurement("checkpoint_cost", "python experiments/checkpoint_cost.py", FIVE),
    Measurement("tensor_parallel_2_ranks", f"{TORCHRUN} 2 experiments/tensor_parallel.py", FIVE),
    Measurement("tensor_parallel_4_ranks", f"{TORCHRUN} 4 experiments/tensor_parallel.py", FIVE),
)


def run(words: list[str], folder: Path, environment: dict[str, str], seconds: float | None = None) -> None:
    """Run a command; end it and all that it has started if it takes longer than ``seconds``.

    Raises:
        UserError: it failed, or took longer.
    """
    process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True)
    try:
        status = process.wait(seconds)
    except BaseException as error:  # also Ctrl-C
        os.killpg(process.pid, signal.SIGTERM)  # on which torchrun ends its ranks
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(error, subprocess.TimeoutExpired):
            raise UserError(f"cut off after {seconds:.0f} s; what it has stored by then is kept") from None
        raise
    if status:
        raise UserError(f"exit status {status}; the lines above say why")


def measure(one: Measurement, out: Path, prepared: set[str], deadline: float | None) -> None:
    """Generate the data of a measurement unless they are there, and run it.

    Raises:
        UserError: it failed, or there is not enough time left.
    """
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"WORKSHOP_RESULTS": str(out), "PYTHONPATH": path}
    if one.gpus == 0:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    for data in one.data:
        if data not in prepared:
            run([PYTHON, "data/prepare.py", *data.split()], REPOSITORY, environment, _left(one, deadline))
            prepared.add(data)
    left = _left(one, deadline)
    print(f"\n== {one.name}: {one.command}", flush=True)
    words = shlex.split(one.command.replace(f"{TORCHRUN} gpu", f"{TORCHRUN} {_gpus()}"))
    python = [PYTHON] if words[0] == "python" else [PYTHON, "-m", "torch.distributed.run"]
    run([*python, *words[1:]], REPOSITORY / one.lesson, environment, left)


def _left(one: Measurement, deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if 60 * one.minutes > left:
        raise UserError(f"it takes about {one.minutes} minutes, and {max(left, 0) / 60:.1f} are left")
    return left


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def is_measured(one: Measurement, out: Path) -> bool:
    """Return whether a GPU's table of this name is stored, with all its rows."""
    return any("unfinished" not in json.loads(file.read_text()) for file in out.glob(f"*gpu/{one.name}.json"))


def measure_all(chosen: list[Measurement], out: Path, deadline: float | None) -> None:
    """Measure one after the other; say at the end what was not measured.

    Raises:
        UserError: something was not measured.
    """
    prepared, missing = set[str](), []
    for one in chosen:
        try:
            measure(one, out, prepared, deadline)
        except (UserError, OSError) as error:
            missing.append(f"{one.name}: not measured: {error}")
            print(missing[-1], file=sys.stderr, flush=True)
    print("", *missing, sep="\n")
    if missing:
        raise UserError(f"{len(missing)} of {len(chosen)} not measured; the lines above say why")


def main() -> None:
    """Measure what is named on the command line."""
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"gpu, or some of: {', '.join(m.name for m in CPU)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit, with gpu (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the tables and plots (default: results/)")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.names == ["gpu"]:
        gpus = _gpus()
        if gpus == 0:
            raise UserError("this machine has no NVIDIA GPU; without gpu, the measurements on CPUs are made")
        chosen = [one for one in GPU if one.gpus <= gpus and not is_measured(one, out)]
        measure_all(chosen, out, STARTED + 60 * arguments.minutes - 10)
        return
    known = {one.name: one for one in CPU}
    if unknown := next((name for name in arguments.names if name not in known), None):
        raise UserError(f"no measurement '{unknown}'; {nearest(unknown, known)}")
    measure_all([known[name] for name in arguments.names or known], out, None)


if __name__ == "__main__":
    run_reporting_user_errors(main)
