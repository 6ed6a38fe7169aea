"""Faults that only a GPU shows, planted in copies of the repository: a null GPU shows them, and a CPU run does not.

    python tests/on_null_gpus/test_nullgpu_faults.py              # the table of all faults: some minutes on two cores
    python tests/on_null_gpus/test_nullgpu_faults.py graph        # faults with this in their description

Most faults end the run with an error of PyTorch's. The others change the waits of an update, or the losses.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from cases import REPOSITORY, Run, largest_difference, make_data, named, run_on_cpu, run_on_null_gpu

from lab import results

pytest_plugins = ["null_fixtures"]

DDP, PRECISION, FSDP = "03_ddp/train.py", "04_mixed_precision/train.py", "05_fully_sharded/train.py"
COPIED = ("workshop", "configs", "03_ddp", "04_mixed_precision", "05_fully_sharded")
BF16, GRAPH = "04, bf16, all options but compile", "04, fp16, fused, CUDA graph"


@dataclass(frozen=True)
class Fault:
    """A change of one file, the case that shows it, and how."""

    what: str
    file: str
    old: str
    new: str
    case: str
    message: str = ""
    """part of PyTorch's error message; without one, the run ends well, but its waits or losses change"""
    more_waits: bool = False
    other_losses: bool = False


FAULTS = [
    Fault(
        "the targets are not moved to the GPU",
        PRECISION,
        "        targets = targets.to(device, non_blocking=config.non_blocking)\n        # Dropout",
        "        # Dropout",
        "04, short, CUDA graph",
        message="Expected all tensors to be on the same device, but got target is on cpu, different from other tensors",
    ),
    Fault(
        "the model makes a tensor on the CPU",
        "workshop/models/gpt.py",
        "positions = torch.arange(tokens, device=device, dtype=torch.float32)",
        "positions = torch.arange(tokens, dtype=torch.float32)",
        "05, fp32",
        message="Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu",
    ),
    Fault(
        "NumPy reads a tensor on the GPU",
        DDP,
        "value = loss.item()",
        "value = float(loss.detach().numpy())",
        "03, one rank",
        message="can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()",
    ),
    Fault(
        "softmax returns float32 under autocast for CUDA, and the code expects bf16",
        PRECISION,
        "        loss = loss_function(outputs, targets)\n    with record",
        "        loss = loss_function(outputs, targets)\n"
        "        every = torch.arange(len(outputs), device=outputs.device)\n"
        "        torch.zeros_like(outputs).index_copy_(0, every, outputs.softmax(1))\n"
        "    with record",
        BF16,
        message="self and source expected to have the same dtype, but got (self) BFloat16 and (source) Float",
    ),
    Fault(
        "a tensor on the CPU is reduced over NCCL",
        DDP,
        "on_device = torch.tensor(flags, dtype=torch.int32, device=ranks.device)",
        "on_device = torch.tensor(flags, dtype=torch.int32)",
        "03, one rank",
        message="No backend type associated with device type cpu",
    ),
    Fault(
        "two ranks use one GPU",
        DDP,
        'device = torch.device("cuda", local_rank % gpus)',
        'device = torch.device("cuda", 0)',
        "03, two ranks",
        message="Duplicate GPU detected : rank",
    ),
    Fault(
        "the CPU waits in a step that a graph records",
        PRECISION,
        "    return loss\n\n\nclass GraphedStep",
        "    loss.item()\n    return loss\n\n\nclass GraphedStep",
        GRAPH,
        message="operation not permitted when stream is capturing",
    ),
    Fault(
        "the CPU waits in every step",
        DDP,
        "loss_sum += loss.detach() * len(targets)",
        "loss_sum += loss.item() * len(targets)",
        "03, one rank",
        more_waits=True,
    ),
    Fault(
        "a graph is replayed without a copy of the batch to its inputs",
        PRECISION,
        "        self.inputs.copy_(inputs)\n        self.targets.copy_(targets)\n",
        "",
        GRAPH,
        other_losses=True,
    ),
    Fault(
        "autocast is for the CPU",
        PRECISION,
        "return torch.autocast(device.type, dtype,",
        'return torch.autocast("cpu", dtype,',
        BF16,
        other_losses=True,
    ),
]


@contextmanager
def planted(fault: Fault) -> Iterator[Path]:
    """Give a copy of the repository with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "runs", "exercises", "experiments")
            shutil.copytree(REPOSITORY / name, copy / name, ignore=ignored)
        text = (copy / fault.file).read_text()
        times = text.count(fault.old)
        assert times == 1, f"{fault.file} has changed: it has {times} times what '{fault.what}' replaces:\n{fault.old}"
        (copy / fault.file).write_text(text.replace(fault.old, fault.new))
        yield copy


def symptom(fault: Fault, run: Run, correct: Run) -> str:
    """Return what the null GPU shows of a fault, or nothing."""
    if fault.message:
        of_torch = (line.strip() for line in run.stderr.splitlines() if not line.startswith("nullgpu:"))
        return next((line for line in of_torch if fault.message in line), "") if run.status else ""
    if run.status:
        return ""
    waits, before = (one.report["step"]["waits"] for one in (run, correct))
    if fault.more_waits:
        return f"{waits:.1f} waits in an update instead of {before:.1f}" if waits > before + 0.5 else ""
    different = fault.other_losses and run.losses != correct.losses
    return f"losses {rounded(run.losses)} instead of {rounded(correct.losses)}" if different else ""


def rounded(losses: list[float]) -> str:
    """Return losses as text."""
    return " ".join(f"{loss:.6f}" for loss in losses)


def on_cpu(fault: Fault, copy: Path, data: Path) -> str:
    """Return what the CPU alone shows of a fault: nothing, if it is as it should be."""
    case = named(fault.case)
    run, correct = run_on_cpu(case, data, copy), run_on_cpu(case, data)
    assert correct.status == 0, correct.stderr[-3000:]
    if run.status:
        return f"status {run.status}: {run.reason}"
    if largest_difference(run.losses, correct.losses) > 1e-6:  # a sum of floats in another order
        return f"losses {rounded(run.losses)} instead of {rounded(correct.losses)}"
    return ""


def on_null_gpu(fault: Fault, copy: Path, data: Path) -> tuple[str, Run]:
    """Return what the null GPU shows of a fault, and the run."""
    case = named(fault.case)
    run = run_on_null_gpu(case, data, copy)
    correct = run if fault.message else run_on_null_gpu(case, data)
    assert fault.message or correct.status == 0, correct.stderr[-3000:]
    return symptom(fault, run, correct), run


def test_each_fault_can_still_be_planted() -> None:
    times = {fault.what: (REPOSITORY / fault.file).read_text().count(fault.old) for fault in FAULTS}
    assert set(times.values()) == {1}, times


@pytest.mark.usefixtures("null_gpus")
@pytest.mark.thorough
@pytest.mark.rehearsal
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_shows_on_a_null_gpu_and_not_on_the_cpu(fault: Fault, null_data: Path) -> None:
    with planted(fault) as copy:
        found, run = on_null_gpu(fault, copy, null_data)
        assert found, f"status {run.status}, losses {run.losses}\n{run.stderr[-3000:]}"
        assert not on_cpu(fault, copy, null_data)


def main() -> int:
    """Print the table; return 1 if a fault is not found, or if the CPU alone shows it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    missed = 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            make_data(data)
        for fault in FAULTS:
            if not any(word in fault.what for word in [one for one in sys.argv[1:] if one != "--store"] or [""]):
                continue
            with planted(fault) as copy:
                found, run = on_null_gpu(fault, copy, data)
                cpu = on_cpu(fault, copy, data)
            missed += not found or bool(cpu)
            print(f"{fault.what}\n    null GPU: {found or f'NOT FOUND: status {run.status}: {run.reason}'}")
            print(f"    CPU alone: {cpu or 'nothing: status 0 and the same losses'}", flush=True)
            rows.append([fault.what, found or "not found", cpu or "nothing"])
    if sys.argv[1:] == ["--store"]:
        columns = ["planted fault", "what the null GPU shows", "what the CPU alone shows"]
        results.store("nullgpu_faults", title="Planted faults", columns=columns, rows=rows)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
