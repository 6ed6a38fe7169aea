"""Run four tools on the same ten faults of scripts/ddp.py, and on the correct script: which faults does each one find?

    python -m venv /tmp/compare/venv
    echo "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
        > /tmp/compare/venv/lib/python3.11/site-packages/workshop.pth
    /tmp/compare/venv/bin/pip install guardtower==0.1.0 traincheck==0.2.0
    python tests/doctor/comparison.py --venv /tmp/compare/venv --folder /tmp/compare/runs   # about two hours on 2 cores

The first three commands are done by hand: they install two of the tools in a virtual environment of their own, which
sees the packages of the workshop (the .pth file). The results go to comparison_results.json beside this file.

- The doctor runs the script as it is, in a plain run. A fault that needs an occasion (two nodes, data that cannot be
  shared evenly) is also run with --thorough.
- The other tools run a copy of the script for CPUs (gloo instead of nccl), as two ranks. They get the same occasions:
  the copy is started as two nodes, or has a validation set of 33 samples, which is 3 batches on one rank and 2 on the
  other.
- A fault is found if a tool prints something that matches the regular expression `says` of the fault and that it does
  not print for correct scripts. The expressions were written after all that the tools print had been read. What they
  print is stored too.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = ("doctor", "detail", "guardtower", "traincheck")


@dataclass(frozen=True)
class Fault:
    """A switch of scripts/ddp.py."""

    switch: str
    what: str
    check: str
    """the doctor's check about it"""
    says: str
    """what another tool must print about it: a regular expression"""
    occasion: str = ""
    """"two nodes" or "uneven data", if the fault shows only then"""


FAULTS = (
    Fault("same_samples", "all ranks train on the same samples", "same_samples", r"sampler|same samples"),
    Fault("local_rank", "samples shared by the local rank", "same_samples", r"sampler|same samples", "two nodes"),
    Fault("held_out", "training and validation split without a seed", "held_out", r"random_split|Generator"),
    Fault("padded", "validation repeats a sample", "validation_counts", r"sampler|sample.*(twice|more than once)"),
    Fault("same_dropout", "the same dropout on all ranks", "same_dropout", r"manual_seed|[Dd]ropout|random number"),
    Fault("frozen", "unfrozen after the DDP wrap: gradients not exchanged", "weights_agree", r"Parameter\.data |not sync"),
    Fault("bare", "calls the model inside DDP: gradients not exchanged", "weights_agree", r"Parameter\.data |not sync"),
    Fault("schedule", "a schedule for one rank's number of steps", "schedule_length", r"lr_scheduler|schedule"),
    Fault("one_class", "a loss that does not depend on the output", "gradients_arrive", r"Parameter\.data|depend|all-zero"),
    Fault(
        "collective_per_batch",
        "a collective per batch, with unequal numbers of batches",
        "same_collectives",
        r"mismatch between collectives|all_reduce|barrier",
        "uneven data",
    ),
)
CORRECT = Fault("none", "the correct script", "", "")
FOR_CPU = {
    '"nccl"': '"gloo"',
    "torch.cuda.set_device(local)": "pass",
    ".cuda(local, non_blocking=True)": "",
    '.to("cuda", non_blocking=True)': "",
    ".cuda()": "",
    'autocast("cuda")': 'autocast("cpu")',
    "GradScaler()": 'GradScaler("cpu")',
    'device="cuda"': 'device="cpu"',
    "device_ids=[local]": "device_ids=None",
    'f"cuda:{local}"': '"cpu"',
}
# PyTorch 2.15 ends with a segmentation fault in this method (DDP on gloo with DETAIL); it only writes a log
NO_CRASH = {"class Noisy": "dist.Logger.set_construction_data_and_log = lambda *values: None\n\n\nclass Noisy"}
# TrainCheck 0.2.0 cannot wrap the functions of torch.backends.cuda if PyTorch is built for CUDA and there is no driver
NO_DRIVER = {
    "import torch\n": "import traincheck.config.config as settings\n\n"
    'settings.INSTR_MODULES_TO_SKIP.append("torch.backends.cuda")\nimport torch\n'
}
AUDIT = {
    "    for epoch in range(first, 3):\n": """
    import guardtower

    def step():
        with torch.autocast("cpu"):
            outputs = (model.module if "bare" in faults else model)(x)
            loss = F.cross_entropy(outputs, y)
        if "one_class" in faults:
            loss = F.cross_entropy(outputs.sum(1, keepdim=True), torch.zeros_like(y))
        return loss

    report = None
    guardtower.monitor(model, on_nonfinite="warn").__enter__()
    for epoch in range(first, 3):
""",
    '            if "not_zeroed" not in faults:\n': """\
            if report is None:
                report = guardtower.audit(model, step, optimizer=optimizer, inputs=x)
                print("".join(f"guardtower on rank {rank}: {finding}\\n" for finding in report), flush=True)
            if "not_zeroed" not in faults:
""",
}


def prepare(folder: Path, fault: Fault, edits: dict[str, str], seed: int = 0) -> None:
    """Write the script for CPUs with one fault, and run.sh, which starts it as two ranks, to a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seeds = {f"manual_seed({number})": f"manual_seed({number + seed})" for number in (1, 2)}
    seeds |= {"num_replicas=world": f"num_replicas=world, seed={seed}", "torch.manual_seed(": f"torch.manual_seed({seed} + "}
    switch = {'sys.argv[1].split(",") if len(sys.argv) > 1 else []': f'["{fault.switch}"]'}
    uneven = {"[119, 41]": "[127, 33]"} if "uneven" in fault.occasion else {}
    text = (HERE / "scripts/ddp.py").read_text()
    for old, new in (FOR_CPU | seeds | switch | uneven | edits).items():
        if old not in text:
            raise SystemExit(f"scripts/ddp.py has no longer {old!r}")
        text = text.replace(old, new)
    (folder / "ddp.py").write_text(text)
    run = "timeout 150 python -m torch.distributed.run"
    two = "--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port 29611 --node-rank"
    commands = f"{run} {two} 1 ddp.py &\n{run} {two} 0 ddp.py\nstatus=$?\nwait\nexit $status\n"
    one = f"{run} --standalone --nproc-per-node 2 ddp.py\n"
    (folder / "run.sh").write_text(commands if "two nodes" in fault.occasion else one)


def output(command: list[str], folder: Path, **variables: str) -> str:
    """Return what a command prints; all its processes are ended after 40 minutes."""
    options = {"cwd": folder, "env": os.environ | variables, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    try:
        return process.communicate(timeout=2400)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def doctor(fault: Fault, folder: Path) -> list[str]:
    """Return the doctor's FAULTs and NOTEs, each with its check; those of --thorough begin with it."""
    said = []
    for flags in [[], ["--thorough"]] if fault.occasion or fault is CORRECT else [[]]:
        command = [sys.executable, str(HERE.parent.parent / "doctor/run.py"), "--json", *flags]
        report = json.loads(output([*command, str(HERE / "scripts/ddp.py"), fault.switch], folder))
        findings = [one for top in report["findings"] for one in (top, *top["consequences"])]
        start = "".join(f"{flag}: " for flag in flags)
        said += [f"{start}{one['kind']} {one['check']}: {one['text']}" for one in findings if one["kind"] != "COST"]
    return said


def detail(fault: Fault, folder: Path, edits: dict[str, str] = NO_CRASH) -> list[str]:
    """Return the errors and warnings with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    prepare(folder, fault, edits)
    lines = output(["bash", "run.sh"], folder, TORCH_DISTRIBUTED_DEBUG="DETAIL").splitlines()
    return [line.strip()[:400] for line in lines if re.search(r"Error: |[Ww]arning|SIGSEGV", line)]


def guardtower(fault: Fault, folder: Path) -> list[str]:
    """Return what guardtower's audit warns of in the first batch, and what its monitor warns of later."""
    prepare(folder, fault, AUDIT)
    lines = output(["bash", "run.sh"], folder).splitlines()
    return [line for line in lines if re.search(r"\[(WARN|FAIL)\]|non-finite", line)]


def references(folder: Path) -> Path:
    """Infer TrainCheck's invariants from two correct runs, with two seeds; return their file."""
    traces = [collect(folder / f"reference{seed}", CORRECT, seed) for seed in (0, 100)]
    output(["traincheck-infer", "-j", "2", "-f", *map(str, traces), "-o", "invariants.json"], folder)
    return folder / "invariants.json"


def collect(folder: Path, fault: Fault, seed: int) -> Path:
    """Let TrainCheck trace a run; return the folder of the trace."""
    prepare(folder, fault, NO_DRIVER, seed)
    command = "traincheck-collect --pyscript ddp.py --shscript run.sh --models-to-track model --output-dir trace"
    (folder / "collect.log").write_text(output(command.split(), folder))
    return folder / "trace"


def traincheck(fault: Fault, folder: Path, seed: int = 0) -> list[str]:
    """Return the invariants that a run violates."""
    collect(folder, fault, seed)
    command = "traincheck-check -f trace -i ../invariants.json -o checked --no-html-report"
    (folder / "check.log").write_text(output(command.split(), folder))
    text = (folder / "checked/trace/failed.log").read_text()
    failed = [json.loads(one) for one in re.split(r"\n(?=\{)", text) if one.strip()]
    return sorted({one["invariant"]["text_description"] for one in failed})


def judged(fault: Fault, tool: str, said: list[str], usual: set[str]) -> dict[str, str | list[str]]:
    """Return whether what a tool said is about the fault, and what it does not say of correct scripts."""
    new = [line for line in said if re.sub(r"\d+", "N", line) not in usual]
    about = [line for line in new if re.search(rf" {fault.check}: " if tool == "doctor" else fault.says, line)]
    return {"found": "found" if about else "not found", "about": about[:3], "other": len(new) - len(about)}


def main() -> None:
    """Run the tools one after another, print a line for each fault, and store the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="virtual environment with guardtower and traincheck")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS, help="only these; keep the others' results")
    options = parser.parse_args()
    os.environ["PATH"] = f"{options.venv.resolve()}/bin:{os.environ['PATH']}"
    file = HERE / "comparison_results.json"
    results = json.loads(file.read_text()) if file.exists() else {"rows": {}, "correct": {}}
    for tool in options.tools:
        folder = options.folder.resolve() / tool
        folder.mkdir(parents=True, exist_ok=True)
    print(results, version("torch"), datetime.date.today())


if __name__ == "__main__":
    main()
