"""Make a notebook of each lesson's page, for a machine that is not yours: Colab (one GPU) or Kaggle (two).

    python -m lab.notebooks --address https://github.com/OWNER/REPOSITORY     # into build/notebooks

A notebook has the text of the page, and its commands as cells, so there is no second copy of either. The first cell
fetches and installs the workshop where it is not installed. Commands of Slurm stay text: neither machine has one. A
page beside the notebooks has links that open them, from a branch named notebooks.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from lab.site import LINK, REPOSITORY, without_comments

OUT = REPOSITORY / "build" / "notebooks"
SLURM = r"\b(sbatch|srun|scancel|squeue|sacct|local_cluster\.sh)\b"
COMMANDS = re.compile(r"^```bash\n(.*?)^```$|(^<details>.*?^</details>$)", re.MULTILINE | re.DOTALL)
IMAGE = r"(?<=\]\()(?P<target>[^)\s#:]+\.(?:png|svg))(?=\))"
START = """\
# Fetches and installs the workshop where it is not installed, which takes some minutes.
import importlib.util, os
os.environ["MPLBACKEND"] = "agg"  # the commands below draw into files
if importlib.util.find_spec("workshop") is None:
    !git clone --quiet --depth 1 {address} workshop
    !pip install --quiet --editable workshop
    os.chdir("workshop/{lesson}")"""
WHERE = """\
This notebook was made from [the page of the lesson]({page}). On **Colab**, choose *Runtime, Change runtime type, T4 \
GPU*: lessons 01 and 04 then run on a GPU. On **Kaggle**, choose *GPU T4 x2* and switch the internet on: the commands \
with `torchrun --nproc-per-node 2` of lessons 03 and 05 then run on two real GPUs, and lesson 02 has two to divide a \
batch among. (A T4 has tensor cores for fp16, and none for bf16.) Commands for Slurm are text here."""


OPENERS = {
    "Colab": "https://colab.research.google.com/github/{name}/blob/notebooks/{file}",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/{name}/blob/notebooks/{file}",
}
"""what opens a notebook of the branch `notebooks` of a repository on GitHub"""


def cell(kind: str, text: str) -> dict[str, Any]:
    """Return a cell of a notebook (https://nbformat.readthedocs.io), version 4.4."""
    rest: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)} | rest


def notebook(page: Path, address: str) -> dict[str, Any]:
    """Return the notebook of a lesson's page."""
    lesson = page.parent.name
    text = without_comments(page.read_text())
    text = re.sub(IMAGE, lambda link: f"{address}/raw/main/{place(page, link['target'])}", text)
    text = re.sub(LINK, lambda link: f"{address}/blob/main/{place(page, link['target'])}", text)
    cells, end = [], 0
    for found in COMMANDS.finditer(text):
        if found[1] is None or re.search(SLURM, found[1]):
            continue  # text inside of an answer cannot be a cell of its own
        cells += [cell("markdown", text[end : found.start()]), cell("code", f"%%bash\n{found[1]}")]
        end = found.end()
    cells.append(cell("markdown", text[end:]))
    start = [cell("markdown", WHERE.format(page=f"{address}/blob/main/{lesson}/README.md"))]
    start.append(cell("code", START.format(address=address, lesson=lesson)))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "accelerator": "GPU", "language_info": {"name": "python"}}
    return {"cells": [*start, *cells], "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def place(page: Path, target: str) -> str:
    """Return what a page's link leads to, from the top of the repository."""
    return os.path.relpath(page.parent / target, REPOSITORY)


def main() -> None:
    """Write the notebooks of all lessons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="address of the repository, for links and for cloning it")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: build/notebooks)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for page in sorted(REPOSITORY.glob("0*/README.md")):
        file = arguments.out / f"{page.parent.name}.ipynb"
        file.write_text(json.dumps(notebook(page, arguments.address.rstrip("/")), indent=1) + "\n")
        print(file)
    (arguments.out / "README.md").write_text(contents(sorted(arguments.out.glob("0*.ipynb")), arguments.address))


def contents(files: list[Path], address: str) -> str:
    """Return a page with links that open the notebooks."""
    name = address.rstrip("/").removeprefix("https://github.com/")
    lines = [f"# Notebooks of [the workshop]({address})", "", "| lesson | open on |", "| --- | --- |"]
    for file in files:
        opened = [f"[{where}]({opener.format(name=name, file=file.name)})" for where, opener in OPENERS.items()]
        lines.append(f"| [{file.stem}]({file.name}) | {', '.join(opened)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
