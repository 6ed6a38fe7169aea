"""Divide every matrix product over ranks (tensor parallel), also together with FSDP2, and count the collectives.

    torchrun --standalone --nproc-per-node 2 experiments/tensor_parallel.py    # FSDP2, and tensor parallel
    torchrun --standalone --nproc-per-node 4 experiments/tensor_parallel.py    # both together on 2 x 2 ranks, and HSDP

Every layout trains the small language model of small_training.py for four steps. You should see the losses and the
weights of one process in each row. The rows differ in the collectives of a step, in their bytes, and in the weights
that a rank stores.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lab import results
from lab.flags import Parser
from lab.process_group import mean_over_ranks, process_group
from mean_loss import mean_loss
from small_training import (
    batches,
    largest_difference,
    make_model,
    make_optimizer,
    part_of,
    train_one_process,
    whole_weights,
)
from workshop.errors import UserError, run_reporting_user_errors
from workshop.models.gpt import GPT, Block, RotaryTables, rotated


class Attention(nn.Module):
    """The attention of the lesson's block with separate layers for query, key and value.

    The lesson has one layer for all three. Its output is q, k, v side by side, so one half of its rows would be all
    queries and half of the keys. Of three layers, each rank gets the same heads of q, of k and of v.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        width = block.out.in_features
        self.head_dimension = width // block.heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        for layer, weight in zip((self.q, self.k, self.v), block.qkv.weight.chunk(3), strict=True):
            layer.load_state_dict({"weight": weight})
        self.out = block.out

    def forward(self, x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        """Map (N, T, width) to the same shape; ``tables`` are those of `rotary_tables`."""
        n, tokens, _ = x.shape
        # -1, not the number of heads: a rank has only some of them.
        q, k, value = (layer(x).view(n, tokens, -1, self.head_dimension) for layer in (self.q, self.k, self.v))
        query, key = rotated(q, tables), rotated(k, tables)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.out(attended.transpose(1, 2).reshape(n, tokens, -1))


class Network(nn.Module):
    """The gated network of the lesson's block as a module, with separate layers for the gate and what it is applied to.

    As a module, its input can be declared once for the two layers.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        width, hidden = block.gate_up.in_features, block.gate_up.out_features // 2
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        for layer, weight in zip((self.gate, self.up), block.gate_up.weight.chunk(2), strict=True):
            layer.load_state_dict({"weight": weight})
        self.down = block.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, T, width) to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SplitBlock(nn.Module):
    """A block of the lesson's language model, with its weights, whose layers can be divided over ranks."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = block.attention_norm, block.network_norm
        self.attention, self.network = Attention(block), Network(block)

    def forward(self, x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        """Map (N, T, width) to the same shape; ``tables`` are those of `rotary_tables`."""
        x = x + self.attention(self.attention_norm(x), tables=tables)
        return x + self.network(self.network_norm(x))


def make_split_model(depth: int = 4) -> GPT:
    """Return the model of small_training.py, the same function of the same weights, with blocks that can be divided."""
    model = make_model(depth)
    model.blocks = nn.ModuleList(SplitBlock(block) for block in model.blocks)
    return model


def fused_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a model with split blocks by the names of the lesson's model, whose layers are joined."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        joined = re.sub(r"\.attention\.[qkv]\.", ".qkv.", name)
        joined = re.sub(r"\.network\.(gate|up)\.", ".gate_up.", joined)
        found.setdefault(joined.replace(".attention.", ".").replace(".network.", "."), []).append(tensor)
    return {name: torch.cat(parts) for name, parts in found.items()}


def split_over_ranks(model: GPT, mesh: DeviceMesh, *, reduce_once: bool = True) -> None:
    """Divide the matrix products of every block over the ranks of a mesh with one dimension.

    Args:
        model: what `make_split_model` returned.
        mesh: the ranks.
        reduce_once: layers that have one input (q, k and v; gate and up) sum its gradient over the ranks only once.
    """
    plan: dict[str, ParallelStyle] = {
        "attention.q": ColwiseParallel(),  # a rank computes some of the outputs, from all inputs
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(),  # from some of the inputs, all outputs: their sum over the ranks is right
        "network.gate": ColwiseParallel(),
        "network.up": ColwiseParallel(),
        "network.down": RowwiseParallel(),
    }
    if reduce_once:
        everywhere = (Replicate(),)
        for module in ("attention", "network"):
            plan[module] = PrepareModuleInput(input_layouts=everywhere, desired_input_layouts=everywhere)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def shard(model: GPT, mesh: DeviceMesh) -> None:
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
    divide: Callable[[GPT, DeviceMesh], None]
    batch_parts: int
    """parts that the batch is divided into; ranks of one tensor-parallel group have the same part"""


def layouts(world_size: int) -> list[Layout]:
    """Return the layouts for this number of ranks."""

    def tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
        split_over_ranks(model, mesh["tp"])

    def more_reductions(model: GPT, mesh: DeviceMesh) -> None:
        split_over_ranks(model, mesh["tp"], reduce_once=False)

    def both(model: GPT, mesh: DeviceMesh) -> None:
        split_over_ranks(model, mesh["tp"])  # first: FSDP2 then shards what each rank has left
        shard(model, mesh["dp"])

    ranks = world_size
    more = f"TP on {ranks}, without PrepareModuleInput"
    found = [
        Layout(name=f"FSDP2 on {ranks}", mesh={"shard": ranks}, divide=shard, batch_parts=ranks),
        Layout(name=f"TP on {ranks}", mesh={"tp": ranks}, divide=tensor_parallel, batch_parts=1),
        Layout(name=more, mesh={"tp": ranks}, divide=more_reductions, batch_parts=1),
    ]
    if ranks == 4:
        copies = {"replicate": 2, "shard": 2}
        found += [
            Layout(name="FSDP2 on 2 x TP on 2", mesh={"dp": 2, "tp": 2}, divide=both, batch_parts=2),
            Layout(name="HSDP: 2 copies, each on 2", mesh=copies, divide=shard, batch_parts=4),
        ]
    return found


class Collectives(TorchDispatchMode):
    """Counts collectives, and adds up the bytes of the whole tensor of each: what is gathered, reduced, or summed.

    It sees those of FSDP2 and of DTensors. DDP calls its own from C++, where this cannot see them.
    """

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


def train(layout: Layout, batch_size: int, rank: int, expected: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Train in this layout; return a row on its collectives, and a row on where the parts of a weight are.

    Args:
        layout: how to divide the model.
        batch_size: samples in a step, of all ranks together.
        rank: of this process.
        expected: the losses and the weights of one process.
    """
    mesh = init_device_mesh("cpu", tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))
    model = make_split_model()
    layout.divide(model, mesh)
    optimizer = make_optimizer(model)
    # Ranks of one tensor-parallel group must have the same samples, all others different ones.
    part = rank * layout.batch_parts // mesh.size()
    losses = []
    for batch in batches(batch_size):
        inputs, targets = part_of(batch, part, layout.batch_parts)
        with Collectives() as sent:  # of the last step, when the loop has ended
            loss = mean_loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    of_losses = max(abs(a - b) for a, b in zip(losses, expected["losses"], strict=True))
    of_weights = largest_difference(fused_names(whole_weights(model)), expected["weights"])
    weight = model.blocks[0].network.up.weight
    assert isinstance(weight, DTensor)
    placements = ", ".join(map(repr, weight.placements))
    stored = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    counts = [sent.counts[kind] for kind in Collectives.KINDS]
    row = [layout.name, *counts, sum(sent.bytes.values()) / 1e6, stored, max(of_losses, of_weights)]
    return row, [layout.name, f"`{placements}`", " x ".join(map(str, weight.to_local().shape))]


def main() -> None:
    """Train in each layout together with the other ranks; rank 0 stores the tables."""
    parser = Parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=16, help="samples in a step, of all ranks (default: 16)")
    batch_size = parser.parse_args().batch_size
    if batch_size < 4 or batch_size % 4:
        raise UserError(f"--batch_size must be a multiple of 4, because 4 ranks share it, got {batch_size}")
    torch.set_num_threads(1)
    # To compare weights that are divided twice, DTensor gathers them in two steps, and warns that this is slow.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with process_group(on_cpu=True) as (rank, world_size, _):
        if world_size not in (2, 4):
            raise UserError(
                "the four attention heads are divided over 2 or 4 ranks: "
                "torchrun --standalone --nproc-per-node 2 experiments/tensor_parallel.py"
            )
        model = make_model()
        expected = {"losses": train_one_process(model, batch_size=batch_size), "weights": model.state_dict()}
        rows, placements = zip(
            *(train(layout, batch_size, rank, expected) for layout in layouts(world_size)), strict=True
        )
        if rank:
            return
        counted = ["all-gathers", "reduce-scatters", "all-reduces"]
        results.store(
            f"tensor_parallel_{world_size}_ranks",
            title=f"Layouts on {world_size} ranks",
            columns=["layout", *counted, "MB", "weights on rank 0", "differs by"],
            rows=rows,
            formats={"MB": ",.2f", "weights on rank 0": ",.0f", "differs by": ".0e"},
            spread="collectives and MB of one step of one rank; the difference is the largest one from one process, of "
            "the losses of four steps and of the weights after them",
        )
        if world_size == 4:
            columns = ["layout", "placements of a weight of 256 x 64", "part on rank 0"]
            title = "Where the parts of a weight are"
            results.store("tensor_parallel_placements", title=title, columns=columns, rows=placements)


if __name__ == "__main__":
    run_reporting_user_errors(main)
