"""What the measurements ask about this machine, each in a process of its own:

    python lab/machine_facts.py machine        # hardware and versions
    python lab/machine_facts.py flops FLAGS    # floating-point operations per sample of lesson 04 with these flags
    python lab/machine_facts.py peak bf16      # TFLOP/s of large matrix products

A process that asks PyTorch about a GPU holds a CUDA context from then on: about half a gigabyte of GPU memory, and on a
GPU in exclusive compute mode no other process can use it. So the process that starts all the others must not ask.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from lab.launching import reason
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.hardware import describe_hardware, describe_versions, emulates, pick_device
from workshop.paths import REPOSITORY

LESSON_04 = REPOSITORY / "04_mixed_precision"


def ask(question: str, *words: object) -> Any:  # noqa: ANN401, a JSON value
    """Return the answer of a new process to one of the questions above.

    Raises:
        UserError: it has none; says why.
    """
    command = [sys.executable, __file__, question, *map(str, words)]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, cwd=LESSON_04, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise UserError(reason(result.stderr) or f"exit status {result.returncode} from: {' '.join(command)}")
    return json.loads(result.stdout.splitlines()[-1])


def this_machine() -> dict[str, Any]:
    """Return the ``hardware`` and the ``versions`` that a process started now would find, and ``emulates_bf16``."""
    return _this_machine(tuple(os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK")))


@functools.cache
def _this_machine(_: tuple[str | None, ...]) -> dict[str, Any]:
    return ask("machine")


def machine() -> dict[str, Any]:
    """Describe the machine."""
    device = pick_device()
    return {
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
        "emulates_bf16": emulates(device, "bf16"),
    }


def flops(*flags: str) -> float:
    """Return the floating-point operations of a forward and backward pass per sample of the U-Net."""
    import torch

    sys.path.insert(0, str(LESSON_04 / "experiments"))
    from trainer import LESSON, flops_per_sample
    from workshop.commandline import load_config
    from workshop.datasets import nbody

    config = load_config(LESSON.Config, list(flags))
    edges = 3 * [config.crop_size]
    channels = (nbody.INPUT_CHANNELS, nbody.TARGET_CHANNELS)
    return flops_per_sample(config, tuple(torch.empty(1, count, *edges, device="meta") for count in channels))


def peak(precision: str) -> float:
    """Return the 10^12 floating-point operations per second of the fastest product of large square matrices."""
    sys.path.insert(0, str(LESSON_04 / "experiments"))
    from matrix_peak import matrix_peak

    return matrix_peak(precision, pick_device())


def main() -> None:
    """Answer the question on the command line with one line of JSON."""
    questions: dict[str, Callable[..., Any]] = {"machine": machine, "flops": flops, "peak": peak}
    print(json.dumps(questions[sys.argv[1]](*sys.argv[2:])))


if __name__ == "__main__":
    run_reporting_user_errors(main)
