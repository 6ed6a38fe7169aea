"""The GPU tests of other libraries, on the CPU alone and on two null GPUs with values.

    python lab/studies/other_suites.py                          # all suites: an hour or more on two cores
    python lab/studies/other_suites.py timm opacus              # some of them
    python lab/studies/other_suites.py --folder DIR --store true

Each library is downloaded from PyPI in a pinned version, as the source distribution that carries its tests. The tests
run in an environment below the folder, which takes PyTorch from the one that runs this script. The files of a suite are
those that use a GPU (without timm's test_optim, which two cores do not end in a quarter of an hour); each runs in a
process of its own, twice: with `CUDA_VISIBLE_DEVICES=` and under `nullgpu --gpus 2 --values`. Nothing is loaded from a
hub, so tests that need one fail on the CPU too, and are counted there.

What was run is kept in the folder, so the same command goes on where the last one ended; --store true stores the table.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab import results  # noqa: E402
from lab.flags import Parser  # noqa: E402
from workshop.errors import UserError, run_reporting_user_errors  # noqa: E402

TIMEOUT = 900
"""seconds after which a file is ended"""
REASONS = 3
"""reasons that the table names for each library"""


@dataclass(frozen=True)
class Suite:
    """A library, and the files of its tests that use a GPU."""

    name: str
    version: str
    files: tuple[str, ...]
    """below the top of the source distribution"""
    needs: tuple[str, ...] = ()
    """what its tests need beside its own requirements"""
    on_gpu: tuple[str, ...] = ()
    """words for pytest on null GPUs"""
    variables: dict[str, str] = field(default_factory=dict)
    """of the environment on null GPUs"""


def in_folder(folder: str, names: str, end: str = ".py") -> tuple[str, ...]:
    """Return the files of a folder."""
    return tuple(f"{folder}/{name}{end}" for name in names.split())


SUITES = (
    Suite(
        "accelerate",
        "1.15.0",
        in_folder(
            "tests",
            "test_accelerator test_activation_checkpointing_offload test_big_modeling test_data_loader test_grad_sync "
            "test_hooks test_kwargs_handlers test_memory_utils test_metrics test_modeling_utils test_multidevice "
            "test_optimizer test_utils",
        ),
        needs=("parameterized==0.9.0", "torchdata==0.11.0", "transformers==5.24.0"),
    ),
    Suite(
        "timm",
        "1.0.31",
        in_folder("tests", "test_data test_layers test_layers_drop test_layers_pool test_layers_pos_embed"),
        needs=("expecttest==0.3.0",),
        variables={"TORCH_DEVICE": "cuda"},
    ),
    Suite(
        "pytorch_optimizer",
        "4.1.0",
        ("tests/optimizers", "tests/utils"),
        on_gpu=("--device", "cuda"),
    ),
    Suite(
        "opacus",
        "1.6.0",
        in_folder(
            "opacus/tests",
            "distributed_poisson mixed_precision multidevice_optimizer multigpu_adaptive_clipping multigpu_gradcheck "
            "multigpu_precision randomness",
            "_test.py",
        ),
        needs=("hypothesis==6.168.2",),
    ),
    Suite(
        "gpytorch",
        "1.15.2",
        ("test/functions", "test/kernels", "test/utils", "test/variational", "test/test_module.py"),
    ),
    Suite(
        "pytorch_ignite",
        "0.5.5",
        in_folder(
            "tests/ignite/metrics",
            "test_accuracy test_average_precision test_loss test_precision test_recall test_ssim",
        )
        + in_folder("tests/ignite/engine", "test_create_supervised test_deterministic"),
        needs=("scikit-learn==1.9.1", "scikit-image==0.26.0"),
    ),
)

Outcomes = dict[str, tuple[str, str]]
"""for each test its outcome (passed, failed or skipped), and the first line of why"""


# ---- libraries


def make_environment(folder: Path) -> Path:
    """Return the Python of an environment that takes what it lacks, PyTorch among it, from the one of this script."""
    python = folder / "env/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        (packages,) = (folder / "env/lib").glob("python*/site-packages")
        outside = sysconfig.get_paths()["purelib"]
        (packages / "outside.pth").write_text(f"import site; site.addsitedir({outside!r})\n")
    return python


def prepare(suite: Suite, folder: Path, python: Path) -> Path:
    """Download a library, install it with its requirements, and return the folder of its source."""
    source, done = folder / f"{suite.name}-{suite.version}", folder / f"{suite.name}-{suite.version}.installed"
    if done.exists():
        return source
    named = f"{suite.name}=={suite.version}"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-binary", ":all:", "--no-deps", "--dest", str(folder), named], check=True)
    (archive,) = folder.glob(f"{suite.name}-{suite.version}.tar.gz")
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    pinned = folder / "constraints.txt"
    pinned.write_text("".join(f"{name}=={version(name)}\n" for name in ("torch", "torchvision")))
    subprocess.run([*pip, "install", "--constraint", str(pinned), str(archive), *suite.needs], check=True)
    done.touch()
    return source


# ---- runs


def run_file(suite: Suite, file: str, source: Path, python: Path, on_gpu: bool, report: Path) -> Outcomes:
    """Run one file of tests; return what became of each test."""
    words = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        file,
        f"--junitxml={report}",
    ]
    paths = [str(source), os.environ.get("PYTHONPATH", "")]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": ":".join(filter(None, paths))}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
    if on_gpu:
        words = [sys.executable, "-m", "nullgpu", "--beside_gpu", "--gpus", "2", "--values", *words, *suite.on_gpu]
        env |= suite.variables
    else:
        env |= {"CUDA_VISIBLE_DEVICES": ""}
    report.unlink(missing_ok=True)
    with report.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(words, cwd=source, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return {file: ("failed", f"not ended after {TIMEOUT} s")}
    if not report.exists():
        return {file: ("failed", f"the process ended with status {status}")}
    return read_outcomes(report)


def read_outcomes(report: Path) -> Outcomes:
    """Return the outcomes in a JUnit file."""
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, why = "failed", first_line(child.get("message") or child.text or "")
            elif child.tag == "skipped" and outcome == "passed":
                outcome, why = "skipped", first_line(child.get("message") or "")
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome, why
    return found


def first_line(message: str) -> str:
    """Return the first line of a message, or its first error, without what differs from machine to machine."""
    error = re.search(r"^E +(.*)", message, re.MULTILINE)
    line = re.sub(r"(/[\w.+-]+)+/", ".../", error[1] if error else message.strip().partition("\n")[0])
    return re.sub(r"0x[0-9a-f]+", "0x...", line)[:100]


def run_suite(suite: Suite, folder: Path) -> dict[str, Outcomes]:
    """Run a suite on the CPU and on null GPUs, unless this was done; return the outcomes."""
    kept = folder / f"{suite.name}-{suite.version}.json"
    found: dict[str, dict[str, Outcomes]] = json.loads(kept.read_text()) if kept.exists() else {}
    python = make_environment(folder)
    source = prepare(suite, folder, python)
    for file in suite.files:
        for where in ("cpu", "null"):
            if file in found.get(where, {}):
                continue
            began = time.perf_counter()
            report = folder / f"{suite.name} {where} {file.replace('/', '.')}.xml"
            outcomes = run_file(suite, file, source, python, where == "null", report)
            found.setdefault(where, {})[file] = outcomes
            counts = Counter(outcome for outcome, _ in outcomes.values())
            print(f"{suite.name} {file} {where}: {dict(counts)} in {time.perf_counter() - began:.0f} s", flush=True)
            kept.write_text(json.dumps(found, indent=1))
    return {where: merged(found[where].values()) for where in ("cpu", "null")}


def merged(of_files: Iterable[Outcomes]) -> Outcomes:
    """Return the outcomes of several files together."""
    return {name: (outcome, why) for outcomes in of_files for name, (outcome, why) in outcomes.items()}


# ---- the table

COLUMNS = (
    *("library", "version", "tests", "passed on the CPU alone", "skipped there", "passed on null GPUs"),
    *("failed on null GPUs", "of these also on the CPU", "why the others failed"),
)


def row_of(suite: Suite, found: dict[str, Outcomes]) -> list[results.Cell]:
    """Return the row of a suite. A test that was skipped on null GPUs too was not run at all, and does not count."""
    cpu, null = found["cpu"], found["null"]
    ran = {name: outcome for name, (outcome, _) in null.items() if outcome != "skipped"}
    failed = [name for name, outcome in ran.items() if outcome == "failed"]
    too = [name for name in failed if cpu.get(name, ("", ""))[0] == "failed"]
    reasons = Counter(null[name][1] for name in failed if name not in too)
    why = [f"{reason} ({count})" for reason, count in reasons.most_common(REASONS)]
    rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(REASONS))
    why += [f"others ({rest})"] if rest else []

    def on_cpu(outcome: str) -> int:
        return sum(cpu.get(name, ("skipped", ""))[0] == outcome for name in ran)

    return [
        *(suite.name, suite.version, len(ran), on_cpu("passed"), on_cpu("skipped"), len(ran) - len(failed)),
        *(len(failed), len(too), "; ".join(why).replace("|", "/")),
    ]


def main() -> None:
    """Run the suites; print and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", help="libraries (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("other_suites"), help="folder for downloads and results")
    parser.add_argument("--store", choices=("true", "false"), default="false", help="store the table in results/")
    arguments = parser.parse_args()
    known = {suite.name: suite for suite in SUITES}
    for name in arguments.names:
        if name not in known:
            raise UserError(f"no suite '{name}': there are {', '.join(known)}")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # a library without settings of its own must not get those of this repository, if the folder is inside
    (folder / "pytest.ini").write_text("[pytest]\n")
    rows = []
    for suite in [known[name] for name in arguments.names] or SUITES:
        rows.append(row_of(suite, run_suite(suite, folder)))
        print(*rows[-1], sep="  ", flush=True)
    if arguments.store == "true":
        results.store(
            "other_suites",
            title="GPU tests of other libraries on two null GPUs with values",
            columns=COLUMNS,
            rows=rows,
            formats={name: ",.0f" for name in COLUMNS[2:8]},
            command=" ".join(["python lab/studies/other_suites.py", *arguments.names, "--store true"]),
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
