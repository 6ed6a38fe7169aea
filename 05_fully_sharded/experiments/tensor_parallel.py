"""Divide every matrix product over ranks (tensor parallel), also together with FSDP2, and count the collectives.

    torchrun --standalone --nproc-per-node 2 experiments/tensor_parallel.py    # FSDP2, and tensor parallel
    torchrun --standalone --nproc-per-node 4 experiments/tensor_parallel.py    # both together on 2 x 2 ranks, and HSDP

Every layout trains the small vision transformer of small_training.py for four steps. You should see the losses and the
weights of one process in each row. The rows differ in the collectives of a step, in their bytes, and in the weights
that a rank stores.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lab.collectives import mean_over_ranks
from lab.flags import default_folder, make_output_folder
from lab.process_group import process_group
from lab.results import write_results
from lab.tables import format_table
from small_training import (
    LESSON,
    STEPS,
    about_run,
    batches,
    largest_difference,
    make_model,
    make_optimizer,
    part_of,
    train_one_process,
    whole_weights,
)
from workshop.commandline import run_with_config
from workshop.errors import UserError
from workshop.models.vit import Block, VisionTransformer


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags."""

    batch_size: int = 16
    """samples in a step, of all ranks together; a multiple of 4"""
    out: Path = field(default_factory=default_folder)
    """folder for tensor_parallel_2_ranks.json or tensor_parallel_4_ranks.json"""

    def __post_init__(self) -> None:
        if self.batch_size < 4 or self.batch_size % 4:
            raise UserError(f"--batch_size must be a multiple of 4, because 4 ranks share it, got {self.batch_size}")


class Attention(nn.Module):
    """The attention of the lesson's block with separate layers for query, key and value.

    The lesson has one layer for all three. Its output is q, k, v side by side, so one half of its rows would be all
    queries and half of the keys. Of three layers, each rank gets the same heads of q, of k and of v.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        width = block.out.in_features
        self.head_width = width // block.heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        for layer, weight, bias in zip(
            (self.q, self.k, self.v), block.qkv.weight.chunk(3), block.qkv.bias.chunk(3), strict=True
        ):
            layer.load_state_dict({"weight": weight, "bias": bias})
        self.out = block.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, patches, width) to the same shape."""
        n, patches, _ = x.shape
        # -1, not the number of heads: a rank has only some of them.
        query, key, value = (
            layer(x).view(n, patches, -1, self.head_width).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).reshape(n, patches, -1))


class SplitBlock(nn.Module):
    """A block of the lesson's vision transformer, with its weights, whose layers can be divided over ranks."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = block.norm1, Attention(block), block.norm2
        self.up, self.down = block.up, block.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, patches, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_split_model() -> VisionTransformer:
    """Return the model of small_training.py, the same function of the same weights, with blocks that can be divided."""
    model = make_model()
    model.blocks = nn.ModuleList(SplitBlock(block) for block in model.blocks)
    return model


def fused_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights under the names of the lesson's model, with q, k and v joined again."""
    found = {}
    for name, tensor in weights.items():
        if ".attention.q." in name:
            parts = [weights[name.replace(".q.", f".{letter}.")] for letter in "qkv"]
            found[name.replace("attention.q", "qkv")] = torch.cat(parts)
        elif ".attention.k." not in name and ".attention.v." not in name:
            found[name.replace("attention.out", "out")] = tensor
    return found


def split_over_ranks(model: VisionTransformer, mesh: DeviceMesh, *, reduce_once: bool = True) -> None:
    """Divide the matrix products of every block over the ranks of a mesh with one dimension.

    Args:
        model: what `make_split_model` returned.
        mesh: the ranks.
        reduce_once: q, k and v have one input, so sum its gradient over the ranks once and not three times.
    """
    plan: dict[str, ParallelStyle] = {
        "attention.q": ColwiseParallel(),  # a rank computes some of the outputs, from all inputs
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(),  # from some of the inputs, all outputs: their sum over the ranks is right
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    if reduce_once:
        everywhere = (Replicate(),)
        plan["attention"] = PrepareModuleInput(input_layouts=everywhere, desired_input_layouts=everywhere)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def shard(model: VisionTransformer, mesh: DeviceMesh) -> None:
    """Shard each block and then the rest as the lesson does. A mesh with two dimensions: replicate, then shard."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to divide the model and the batch over the ranks."""

    name: str
    mesh: dict[str, int]
    """ranks along each dimension"""
    divide: Callable[[VisionTransformer, DeviceMesh], None]
    batch_parts: int
    """parts that the batch is divided into; ranks of one tensor-parallel group have the same part"""


def layouts(world_size: int) -> list[Layout]:
    """Return the layouts for this number of ranks."""

    def tensor_parallel(model: VisionTransformer, mesh: DeviceMesh) -> None:
        split_over_ranks(model, mesh["tp"])

    def four_reductions(model: VisionTransformer, mesh: DeviceMesh) -> None:
        split_over_ranks(model, mesh["tp"], reduce_once=False)

    def both(model: VisionTransformer, mesh: DeviceMesh) -> None:
        split_over_ranks(model, mesh["tp"])  # first: FSDP2 then shards what each rank has left
        shard(model, mesh["dp"])

    def both_four_reductions(model: VisionTransformer, mesh: DeviceMesh) -> None:
        split_over_ranks(model, mesh["tp"], reduce_once=False)
        shard(model, mesh["dp"])

    ranks = world_size
    found = [
        Layout(name=f"FSDP2 on {ranks}", mesh={"shard": ranks}, divide=shard, batch_parts=ranks),
        Layout(name=f"TP on {ranks}, PrepareModuleInput", mesh={"tp": ranks}, divide=tensor_parallel, batch_parts=1),
        Layout(name=f"TP on {ranks}", mesh={"tp": ranks}, divide=four_reductions, batch_parts=1),
    ]
    if ranks % 2 == 0 and ranks > 2:
        half = ranks // 2
        grid = {"dp": half, "tp": 2}
        found += [
            Layout(name=f"FSDP2 on {half} x TP on 2, PrepareModuleInput", mesh=grid, divide=both, batch_parts=half),
            Layout(name=f"FSDP2 on {half} x TP on 2", mesh=grid, divide=both_four_reductions, batch_parts=half),
            Layout(
                name=f"HSDP: {half} copies, each on 2",
                mesh={"replicate": half, "shard": 2},
                divide=shard,
                batch_parts=ranks,
            ),
        ]
    return found


class Collectives(TorchDispatchMode):
    """Counts collectives, and adds up the bytes of the whole tensor of each: what is gathered, reduced, or summed."""

    KINDS = ("all_gather", "reduce_scatter", "all_reduce")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Execute one operation, and count it if it is a collective."""
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            kind = next((kind for kind in self.KINDS if kind in name), None)
            if kind:
                self.counts[kind] += 1
                self.bytes[kind] += max(map(tensor_bytes, (args, result)))
        return result


def tensor_bytes(value: Any) -> int:  # noqa: ANN401, what an operation takes or returns
    """Return the bytes of the largest tensor in the arguments or the result of an operation."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return max(map(tensor_bytes, value), default=0) if isinstance(value, list | tuple) else 0


def collectives(comm: CommDebugMode) -> dict[str, int]:
    """Return how many collectives of each kind were counted."""
    found: Counter[str] = Counter()
    for operation, count in comm.get_comm_counts().items():
        name = str(operation).replace("allgather", "all_gather").replace("allreduce", "all_reduce")
        found[next((kind for kind in Collectives.KINDS if kind in name), name)] += count
    return dict(found)


def train(layout: Layout, batch_size: int, rank: int, device: torch.device, expected: dict[str, Any]) -> dict[str, Any]:
    """Train in this layout and return its figures; ``expected`` has the losses and the weights of one process."""
    mesh = init_device_mesh(device.type, tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))
    model = make_split_model()
    layout.divide(model, mesh)
    # foreach=False: with tensor parallel alone, the weights outside of the divided layers are plain tensors. One call
    # for all weights cannot mix these with DTensors.
    optimizer = make_optimizer(model, foreach=False)
    # Ranks of one tensor-parallel group must have the same samples, all others different ones.
    part = rank * layout.batch_parts // mesh.size()
    losses, figures = [], {}
    for step, batch in enumerate(batches(STEPS, batch_size)):
        images, classes = part_of(batch, part, layout.batch_parts)
        if step == STEPS - 1:
            with CommDebugMode() as comm, Collectives() as sent:
                loss = LESSON.loss_function(model(images), classes)
                forward = collectives(comm)
                loss.backward()
            figures = {"forward": forward, "step": collectives(comm), "bytes": dict(sent.bytes)}
        else:
            loss = LESSON.loss_function(model(images), classes)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor)
    here = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "name": layout.name,
        "mesh": layout.mesh,
        **figures,
        "weights_on_rank0": sum(parameter.numel() for parameter in here),
        "loss_difference": max(abs(a - b) for a, b in zip(losses, expected["losses"], strict=True)),
        "weight_difference": largest_difference(fused_names(whole_weights(model)), expected["weights"]),
        "up_weight": {
            "placements": str(weight.placements),
            "shape": list(weight.shape),
            "local_shape": list(weight.to_local().shape),
        },
    }


def main(config: Config) -> None:
    """Train in each layout together with the other ranks; rank 0 prints and writes the results."""
    with process_group() as (rank, world_size, device):
        if world_size not in (2, 4):
            raise UserError(
                "the four attention heads are divided over 2 or 4 ranks: "
                "torchrun --standalone --nproc-per-node 2 experiments/tensor_parallel.py",
                already_reported=rank > 0,
            )
        if rank == 0:
            make_output_folder(config.out)
        torch.set_num_threads(1)
        # To compare weights that are divided twice, DTensor gathers them in two steps, and warns that this is slow.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        model = make_model()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        expected = {"losses": train_one_process(model, batch_size=config.batch_size), "weights": model.state_dict()}
        rows = [train(layout, config.batch_size, rank, device, expected) for layout in layouts(world_size)]
        dist.barrier()
        if rank == 0:
            report(rows, world_size, parameters, config, device)


def report(rows: list[dict[str, Any]], world_size: int, parameters: int, config: Config, device: torch.device) -> None:
    """Print the table and write the results."""
    cells = [
        (
            row["name"],
            *(str(row["step"].get(kind, 0)) for kind in Collectives.KINDS),
            f"{sum(row['bytes'].values()) / 1e6:.2f}",
            f"{row['weights_on_rank0']:,}",
            f"{row['loss_difference']:.0e}",
            f"{row['weight_difference']:.0e}",
        )
        for row in rows
    ]
    header = ("", "all-gathers", "reduce-scatters", "all-reduces", "MB", "weights on rank 0")
    print(f"{world_size} ranks, {parameters:,} weights, {config.batch_size} samples per step")
    print("collectives and MB: of one step, forward and backward\n")
    print(format_table([*header, "loss differs by", "weights differ by"], cells))
    print("\nlosses and weights: largest difference from one process, over four steps and after them")
    for row in rows:
        weight = row["up_weight"]
        print(f"{row['name']}: blocks.0.up.weight {weight['placements']}, {weight['local_shape']} of {weight['shape']}")
    file = config.out / f"tensor_parallel_{world_size}_ranks.json"
    figures = about_run("tensor_parallel.py", world_size) | {"ranks": world_size, "parameters": parameters}
    write_results(file, device, figures | {"batch_size": config.batch_size, "rows": rows})
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    run_with_config(main, Config, __doc__)
