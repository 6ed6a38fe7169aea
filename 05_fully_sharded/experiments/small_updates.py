"""Weights stored in bf16: how many of them does a step of the optimizer change at all?

    torchrun --standalone --nproc-per-node 2 experiments/small_updates.py

Both models compute in bf16, on CPUs. One stores its weights in float32, as --precision bf16 of train.py does. The other
one was converted to bf16 before it was sharded, and is otherwise the same. You should see that the step changes nearly
all weights in float32, but in bf16 only those whose update is not rounded away: fewer of them, the smaller the
learning rate is.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lab import results
from lab.flags import Parser
from lab.process_group import process_group
from mean_loss import mean_loss
from sharded_models import LESSON, Batch, batches_of, whole
from workshop.config import require_positive
from workshop.errors import run_reporting_user_errors

LEARNING_RATES = (1e-3, 1e-4, 1e-5)
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sharded_in(stored: torch.dtype, width: int, world_size: int) -> FSDPModule:
    """Return a model whose weights are stored in a format, and which computes in bf16 as with --precision bf16."""
    torch.manual_seed(0)  # the same weights on all ranks, and in both formats but for the rounding
    model = LESSON.make_model(LESSON.Config(width=width)).to(stored)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (world_size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def share_changed(model: FSDPModule, lr: float, batch: Batch) -> float:
    """Make one step of AdamW; return the share of the weights that it changes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    inputs, targets = batch
    before = whole(model.parameters())
    mean_loss(model(inputs).float(), targets).backward()
    optimizer.step()
    return (whole(model.parameters()) != before).double().mean().item()


def main() -> None:
    """Measure on all ranks; rank 0 stores the table."""
    parser = Parser(__doc__)
    parser.add_argument("--width", type=int, default=128, help="as in train.py (default: %(default)s)")
    arguments = parser.parse_args()
    require_positive(arguments, "width")
    torch.set_num_threads(1)
    with process_group(on_cpu=True) as (rank, world_size, _):
        (batch,) = batches_of(rank, batch_size=8, sequence_length=32)
        rows: list[list[results.Cell]] = []
        for lr in LEARNING_RATES:
            models = [sharded_in(stored, arguments.width, world_size) for stored in FORMATS.values()]
            rows.append([f"{lr:g}", *(share_changed(model, lr, batch) for model in models)])
        if rank == 0:
            columns = [f"changed, stored in {name}" for name in FORMATS]
            results.store(
                "small_updates",
                title="Weights that an update changes",
                columns=["learning rate", *columns],
                rows=rows,
                formats=dict.fromkeys(columns, ".1%"),
                spread="share of the weights",
            )


if __name__ == "__main__":
    run_reporting_user_errors(main)
