"""Fresh weights after the meta device: which rows of a matrix are equal, and which buffers are lost?

    torchrun --standalone --nproc-per-node 2 experiments/meta_device.py

A model that is built on the meta device has shapes, but no numbers. After it was sharded, each rank must fill its own
part. You should see that with the same seed on every rank all parts get the same numbers, that a seed for each rank
helps, and that train.py, where rank 0 sends the weights, has no equal rows either. A buffer that is not in the state
dict, such as a constant that __init__ computes, is filled by none of them.
"""

import argparse
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lab.flags import Parser, require_positive
from lab.tables import format_table
from sharded_models import LESSON_05, flags_of, measure_on_ranks, sharded
from workshop.entry import run_reporting_user_errors
from workshop.models.vit import build_vit

SCALE = 2.0
"""the constant in the buffer; __init__ sets it"""


class WithBuffer(nn.Module):
    """A layer with a buffer that no state dict has."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((), SCALE), persistent=False)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--vit_width", type=int, default=128, help="as in train.py (default: %(default)s)")
    parser.add_out("meta_device.json")
    arguments = parser.parse_args()
    require_positive(arguments, "vit_width")
    return arguments


def filled_by_each_rank(width: int, seed: int, device: torch.device, ranks: int) -> FSDPModule:
    """Return a sharded model whose parts this rank fills with random numbers of its own seed."""
    with torch.device("meta"):
        model = build_vit("mnist", 64, 7, width, depth=1)
    mesh = init_device_mesh(device.type, (ranks,))
    for block in LESSON_05.blocks_of(model):
        fully_shard(block, mesh=mesh)
    sharded_model = fully_shard(model, mesh=mesh)
    sharded_model.to_empty(device=device)
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Conv2d):
            module.reset_parameters()
    nn.init.normal_(model.positions, std=0.02)  # last: its only row is on rank 0, which alone takes numbers for it
    return sharded_model


def distinct_rows(model: nn.Module) -> dict[str, int]:
    """Return how many rows a weight matrix has, and how many different ones. All ranks must call this."""
    rows = LESSON_05.blocks_of(model)[0].out.weight.full_tensor().detach()
    return {"rows": len(rows), "distinct": len(torch.unique(rows, dim=0))}


def buffer_after_meta(device: torch.device, ranks: int) -> float:
    """Return what is in a buffer outside the state dict after sharding and `to_empty`: whatever memory contained."""
    with torch.device("meta"):
        model = WithBuffer()
    fully_shard(model, mesh=init_device_mesh(device.type, (ranks,)))
    model.to_empty(device=device)
    return model.scale.item()


def measure(arguments: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Return the different rows of a weight by who has filled it, and what is in a buffer outside the state dict."""
    warnings.filterwarnings("ignore", "DTensor random operators")  # what that means is what this script shows
    width = arguments.vit_width
    train_py, _, _ = sharded(flags_of(width, 1), rank, device, world_size)
    models: dict[str, Any] = {
        "every rank fills its part, same seed": filled_by_each_rank(width, 0, device, world_size),
        "every rank fills its part, seed + rank": filled_by_each_rank(width, rank, device, world_size),
        "train.py: rank 0 draws, and sends each rank its part": train_py,
    }
    rows = [{"way": way} | distinct_rows(model) for way, model in models.items()]
    buffer = {"set_by_init": SCALE, "after_meta": buffer_after_meta(device, world_size)}
    return {"ranks": world_size, "rows": rows, "buffer": buffer}


def report(figures: dict[str, Any]) -> None:
    """Print the figures."""
    cells = [[row["way"], str(row["rows"]), str(row["distinct"])] for row in figures["rows"]]
    print(format_table(["weights", "rows", "different ones"], cells))
    after = figures["buffer"]["after_meta"]
    print(f"the buffer outside the state dict, which __init__ sets to {SCALE:g}, is now {after:g}")


def main() -> None:
    """Measure, print and save."""
    measure_on_ranks(parse_arguments, measure, report, "meta_device.json")


if __name__ == "__main__":
    run_reporting_user_errors(main)
