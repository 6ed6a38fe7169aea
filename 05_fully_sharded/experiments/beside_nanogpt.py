"""How fast is this lesson's script on one process, beside nanoGPT's on a model of the same size?

    git clone https://github.com/karpathy/nanoGPT
    python experiments/beside_nanogpt.py --nanogpt nanoGPT        # on an idle machine: some minutes

Both train on the same bytes, in float32, 16 sequences of 128 bytes per step, and take turns, with torch.compile too.
nanoGPT's model has five blocks of width 128, and about as many weights as the four of gpt_tiny, because this lesson's
blocks have a third matrix in their network. A second table says what the small operations of this lesson's model cost.
"""

import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lab import results
from lab.flags import Parser
from lab.timing import alternately
from workshop.datasets import text
from workshop.errors import UserError, run_reporting_user_errors
from workshop.models import gpt
from workshop.paths import REPOSITORY, default_data_dir

TOKENS = 16 * 128
"""in a step"""
NANOGPT = """train.py --dataset=bytes --n_layer=5 --n_head=2 --n_embd=128 --block_size=128 --batch_size=16 --device=cpu
    --gradient_accumulation_steps=1 --dtype=float32 --bias=False --dropout=0.0 --learning_rate=3e-3
    --max_iters=150 --eval_interval=1000 --eval_iters=1 --log_interval=1 --always_save_checkpoint=False"""
OURS = "train.py --limit_train 2400 --limit_val 64 --log_interval 10 --precision fp32 --num_workers 0"
KINDS = {
    "nanoGPT": "--compile=False",
    "`--shard none`": "--shard none",
    "`--shard none --fused true`": "--shard none --fused true",
    "`--shard blocks`": "--shard blocks",
    "nanoGPT, compiled": "--compile=True",
    "`--shard none --compile default`": "--shard none --compile default",
    "`--shard blocks --compile default`": "--shard blocks --compile default",
}
"""flags; each script is compared with the nanoGPT above it"""
PARTS = ("rotary positions", "RMSNorm", "gated network")
"""of this lesson's model, which nanoGPT's has not"""


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


def tokens_per_second(kind: str, nanogpt: Path, run_dir: str) -> float:
    """Train; return the speed of the median step, without the first ones."""
    flags = KINDS[kind].split()
    if kind.startswith("nanoGPT"):
        steps = re.findall(r"iter \d+: .*time ([\d.]+)ms", printed_by([*NANOGPT.split(), *flags], nanogpt))
        return 1000 * TOKENS / statistics.median(map(float, steps[10:]))
    printed = printed_by([*OURS.split(), *flags, "--run_dir", run_dir], Path(__file__).resolve().parents[1])
    means = re.findall(r"load ([\d.]+) ms  compute ([\d.]+) ms", printed)
    return 1000 * TOKENS / statistics.median(float(load) + float(compute) for load, compute in means[1:])


class PlainNetwork(gpt.Block):
    """A block whose network has two matrices with a GELU between them, and as many weights as the gated one."""

    def __init__(self, size: gpt.GPTSize) -> None:
        super().__init__(size)
        self.gate_up = nn.Linear(size.width, 3 * size.hidden // 2, bias=False)
        self.down = nn.Linear(3 * size.hidden // 2, size.width, bias=False)

    def forward(self, x: torch.Tensor, tables: gpt.RotaryTables) -> torch.Tensor:
        """Map (N, T, width) to the same shape."""
        n, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(n, tokens, 3 * self.heads, width // self.heads)
        qk, value = qkv.split((2 * self.heads, self.heads), dim=2)
        heads = (each.transpose(1, 2) for each in (*gpt.rotated(qk, tables).chunk(2, dim=2), value))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.gate_up(self.network_norm(x))))


def step_milliseconds(without: Collection[str]) -> float:
    """Train the model in a plain loop, with some of its `PARTS` replaced; return the time of the median step."""
    size = gpt.gpt_size("gpt_tiny")
    model = gpt.GPT(size)
    if "gated network" in without:
        model.blocks = nn.ModuleList(PlainNetwork(size) for _ in range(size.depth))
    if "RMSNorm" in without:
        for block in model.blocks:
            block.attention_norm, block.network_norm = (nn.LayerNorm(size.width, bias=False) for _ in range(2))
        model.norm = nn.LayerNorm(size.width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (16, 129))
    times = []
    with patch.object(gpt, "rotated", lambda x, tables: x) if "rotary positions" in without else nullcontext():
        for _ in range(40):
            began = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[10:])


def store_parts(rounds: int) -> None:
    """Store what the small operations of this model cost."""
    kinds: dict[str, tuple[str, ...]] = {"as it is": (), **{f"without {name}": (name,) for name in PARTS}}
    kinds["without all three"] = PARTS
    found = alternately({kind: partial(step_milliseconds, without) for kind, without in kinds.items()}, rounds)
    rows: list[list[results.Cell]] = []
    for kind, times in found.items():
        saved = [100 * (1 - mine / whole) for mine, whole in zip(times, found["as it is"], strict=True)]
        rows.append([kind, *([statistics.median(each), min(each), max(each)] for each in (times, saved))])
    results.store(
        "small_operations",
        title="The same model in a plain loop, with parts of it replaced",
        columns=["", "ms/step", "less, %"],
        rows=rows,
        formats={"ms/step": ".1f", "less, %": ".0f"},
        spread=f"median (lowest to highest) of {rounds} rounds; without RMSNorm: with LayerNorm; without the gated "
        "network: with two matrices of as many weights, and a GELU",
        command="python experiments/beside_nanogpt.py",
    )


def main() -> None:
    """Measure all kinds in turns, and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--nanogpt", type=Path, required=True, help="folder of a clone of nanoGPT")
    parser.add_argument("--rounds", type=int, default=4, help="(default: 4)")
    arguments = parser.parse_args()
    nanogpt = arguments.nanogpt.resolve()
    if not (nanogpt / "train.py").exists():
        raise UserError(f"no train.py in {nanogpt}: git clone https://github.com/karpathy/nanoGPT")
    prepare(nanogpt)
    with tempfile.TemporaryDirectory() as folder:
        measure = {kind: partial(tokens_per_second, kind, nanogpt, folder) for kind in KINDS}
        speeds = alternately(measure, arguments.rounds)
    rows: list[list[results.Cell]] = []
    other: list[float] = []
    for kind, found in speeds.items():
        other = found if kind.startswith("nanoGPT") else other
        ratios = [mine / theirs for mine, theirs in zip(found, other, strict=True)]
        rows.append([kind, *([statistics.median(each), min(each), max(each)] for each in (found, ratios))])
    results.store(
        "beside_nanogpt",
        title="A model of a million weights, trained by one process",
        columns=["", "tokens/s", "ratio"],
        rows=rows,
        formats={"tokens/s": ",.0f", "ratio": ".2f"},
        spread=f"median (lowest to highest) of {arguments.rounds} rounds; ratio: to nanoGPT in the same round",
        command="python experiments/beside_nanogpt.py",
    )
    store_parts(arguments.rounds)


if __name__ == "__main__":
    run_reporting_user_errors(main)
