"""Install the workshop into the folder .venv: needs Python 3.11 or newer, and a network.

    python3 install.py                 # PyTorch for the GPU of this machine, or a small one where there is no GPU
    python3 install.py --torch cpu     # or cuda, or pypi: the newest one from the package index; oldest: see OLDEST
    python3 install.py --extras dev    # and what the tests need; `make test` calls this

With uv (https://docs.astral.sh/uv/) on the PATH it takes a fraction of the time; without it, pip installs.
"""

from __future__ import annotations  # so that an older Python gets as far as the message about its version

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import NoReturn

FOLDER = Path(__file__).resolve().parent
INDEX = "https://download.pytorch.org/whl"
OLDEST = "2.11.*"
"""the oldest PyTorch that is supported; constraints.txt has the newest one. Both are tested (make test-oldest)"""
TOOLS = ("./tools/nullgpu", "./tools/rankdoctor")
"""projects of their own, whose commands the lessons use"""


def gpus() -> list[tuple[int, float]]:
    """Return the driver's number and the compute capability of each NVIDIA GPU; [] if there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
        rows = [line.split(",") for line in printed.splitlines()]
        return [(int(driver.split(".")[0]), float(capability)) for driver, capability in rows]
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []


def index_for(kind: str, found: list[tuple[int, float]]) -> tuple[str, str]:
    """Return the name of PyTorch's index, and the PyTorch that it has last; "" for the usual index, and the tested one.

    PyTorch on the usual index is built for CUDA 13: driver R580 and compute capability 7.5 (Turing, 2018), or newer.
    For CUDA 12.6 the last one is 2.14 (https://github.com/pytorch/pytorch/issues/190355), for CUDA 12.8, which
    Blackwell needs with an older driver, 2.11 (https://github.com/pytorch/FBGEMM/pull/5976).
    """
    if kind in ("pypi", "oldest"):
        return "", OLDEST if kind == "oldest" else ""
    if kind == "cpu" or not found:
        return "cpu", ""
    driver, capability = min(driver for driver, _ in found), min(capability for _, capability in found)
    if driver >= 580 and capability >= 7.5:
        return "", ""
    return ("cu128", "2.11.*") if capability >= 10 else ("cu126", "2.14.*")


def reachable(index: str) -> bool:
    """Return whether PyTorch's own index answers from here."""
    try:
        with urllib.request.urlopen(f"{INDEX}/{index}/torch/", timeout=20):
            return True
    except OSError:
        return False


def constraints(torch: str) -> Path:
    """Return the file of tested versions; with another PyTorch, one without those that come with PyTorch."""
    tested = FOLDER / "constraints.txt"
    if not torch:
        return tested
    with_torch = ("torch", "triton", "nvidia-cu", "nvidia-nccl", "nvidia-nv", "cuda-", "setuptools")  # older than 82
    kept = [line for line in tested.read_text().splitlines() if not line.startswith(with_torch)]
    file = Path(tempfile.mkdtemp()) / "constraints.txt"
    file.write_text("\n".join([*kept, f"torch=={torch}", ""]))
    return file


def main() -> None:
    """Make the folder of the environment, and install into it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=os.environ.get("TORCH", "auto"), help="auto, cpu, cuda, pypi or oldest")
    parser.add_argument("--folder", default=".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--extras", default="", help="dev, dali, jax, cupy: see pyproject.toml")
    arguments = parser.parse_args()
    found = gpus()
    if arguments.torch not in ("auto", "cpu", "cuda", "pypi", "oldest"):
        end(f"no PyTorch '{arguments.torch}': TORCH is cpu, cuda, pypi or oldest")
    if arguments.torch == "cuda" and not found:
        end("nvidia-smi shows no GPU: leave out --torch cuda, or choose --torch pypi")
    kind = arguments.torch
    if kind == "auto" and not found and shutil.which("sbatch"):
        print("Slurm is here, so this may be a cluster's login node: PyTorch for GPUs; --torch cpu takes a small one")
        kind = "pypi"
    index, torch = index_for(kind, found)
    if index == "cpu" and not reachable(index):
        print(f"{INDEX} was not reached: PyTorch comes with CUDA's libraries, which are large and do no harm")
        index = ""
    elif index and not reachable(index):
        end(f"{INDEX}/{index} was not reached, which has the PyTorch for the driver of this machine")

    extras = ",".join(filter(None, [arguments.extras, "dali" if found and sys.platform == "linux" else ""]))
    what = [word for folder in (*TOOLS, f".[{extras}]" if extras else ".") for word in ("--editable", folder)]
    what += ["--constraint", str(constraints(torch))]
    python = str(Path(arguments.folder, "bin/python"))
    make = [sys.executable, "-m", "venv", arguments.folder]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--extra-index-url", f"{INDEX}/{index}"] if index else []
    ways = [(make, [*install, *what])]
    if uv := shutil.which("uv"):
        make = [uv, "venv", "--quiet", "--allow-existing", "--seed", "--python", sys.executable, arguments.folder]
        install = [uv, "pip", "install", "--quiet", "--python", python, *(["--torch-backend", index] if index else [])]
        ways.insert(0, (make, [*install, *what]))
    large, small = "Installing into .venv: some gigabytes, a few minutes.", "about one gigabyte"
    said = large.replace("some gigabytes", small) if index == "cpu" else large
    print(said.replace(".venv", arguments.folder), flush=True)
    for number, way in enumerate(ways, start=1):
        failed = next((command for command in way if subprocess.run(command, cwd=FOLDER).returncode), None)
        if failed is None:
            return
        if number < len(ways):  # a site often sets for pip alone its proxy, certificates and index
            print("uv failed, and said why above; pip installs instead", flush=True)
    end(f"this failed, and said why above: {' '.join(failed)}")


def end(message: str) -> NoReturn:
    """Say what is wrong, and end with the status of a user's mistake."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 it may be run with any Python
        end("Python 3.11 or newer is needed: python3.11 install.py, or conda env create -f environment.yml")
    main()
