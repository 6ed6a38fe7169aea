"""How fast is this lesson's script on one process, beside nanoGPT's on a model of the same size?

    git clone https://github.com/karpathy/nanoGPT
    python experiments/beside_nanogpt.py --nanogpt nanoGPT        # on an idle machine: some minutes

Both train on the same bytes, in float32, 16 sequences of 128 bytes per step, and take turns. nanoGPT's model has five
blocks of width 128, and about as many weights as the four of gpt_tiny, because this lesson's blocks have a third
matrix in their network.
"""

import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from lab import results
from lab.flags import Parser
from workshop.datasets import text
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import REPOSITORY, default_data_dir

TOKENS = 16 * 128
"""in a step"""
NANOGPT = """train.py --dataset=bytes --n_layer=5 --n_head=2 --n_embd=128 --block_size=128 --batch_size=16 --device=cpu
    --compile=False --gradient_accumulation_steps=1 --dtype=float32 --bias=False --dropout=0.0 --learning_rate=3e-3
    --max_iters=150 --eval_interval=1000 --eval_iters=1 --log_interval=1 --always_save_checkpoint=False"""
OURS = "train.py --limit_train 2400 --limit_val 64 --log_interval 10 --precision fp32 --num_workers 0"


def prepare(nanogpt: Path) -> None:
    """Write the bytes of the text in nanoGPT's format: numbers of 16 bits, and a file that says how many kinds."""
    folder = nanogpt / "data" / "bytes"
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        text.tokens(default_data_dir(), split).numpy().astype(np.uint16).tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256, "stoi": {}, "itos": {}}))


def printed_by(words: list[str], folder: Path) -> str:
    """Return what a training prints.

    Raises:
        UserError: it failed.
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, text=True, capture_output=True)
    if done.returncode:
        raise UserError(f"{words[0]} in {folder} failed: {done.stderr[-500:]}")
    return done.stdout


def main() -> None:
    """Measure pairs of runs, and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--nanogpt", type=Path, required=True, help="folder of a clone of nanoGPT")
    parser.add_argument("--pairs", type=int, default=4, help="(default: 4)")
    arguments = parser.parse_args()
    nanogpt = arguments.nanogpt.resolve()
    if not (nanogpt / "train.py").exists():
        raise UserError(f"no train.py in {nanogpt}: git clone https://github.com/karpathy/nanoGPT")
    prepare(nanogpt)
    theirs, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.pairs):
            steps = re.findall(r"iter \d+: .*time ([\d.]+)ms", printed_by(NANOGPT.split(), nanogpt))
            theirs.append(1000 * TOKENS / statistics.median(map(float, steps[10:])))
            printed = printed_by([*OURS.split(), "--run_dir", folder], Path(__file__).resolve().parents[1])
            steps = re.findall(r"load ([\d.]+) ms  compute ([\d.]+) ms", printed)
            ours.append(1000 * TOKENS / statistics.median(float(load) + float(compute) for load, compute in steps[1:]))
    store(theirs, ours)


def store(theirs: list[float], ours: list[float]) -> None:
    """Store the tokens/s of each pair's runs."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    rows: list[list[results.Cell]] = []
    for name, speeds in (("nanoGPT", theirs), ("this lesson", ours)):
        shown = ratios if speeds is ours else [1.0] * len(ours)
        rows.append([name, *([statistics.median(each), min(each), max(each)] for each in (speeds, shown))])
    results.store(
        "beside_nanogpt",
        title="A model of a million weights, trained by one process",
        columns=["", "tokens/s", "ratio"],
        rows=rows,
        formats={"tokens/s": ",.0f", "ratio": ".2f"},
        spread=f"median (lowest to highest) of {len(ours)} pairs of runs",
        command="python experiments/beside_nanogpt.py",
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
