"""What do sequences of different lengths cost on four GPUs, and what does it help to sort or to pack them?

    python experiments/sequence_lengths.py           # a few minutes, on a machine that does nothing else

Each line of the table is a training with DDP: four real ranks on simulated A100s, which wait for one another. You
should see that random batches are mostly padding; that batches of similar lengths are not, but that the ranks wait for
one another if each sorts for itself; and that packed rows need neither. It needs what the null GPU needs
(tools/nullgpu/README.md). The training alone, on four real GPUs:

    torchrun --standalone --nproc_per_node 4 experiments/sequence_lengths.py --order similar
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from lab import results
from lab.flags import Parser
from lab.plots import COLORS
from lab.simulated import simulate
from workshop.errors import run_reporting_user_errors

SCRIPT = Path(__file__).resolve()
RANKS, BATCH, LONGEST = 4, 32, 1024
MEDIAN, SPREAD = 200, 0.8
"""of the lengths: log-normal, as texts of people are (assumed)"""
SHOWN = 1000
"""ms of the time lines"""
SKIP = 3
"""updates that are not counted"""
HOST = 4
"""how many times as fast the host counts, because four ranks share the CPUs of this machine"""
ORDERS = {
    "random": "random batches",
    "alone": "similar lengths, each rank for itself",
    "similar": "similar lengths on all ranks",
    "packed": "packed into rows of 1,024",
}


def draw_lengths(number: int) -> torch.Tensor:
    """Return the lengths (number,) of sequences."""
    noise = torch.randn(number, generator=torch.Generator().manual_seed(1))
    return (MEDIAN * (SPREAD * noise).exp()).long().clamp(16, LONGEST)


def similar_lengths(lengths: torch.Tensor, ranks: int, batch: int, epoch: int, pool: int = 16) -> torch.Tensor:
    """Return the numbers of the samples in each step for each rank (steps, ranks, batch), equal on all ranks.

    The last samples, too few for a step of all ranks, are left out; in another epoch they are others.
    """
    generator = torch.Generator().manual_seed(epoch)
    shuffled = torch.randperm(len(lengths), generator=generator)
    shuffled = shuffled[: len(lengths) // (ranks * batch) * ranks * batch]
    steps: list[torch.Tensor] = []
    for part in shuffled.split(pool * ranks * batch):
        steps += part[lengths[part].argsort()].split(ranks * batch)
    order = torch.randperm(len(steps), generator=generator)  # now sorted by length, so shuffle the steps
    mixed = torch.stack([steps[number] for number in order])
    return mixed.view(-1, batch, ranks).transpose(1, 2)  # neighbors in length to different ranks


def deal(order: str, lengths: torch.Tensor) -> torch.Tensor:
    """Return the same as `similar_lengths` in this order."""
    if order == "similar":
        return similar_lengths(lengths, RANKS, BATCH, epoch=1)
    samples = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).view(-1, RANKS, BATCH)
    if order != "alone":
        return samples
    own = samples.transpose(0, 1).flatten(1)  # each rank sorts and shuffles its own samples
    alone = [similar_lengths(lengths[numbers], 1, BATCH, epoch=rank) for rank, numbers in enumerate(own)]
    return torch.stack([numbers[steps[:, 0]] for numbers, steps in zip(own, alone, strict=True)], dim=1)


def packed_rows(lengths: torch.Tensor) -> int:
    """Return the number of rows that hold, on average, the tokens of a batch without padding."""
    return round(lengths.float().mean().item() * BATCH / LONGEST)


def tokens_of(order: str, lengths: torch.Tensor) -> tuple[float, float]:
    """Return how many tokens a step has on average, on all ranks together: without padding, and with it."""
    if order == "packed":
        tokens = float(RANKS * packed_rows(lengths) * LONGEST)
        return tokens, tokens
    counted = lengths[deal(order, lengths)[SKIP + 1 :]]  # the report counts from the end of an update on
    return counted.sum().item() / len(counted), BATCH * counted.amax(dim=2).sum().item() / len(counted)


def train(order: str, steps: int) -> None:
    """Train a small transformer with DDP on sequences of zeros."""
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # backward goes on while a bucket is reduced: see train.py
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_float32_matmul_precision("high")
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, activation="gelu", batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(32000, 1024), body, nn.Linear(1024, 32000)).cuda()
    ddp_model = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.AdamW(ddp_model.parameters(), 3e-4, fused=True)
    lengths = draw_lengths(steps * RANKS * BATCH)
    for samples in deal(order, lengths):
        longest = int(lengths[samples[rank]].max())
        shape = (packed_rows(lengths), LONGEST) if order == "packed" else (BATCH, longest)
        tokens = torch.zeros(shape, dtype=torch.long, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(ddp_model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def bars(events: list[dict[str, Any]], begin: float, waiting: bool) -> list[tuple[float, float]]:
    """Return (start, length) of what a stream of GPUs does from a time on, in ms: it computes, or waits for a rank."""
    found: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event["ts"]):
        start, end = ((event["ts"] + more) / 1e3 - begin for more in (0, event["dur"]))
        if event["name"].startswith("waits for rank") != waiting or end < 0 or start > SHOWN:
            continue
        if found and start < found[-1][0] + found[-1][1] + 0.1:  # draw kernels that follow one another as one bar
            start = found.pop()[0]
        found.append((start, end - start))
    return found


def draw(axes: Axes, events: list[dict[str, Any]]) -> None:
    """Draw a part of the time lines of all ranks."""
    spans = [e for e in events if e["ph"] == "X" and e["tid"] > 0 and e["name"] not in ("AllReduce", "Broadcast")]
    begin = max(e["ts"] for e in spans) / 2e3
    for rank in range(RANKS):
        own = [e for e in spans if e["pid"] == rank]
        axes.broken_barh(bars(own, begin, waiting=True), (rank - 0.4, 0.8), color=COLORS[1], label="waits for a rank")
        axes.broken_barh(bars(own, begin, waiting=False), (rank - 0.4, 0.8), color=COLORS[0], label="computes")
    axes.set(xlim=(0, SHOWN), yticks=range(RANKS), yticklabels=[f"rank {rank}" for rank in range(RANKS)])
    axes.invert_yaxis()


def study(orders: list[str], steps: int) -> None:
    """Simulate these orders, and store the table and the time lines."""
    rows: list[list[results.Cell]] = []
    figure = Figure(figsize=(9, 1.7 * len(orders) + 0.4), layout="constrained")
    for axes, order in zip(figure.subplots(len(orders), 1, squeeze=False, sharex=True)[:, 0], orders, strict=True):
        words = ("torchrun", "--standalone", "--nproc_per_node", RANKS, SCRIPT, "--order", order, "--steps", steps)
        found = simulate("a100", *words, gpus=RANKS, host=HOST, skip=SKIP)
        real, computed = tokens_of(order, draw_lengths(steps * RANKS * BATCH))
        per_second = real / (found.milliseconds / 1e3)
        rows.append([ORDERS[order], 1 - real / computed, found.busy, found.waits_for("ranks"), per_second])
        print(*rows[-1], sep=" | ", flush=True)
        draw(axes, found.events)
        axes.set_title(f"{ORDERS[order]}: {per_second:,.0f} tokens/s", loc="left", fontsize=10)
    axes.set_xlabel("ms of simulated time")
    figure.legend(*(part[:2] for part in axes.get_legend_handles_labels()), loc="outside upper right", ncols=2)
    for row in rows:
        row.append(row[-1] / rows[0][4])  # type: ignore[operator]
    results.store(
        "sequence_lengths",
        title=f"Sequences of different lengths on {RANKS} simulated A100s",
        columns=["", "padding", "GPU busy", "waits for other ranks", "real tokens/s", "gain"],
        rows=rows,
        formats={
            "padding": ".0%",
            "GPU busy": ".0%",
            "waits for other ranks": ".0%",
            "real tokens/s": ",.0f",
            "gain": ".2f",
        },
        figure=figure,
        unit=f"rank 0 of {RANKS}; a transformer with 12 layers and 216 million weights",
        command="python experiments/sequence_lengths.py",
    )


def main() -> None:
    """Run the study, or, with --order, the training of one rank."""
    parser = Parser(__doc__)
    parser.add_argument("--order", choices=ORDERS, help="train in this order, as one rank of torchrun")
    parser.add_argument("--compare", choices=ORDERS, nargs="+", default=list(ORDERS), help="these (default: all)")
    parser.add_argument("--steps", type=int, default=64, help="of each training (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.order:
        train(arguments.order, arguments.steps)
    else:
        study(arguments.compare, arguments.steps)


if __name__ == "__main__":
    run_reporting_user_errors(main)
