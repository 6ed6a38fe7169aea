"""Weights stored in bf16: how many of them does a step of the optimizer change at all?

    torchrun --standalone --nproc-per-node 2 experiments/small_updates.py

Both models compute in bf16. One stores its weights in float32, as --precision bf16 of train.py does. The other one was
converted to bf16 before it was sharded, and is otherwise the same. You should see that the step changes all weights in
float32, but in bf16 only those whose update is not rounded away: fewer of them, the smaller the learning rate is.
"""

import argparse
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lab.flags import Parser, require_positive
from lab.tables import format_table
from sharded_models import LESSON_05, measure_on_ranks, own_batches, whole
from workshop.entry import run_reporting_user_errors
from workshop.models.vit import build_vit

LEARNING_RATES = (1e-3, 1e-4, 1e-5)
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--vit_width", type=int, default=128, help="as in train.py (default: %(default)s)")
    parser.add_argument("--vit_depth", type=int, default=4, help="as in train.py (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="images per rank (default: %(default)s)")
    parser.add_out("small_updates.json")
    arguments = parser.parse_args()
    require_positive(arguments, "vit_width", "vit_depth", "batch_size")
    return arguments


def sharded_in(arguments: argparse.Namespace, stored: torch.dtype, device: torch.device, ranks: int) -> FSDPModule:
    """Return a model whose weights are stored in a format, and which computes in bf16 as with --precision bf16."""
    torch.manual_seed(0)  # the same weights on all ranks, and in both formats but for the rounding
    model = build_vit("mnist", 64, 7, arguments.vit_width, arguments.vit_depth).to(device, stored)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in LESSON_05.blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def share_changed(model: FSDPModule, lr: float, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, torch.dtype]:
    """Make one step of AdamW; return the share of the weights that it changes, and the format of its state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    inputs, targets = batch
    before = whole(model.parameters())
    LESSON_05.loss_function(model(inputs).float(), targets).backward()
    optimizer.step()
    changed = (whole(model.parameters()) != before).double().mean().item()
    weight = next(iter(optimizer.state))
    return changed, optimizer.state[weight]["exp_avg"].dtype


def measure(arguments: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Return the share of the weights that a step changes, for each format and learning rate."""
    (batch,) = own_batches(rank, arguments.batch_size, device, count=1)
    rows = []
    for lr in LEARNING_RATES:
        for name, stored in FORMATS.items():
            changed, state = share_changed(sharded_in(arguments, stored, device, world_size), lr, batch)
            state_name = str(state).removeprefix("torch.")
            rows.append({"stored": name, "optimizer_state": state_name, "lr": lr, "changed": changed})
    return {"ranks": world_size, "rows": rows}


def report(figures: dict[str, Any]) -> None:
    """Print the figures."""
    cells = [
        [row["stored"], row["optimizer_state"], f"{row['lr']:g}", f"{row['changed']:.1%}"] for row in figures["rows"]
    ]
    header = ["weights in", "optimizer state in", "lr", "weights that the step changes"]
    print(format_table(header, cells, left=(0, 1)))


def main() -> None:
    """Measure, print and save."""
    measure_on_ranks(parse_arguments, measure, report, "small_updates.json")


if __name__ == "__main__":
    run_reporting_user_errors(main)
