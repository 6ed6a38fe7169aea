"""Ten faults of the doctor's test script `ddp.py`, looked at with the doctor and with three other tools.

    pip install traincheck==0.2.0 guardtower==0.1.0 torch-preflight==0.5.0
    python lab/studies/doctor_beside_others.py                  # about half an hour on two cores
    python lab/studies/doctor_beside_others.py doctor           # some of the tools only
    python lab/studies/doctor_beside_others.py torch-preflight  # seconds: it reads scripts, and does not run them

The other tools get the script's form for CPUs, because they have no stand-in for a GPU. A tool finds a fault if it
says something about the faulty script that it does not say about the correct one; what it says about the correct one
is stored as well.

- guardtower audits one step on each rank, in a call that is put before the first step, as its README shows.
- torch-preflight reads the text of the script, in which only the lines of one fault are left.
- TrainCheck learns rules from two runs of the correct script, and looks for rules that a run breaks. It is given a
  third run of the correct script, with other random numbers, to count the rules that are noise. (Where PyTorch has
  CUDA's libraries and there is no GPU, `safe_getattr` in its `utils.py` must also ignore that there is no driver.)

PyTorch's own `TORCH_DISTRIBUTED_DEBUG=DETAIL` is not among them: with it, the constructor of DistributedDataParallel
crashes on CPUs, in PyTorch 2.11 and 2.15.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402

SCRIPT = REPOSITORY / "tools/rankdoctor/tests/scripts/ddp.py"
CORRECT = "none"
FAULTS = {
    "same_samples": "no `DistributedSampler`",
    "same_order": "no `set_epoch`",
    "held_out": "a split with another seed on each rank",
    "bare": "the model is called without its wrapper",
    "not_zeroed": "no `zero_grad`",
    "one_class": "a loss with a gradient of zero",
    "frozen": "layers that are frozen when DDP wraps the model, and trained later",
    "clip_scaled": "gradients clipped before `unscale_`",
    "no_eval": "no `model.eval()`",
    "not_combined": "the accuracy of one rank's part",
}
ON_CPU = {
    '"nccl"': '"gloo"',
    "torch.cuda.set_device(local)": "pass",
    ".cuda(local, non_blocking=True)": "",
    '.to("cuda", non_blocking=True)': "",
    ".cuda()": "",
    'device="cuda"': 'device="cpu"',
    'autocast("cuda")': 'autocast("cpu")',
    "GradScaler()": 'GradScaler("cpu")',
    ", device_ids=[local]": "",
    'map_location=f"cuda:{local}"': 'map_location="cpu"',
    "torch.manual_seed(0 if": 'torch.manual_seed(int(os.environ.get("SEED", 0)) + 0 if',
}
AUDIT = """\
            if not globals().get("audited"):
                globals()["audited"] = True
                import guardtower

                def step() -> torch.Tensor:
                    with torch.autocast("cpu"):
                        outputs = (model.module if "bare" in faults else model)(x)
                        loss = F.cross_entropy(outputs, y)
                    if "one_class" in faults:
                        loss = F.cross_entropy(outputs.sum(1, keepdim=True), torch.zeros_like(y))
                    return loss

                for finding in guardtower.audit(model, step, optimizer=optimizer, inputs=x).findings:
                    print("AUDIT", finding.severity.name, finding.check)
"""


def on_cpu(folder: Path, *, audited: bool = False) -> Path:
    """Write the script's form for CPUs into a folder, and return its path."""
    text = SCRIPT.read_text()
    for old, new in ON_CPU.items():
        assert old in text, old
        text = text.replace(old, new)
    if audited:
        first = '            if "not_zeroed" not in faults:\n'
        assert first in text
        text = text.replace(first, AUDIT + first)
    path = folder / "train.py"
    path.write_text(text)
    return path


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Return what a command prints, with its exit status at the end."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=alone | environment, text=True, timeout=1800, **pipe)  # type: ignore[call-overload]
    return f"{done.stdout}\nexit status {done.returncode}"


def torchrun(script: Path, fault: str) -> str:
    """Return what two ranks of the script print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (script.parent / "checkpoint.pt").unlink(missing_ok=True)  # otherwise the run would go on from the one before
    return run([*command, script.name, fault], script.parent)


def doctor(fault: str, folder: Path) -> set[str]:
    """Return the doctor's findings about the script as it is, for GPUs."""
    command = [sys.executable, "-m", "rankdoctor", "--json", "--launcher", "torchrun"]
    found = run([*command, str(SCRIPT), fault], folder)
    report = json.loads(found[found.index("{") : found.rindex("}") + 1])
    return {f"{finding['kind']} {finding['check']}" for finding in report["findings"]}


def guardtower(fault: str, folder: Path) -> set[str]:
    """Return what guardtower says about the first step, on any rank."""
    found = torchrun(on_cpu(folder, audited=True), fault)
    assert "AUDIT" in found, found
    return {line for line in found.splitlines() if re.match("AUDIT (WARN|ERROR)", line)}


def collect(script: Path, fault: str, name: str, *options: str, seed: int = 0) -> Path:
    """Trace a run of two ranks with TrainCheck, and return the folder of the traces."""
    start = script.parent / "start.sh"
    torch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    start.write_text(f"cd {script.parent}\nrm -f checkpoint.pt\nSEED={seed} {torch} {script} {fault}\n")
    folder = script.parent / name
    command = ["traincheck-collect", "--pyscript", str(script), "--shscript", str(start)]
    command += ["--models-to-track", "body", "--model-tracker-style", "subclass"]  # the other two styles fail with DDP
    found = run([*command, "--output-dir", str(folder), *options], script.parent)
    assert any(folder.glob("trace_*")), found[-2000:]
    return folder


def traincheck(fault: str, folder: Path) -> set[str]:
    """Return the rules that a run breaks; they are learned in the first call."""
    script = on_cpu(folder)
    rules = folder / "rules.json"
    if not rules.exists():
        good = [str(collect(script, CORRECT, f"good{seed}", seed=seed)) for seed in (0, 10)]
        print(run(["traincheck-infer", "-f", *good, "-o", str(rules), "-j", "2"], folder)[-1000:], flush=True)
    trace = collect(script, fault, f"{fault}_traced", "--invariants", str(rules), seed=20)
    checked = folder / f"{fault}_checked"
    command = ["traincheck-check", "-f", str(trace), "-i", str(rules), "-o", str(checked), "--no-html-report"]
    print(run(command, folder)[-600:], flush=True)
    broken = set()
    for file in checked.rglob("failed*.log"):
        broken |= {json.dumps(each["invariant"], sort_keys=True) for each in json_values(file.read_text())}
    return broken


def json_values(text: str) -> list[dict]:
    """Return the JSON values that a file has one after the other."""
    decoder, values, position = json.JSONDecoder(), [], 0
    while (text := text[position:].lstrip()) != "":
        value, position = decoder.raw_decode(text)
        values.append(value)
    return values


class Decided(ast.NodeTransformer):
    """Leaves in the script only what it does with one fault, as somebody would have written it."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Replace ``"word" in faults`` by whether it is this fault."""
        self.generic_visit(node)
        if ast.unparse(node.comparators[0]) != "faults" or not isinstance(node.left, ast.Constant):
            return node
        return ast.Constant((node.left.value == self.fault) == isinstance(node.ops[0], ast.In))

    def visit_If(self, node: ast.If) -> Any:  # noqa: ANN401
        """Leave the branch that is taken."""
        self.generic_visit(node)
        return (node.body if node.test.value else node.orelse) if isinstance(node.test, ast.Constant) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Leave the value that is taken."""
        self.generic_visit(node)
        return (node.body if node.test.value else node.orelse) if isinstance(node.test, ast.Constant) else node


def torch_preflight(fault: str, folder: Path) -> set[str]:
    """Return the rules of torch-preflight that the text of the script breaks, with the number of places."""
    script = folder / "train.py"
    text = ast.unparse(ast.fix_missing_locations(Decided(fault).visit(ast.parse(SCRIPT.read_text()))))
    if fault == "same_samples":  # as somebody would have written it: no sampler at all
        text = re.sub(r" *sampler = .*\n", "", text).replace("sampler=sampler", "shuffle=True")
        text = re.sub(r" *if sampler is not None:\n.*\n", "", text)
    script.write_text(text)
    found = run(["torch-preflight", "check", "--format", "json", script.name], folder)
    report = json.loads(found[found.index("{") : found.rindex("}") + 1])
    codes = Counter(each["code"] for each in report["diagnostics"])
    return {f"{code} in {count} places" for code, count in codes.items()}


TOOLS: dict[str, Callable[[str, Path], set[str]]] = {
    "doctor": doctor,
    "guardtower": guardtower,
    "TrainCheck": traincheck,
    "torch-preflight": torch_preflight,
}
LINTER = "torch-preflight"


def main() -> None:
    """Look at all faults with the tools that are named, or with all, and store the table if it was all."""
    named = sys.argv[1:] or list(TOOLS)
    cells: dict[str, dict[str, str]] = {fault: {} for fault in [*FAULTS, CORRECT]}
    with tempfile.TemporaryDirectory() as folder:
        for name in named:
            began = time.monotonic()
            own = Path(folder, name)
            own.mkdir()
            said = {fault: TOOLS[name](fault, own) for fault in [CORRECT, *FAULTS]}
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
            for fault, new in said.items():
                more = new - said[CORRECT]
                print(f"  {fault}: {len(new)} said, new: {sorted(each[:300] for each in more)[:6]}", flush=True)
                cells[fault][name] = f"{len(new)} said" if fault == CORRECT else "yes" if more else "no"
    if named not in (list(TOOLS), [LINTER]):
        return
    rows: list[list[results.Cell]] = []
    for fault, meaning in (FAULTS | {CORRECT: "none: the correct script"}).items():
        rows.append([meaning, *(cells[fault][name] for name in named)])
    alone = named == [LINTER]
    results.store(
        "doctor_beside_linter" if alone else "doctor_beside_others",
        title=f"Ten faults, looked at with {named[0] if alone else f'{len(named)} tools'}",
        columns=["fault", *named],
        rows=rows,
        command=f"python lab/studies/doctor_beside_others.py{f' {LINTER}' if alone else ''}",
    )


if __name__ == "__main__":
    main()
