"""Run four tools on the same ten faults of scripts/ddp.py, and on the correct script: which faults does each tool find?

    python -m venv /tmp/compare/venv
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \\
        > /tmp/compare/venv/lib/python3.11/site-packages/workshop.pth
    /tmp/compare/venv/bin/pip install guardtower==0.1.0 traincheck==0.2.0
    python tests/doctor/comparison.py --venv /tmp/compare/venv --folder /tmp/compare/runs

The first three commands are done by hand. They install two of the tools into a virtual environment of their own, which
also sees the packages of the workshop, because the .pth file names their folder. The last command takes one to two
hours on two cores, and stores comparison_results.json. It keeps what the tools print in --folder, and does not repeat
a run whose output is there.

- The doctor runs the script as it is, in a plain run. A fault that needs an occasion (two nodes, or data that cannot be
  shared evenly) is also run with --thorough.
- The other tools run a copy of the script for CPUs as two ranks. They get the same occasion: the copy is started as two
  nodes, or its validation set has 33 samples, which are three batches on one rank and two on the other.
- A fault is found if a tool prints a line that the regular expression for the fault matches, and that this tool does
  not print for a correct script. The expressions were written after all lines had been read (see FAULTS).
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "scripts/ddp.py"
DOCTOR = [sys.executable, str(HERE.parent.parent / "doctor/run.py"), "--json"]


@dataclass(frozen=True)
class Fault:
    """A switch of scripts/ddp.py."""

    switch: str
    what: str
    check: str
    """the doctor's check about this fault"""
    says: str
    """a regular expression: what another tool must print about this fault"""
    occasion: str = ""
    """"two nodes" or "uneven data", if the fault shows only then"""


FAULTS = (
    Fault("same_samples", "all ranks train on the same samples", "same_samples", r"[Ss]ampler|same samples"),
    Fault("local_rank", "the samples are shared by the local rank", "same_samples", r"[Ss]ampler|same samples", "two nodes"),
    Fault("held_out", "the data are split without a seed", "held_out", r"random_split|Generator|randperm"),
    Fault("padded", "validation counts a sample twice", "validation_counts", r"[Ss]ampler|twice"),
    Fault("same_dropout", "dropout is the same on all ranks", "same_dropout", r"manual_seed|[Dd]ropout"),
    Fault("frozen", "weights unfrozen after the DDP wrap", "weights_agree", r"Parameter.data stays consistent|synchroni"),
    Fault("bare", "the model inside DDP is called", "weights_agree", r"Parameter.data stays consistent|synchroni"),
    Fault("schedule", "the schedule is for one rank's steps", "schedule_length", r"[Ss]chedul|OneCycle"),
    Fault("one_class", "the loss does not depend on the output", "gradients_arrive", r"changes Parameter.data:|depend"),
    Fault("collective_per_batch", "a collective in each of unequally many batches", "same_collectives",
          r"mismatch between collectives|all_reduce|barrier", "uneven data"),
)  # fmt: skip
CORRECT = (
    Fault("correct", "the correct script", "", ""),
    Fault("correct_two_nodes", "the correct script", "", "", "two nodes"),
    Fault("correct_uneven", "the correct script", "", "", "uneven data"),
)
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
# PyTorch 2.15 ends with a segmentation fault in this method, which only writes a log (DDP, gloo, DETAIL)
NO_CRASH = {"class Noisy": "dist.Logger.set_construction_data_and_log = lambda *values: None\n\n\nclass Noisy"}
# TrainCheck 0.2.0 fails while it wraps torch.backends.cuda, if PyTorch is built for CUDA and there is no driver
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
                print("".join(f"rank {rank}: {finding}\\n" for finding in report), flush=True)
            if "not_zeroed" not in faults:
""",
}


def prepare(folder: Path, fault: Fault, edits: dict[str, str], seed: int = 0) -> None:
    """Write the script for CPUs with a fault, and run.sh, which starts it as two ranks, to a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    changes = FOR_CPU | {'sys.argv[1].split(",") if len(sys.argv) > 1 else []': f'["{fault.switch}"]'}
    changes |= {f"manual_seed({number})": f"manual_seed({number + seed})" for number in (1, 2)}
    changes |= {"torch.manual_seed(0 if": f"torch.manual_seed({seed} if", "else rank)\n": f"else {seed} + rank)\n"}
    changes |= {"num_replicas=world": f"num_replicas=world, seed={seed}"} | edits
    changes |= {"[119, 41]": "[127, 33]"} if fault.occasion == "uneven data" else {}
    text = SCRIPT.read_text()
    for old, new in changes.items():
        if old not in text:
            raise SystemExit(f"{SCRIPT} does not have {old!r} any more")
        text = text.replace(old, new)
    (folder / "ddp.py").write_text(text)
    run = "timeout -k 10 200 python -m torch.distributed.run"
    nodes = "--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port 29611 --node-rank"
    two = f"{run} {nodes} 1 ddp.py &\n{run} {nodes} 0 ddp.py\nstatus=$?\nwait\nexit $status\n"
    one = f"{run} --standalone --nproc-per-node 2 ddp.py\n"
    (folder / "run.sh").write_text(two if fault.occasion == "two nodes" else one)


def output(command: str, folder: Path, **variables: str) -> str:
    """Return what a command prints, without the states of progress bars."""
    environment = os.environ | variables
    done = subprocess.run(
        command.split(), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return "\n".join(line.rpartition("\r")[2] for line in done.stdout.decode(errors="replace").split("\n"))


def doctor(fault: Fault, folder: Path) -> list[str]:
    """Return the doctor's FAULTs and NOTEs, each with its check; those of --thorough begin with this word."""
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    for flags in [[], ["--thorough"]] if fault.occasion or fault == CORRECT[0] else [[]]:
        done = subprocess.run([*DOCTOR, *flags, SCRIPT, fault.switch], cwd=folder, stdout=subprocess.PIPE, check=False)
        report = json.loads(done.stdout)
        findings = [one for top in report["findings"] for one in (top, *top["consequences"]) if one["kind"] != "COST"]
        said += [" ".join([*flags, one["kind"], one["check"], one["text"]]) for one in findings]
    return said


def detail(fault: Fault, folder: Path, edits: dict[str, str] = NO_CRASH) -> list[str]:
    """Return the errors and warnings with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    prepare(folder, fault, edits)
    text = output("bash run.sh", folder, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    (folder / "output.log").write_text(text)
    return [re.sub(r"\d+", "N", line)[:300] for line in text.splitlines() if re.search(r"Error: |[Ww]arning|SIG", line)]


def guardtower(fault: Fault, folder: Path) -> list[str]:
    """Return what guardtower's audit warns of in the first batch, and what its monitor warns of."""
    prepare(folder, fault, AUDIT)
    text = output("bash run.sh", folder)
    (folder / "output.log").write_text(text)
    if "rank 0: [" not in text:
        return ["error: no report"]
    return [line for line in text.splitlines() if re.search(r"\[(WARN|FAIL)\]|non-finite", line)]


def collect(folder: Path, fault: Fault, seed: int) -> None:
    """Let TrainCheck trace a run, into the folder's trace/."""
    prepare(folder, fault, NO_DRIVER, seed)
    command = "traincheck-collect --pyscript ddp.py --shscript run.sh --models-to-track model --output-dir trace"
    (folder / "collect.log").write_text(output(command, folder))


def traincheck(fault: Fault, folder: Path) -> list[str]:
    """Return TrainCheck's invariants that a run violates; the first call infers them from two correct runs."""
    invariants = folder.parent / "invariants.json"
    if not invariants.exists():
        for seed in (0, 100):
            collect(folder.parent / f"reference{seed}", CORRECT[0], seed)
        output("traincheck-infer -f reference0/trace reference100/trace -o invariants.json", folder.parent)
    collect(folder, fault, 200 + 100 * CORRECT.index(fault) if fault in CORRECT else 0)
    (folder / "check.log").write_text(
        output("traincheck-check -f trace -i ../invariants.json -o checked --no-html-report", folder)
    )
    try:
        failed = (folder / "checked/trace/failed.log").read_text()
    except FileNotFoundError:
        return ["error: " + ((folder / "check.log").read_text().strip() or "no output").splitlines()[-1]]
    violated = [json.loads(one)["invariant"] for one in re.split(r"\n(?=\{)", failed) if one.strip()]
    return [f"{one['text_description']} [{zlib.crc32(json.dumps(one).encode()):08x}]" for one in violated]


TOOLS = {"doctor": doctor, "detail": detail, "guardtower": guardtower, "traincheck": traincheck}


def said_by(tool: str, fault: Fault, folder: Path) -> list[str]:
    """Return what a tool says of a fault, from an earlier run if there is one."""
    file = folder / tool / f"{fault.switch}.json"
    if not file.exists():
        lines = TOOLS[tool](fault, folder / tool / fault.switch)
        file.write_text(json.dumps(lines, indent=1))
        print(f"{tool}, {fault.switch}: {len(lines)} lines", flush=True)
    return json.loads(file.read_text())


def judged(tool: str, fault: Fault, folder: Path) -> dict[str, object]:
    """Return whether a tool finds a fault, with lines about it, and how much else it says, not said of correct scripts."""
    correct = CORRECT[:1] if tool == "doctor" else CORRECT
    usual = {line for script in correct for line in said_by(tool, script, folder)}
    new = [line for line in said_by(tool, fault, folder) if line not in usual]
    about = [line for line in new if re.search(rf" {fault.check} " if tool == "doctor" else fault.says, f" {line}")]
    errors = [line for line in new if line.startswith("error: ")]
    found = "found" if about else "error" if errors else "not found"
    if about and all(line.startswith("--thorough") for line in about):
        found = "found with `--thorough`"
    elif about and about[0].startswith("NOTE"):
        found = "found, as a NOTE"
    return {"found": found, "about": [line[:200] for line in about[:3]], "other_lines": len(new) - len(about)}


def main() -> None:
    """Run the tools one after another, and store the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="virtual environment with guardtower and traincheck")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the runs")
    options = parser.parse_args()
    os.environ["PATH"] = f"{options.venv.resolve()}/bin:{os.environ['PATH']}"
    folder = options.folder.resolve()
    crash = detail(CORRECT[0], folder / "detail/crash", {})
    rows = [
        {"switch": fault.switch, "what": fault.what, "occasion": fault.occasion}
        | {tool: judged(tool, fault, folder) for tool in TOOLS}
        for fault in FAULTS
    ]
    alarms = {
        tool: {script.switch: len(said_by(tool, script, folder)) for script in (CORRECT[:1] if tool == "doctor" else CORRECT)}
        for tool in TOOLS
    }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    results = {
        "date": str(datetime.date.today()),
        "tools": {
            "doctor": f"commit {commit.stdout.strip()}",
            "detail": f"TORCH_DISTRIBUTED_DEBUG=DETAIL, PyTorch {version('torch')}",
            "guardtower": "0.1.0",
            "traincheck": "0.2.0",
        },
        "detail_without_the_change": crash,
        "lines_about_correct_scripts": alarms,
        "rows": rows,
    }
    (HERE / "comparison_results.json").write_text(json.dumps(results, indent=1) + "\n")
    for row in rows:
        print(row["switch"], *(row[tool]["found"] for tool in TOOLS), sep=" | ")


if __name__ == "__main__":
    main()
