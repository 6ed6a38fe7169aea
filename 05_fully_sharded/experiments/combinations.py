"""What can be combined with FSDP2, and in which order? Each combination trains, and is compared with one process.

    torchrun --standalone --nproc-per-node 2 experiments/combinations.py                          # minutes
    torchrun --standalone --nproc-per-node 2 experiments/combinations.py --quick true             # no code is compiled
    torchrun --standalone --nproc-per-node 2 experiments/combinations.py --only checkpointing     # some of them

You should see "equal" for most combinations, and "close" for those that compute in 16 bits. Some fail with an error,
and some train something else without any error. Each function below divides the model, trains it, and returns losses,
weights and what is worth knowing about it. Where the order matters, there is a function for each order.
"""

# ruff: noqa: D103, what a function does is said by the name of its combination

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from combination_training import (
    COMBINATIONS,
    DEPTH,
    MAX_NORM,
    Outcome,
    Process,
    combination,
    kept_megabytes,
    model_for,
    shard,
    shared_folder,
    train,
    try_all,
    with_moved,
)
from lab.flags import Parser
from lab.process_group import process_group
from small_training import LESSON, batches, make_optimizer, part_of
from tensor_parallel import make_split_model, split_over_ranks
from workshop.errors import UserError, run_reporting_user_errors
from workshop.models.gpt import GPT, Block, rotated

# --- FSDP2 alone ------------------------------------------------------------------------------------------------------

ALONE = "fully_shard"


@combination(ALONE, "each block, then the model")
def blocks_first(process: Process) -> Outcome:
    return train(shard(model_for()), process)


@combination(ALONE, "the model, then each block")
def root_first(process: Process) -> Outcome:
    model = fully_shard(model_for())
    for block in model.blocks:
        fully_shard(block)
    return train(model, process)


@combination(ALONE, "each block, the embedding by itself, then the model")
def embedding_by_itself(process: Process) -> Outcome:
    model = model_for()
    fully_shard(model.embed)
    return train(shard(model), process)


@combination(ALONE, "the same, with `reshard_after_forward=False` for the embedding")
def embedding_kept(process: Process) -> Outcome:
    model = model_for()
    fully_shard(model.embed, reshard_after_forward=False)
    return train(shard(model), process)


@combination(ALONE, "validate under `torch.inference_mode()` first")
def inference_first(process: Process) -> Outcome:
    model = shard(model_for())
    with torch.inference_mode():
        model(next(batches())[0])
    return train(model, process)


def validate(model: nn.Module) -> None:
    """Compute the outputs for a batch, and no gradients."""
    with torch.no_grad():
        model(next(batches())[0])


@combination(ALONE, "the optimizer, then a validation under `torch.no_grad()`, then training (lesson 05)")
def no_grad_first(process: Process) -> Outcome:
    model = shard(model_for())
    optimizer = make_optimizer(model)
    validate(model)
    return with_moved(train(model, process, optimizer))


@combination(ALONE, "a validation under `torch.no_grad()`, then the optimizer, then training")
def optimizer_after_validation(process: Process) -> Outcome:
    model = shard(model_for())
    validate(model)
    return with_moved(train(model, process))


@combination(ALONE, "a validation, `model.reshard()`, then the optimizer, then training")
def optimizer_after_reshard(process: Process) -> Outcome:
    model = shard(model_for())
    validate(model)
    model.reshard()
    return with_moved(train(model, process))


@combination(ALONE, "`copy.deepcopy` of the sharded model, as for an average of the weights")
def copied(process: Process) -> Outcome:
    return train(copy.deepcopy(shard(model_for())), process)


# --- activation checkpointing and torch.compile -----------------------------------------------------------------------

CHECKPOINTING = "checkpointing and compile"


def with_kept_megabytes(model: nn.Module, process: Process) -> Outcome:
    """Train, and add how many bytes are kept for backward."""
    outcome = train(model, process)
    outcome.facts["MB kept for backward"] = kept_megabytes(model, process)
    return outcome


def wrap_blocks(model: nn.Module) -> None:
    """Have every block computed again in backward, by a module around it."""
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, Block)
    )


@combination(CHECKPOINTING, "no checkpointing, for comparison")
def no_checkpointing(process: Process) -> Outcome:
    return with_kept_megabytes(shard(model_for()), process)


@combination(CHECKPOINTING, "`checkpoint_wrapper`, then `fully_shard`")
def wrapper_sharded(process: Process) -> Outcome:
    model = model_for()
    wrap_blocks(model)
    return with_kept_megabytes(shard(model), process)


@combination(CHECKPOINTING, "`fully_shard`, then `checkpoint_wrapper`")
def wrapped_after_sharding(process: Process) -> Outcome:
    model = shard(model_for())
    wrap_blocks(model)
    return with_kept_megabytes(model, process)


def train_compiled(model: nn.Module, process: Process, **options: Any) -> Outcome:  # noqa: ANN401
    """Train, and add how many graphs were compiled."""
    from torch._dynamo.utils import counters

    counters.clear()
    outcome = train(model, process, count=False, **options)
    outcome.facts["graphs compiled"] = counters["stats"]["unique_graphs"]
    return outcome


@combination(CHECKPOINTING, "`fully_shard`, then `model.compile()` (lesson 05)")
def lesson_compile(process: Process) -> Outcome:
    model = shard(model_for())
    model.compile(dynamic=False, backend=process.compiler)
    return train_compiled(model, process)


@combination(CHECKPOINTING, "`model.compile()`, then `fully_shard`")
def compile_first(process: Process) -> Outcome:
    model = model_for()
    model.compile(dynamic=False, backend=process.compiler)
    return train_compiled(shard(model), process)


@combination(CHECKPOINTING, "`block.forward = partial(checkpoint, block.forward)`, `fully_shard`, `model.compile()`")
def partial_compiled(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    shard(model).compile(dynamic=False, backend=process.compiler)
    return train_compiled(model, process)


@combination(CHECKPOINTING, "`block.forward` = a function that calls checkpoint (lesson 05), the same")
def function_compiled(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        block.forward = LESSON.recomputed(block.forward)
    shard(model).compile(dynamic=False, backend=process.compiler)
    return train_compiled(model, process)


# --- number formats ---------------------------------------------------------------------------------------------------

FORMATS = "16 bits"


def policy(dtype: torch.dtype) -> dict[str, Any]:
    """Return the option for `fully_shard`: send and compute in this format, add up and store in 32 bits."""
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}


def with_format(model: nn.Module, outcome: Outcome) -> Outcome:
    """Add the format in which the weights are stored."""
    outcome.facts["stored as"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    return outcome


@combination(FORMATS, "`MixedPrecisionPolicy`, bf16 (lesson 05)", sixteen_bits=True)
def bf16_policy(process: Process) -> Outcome:
    model = shard(model_for(), **policy(torch.bfloat16))
    return with_format(model, train(model, process))


@combination(FORMATS, "`torch.autocast`, bf16, no policy", sixteen_bits=True)
def bf16_autocast(process: Process) -> Outcome:
    model = shard(model_for())
    return with_format(model, train(model, process, autocast=torch.bfloat16))


@combination(FORMATS, "`model.to(bf16)`, then `fully_shard`", sixteen_bits=True)
def bf16_weights(process: Process) -> Outcome:
    model = shard(model_for().to(torch.bfloat16), **policy(torch.bfloat16))
    return with_format(model, train(model, process))


@combination(FORMATS, "`GradScaler`, a gradient of rank 1 overflows: both ranks must skip the step")
def overflow_on_one(process: Process) -> Outcome:
    model = shard(model_for())
    optimizer, scaler = make_optimizer(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    inputs, targets = part_of(next(batches()), process.rank, process.world_size)
    scaler.scale(LESSON.loss_function(model(inputs), targets)).backward()
    weight = model.blocks[0].up.weight  # each rank has a part of it; of a very small weight, some ranks have none
    if process.rank == 1:
        weight.grad.to_local().fill_(torch.inf)
    before = weight.detach().to_local().clone()
    scaler.step(optimizer)
    scaler.update()
    found = torch.tensor([scaler.get_scale(), float((weight.detach().to_local() != before).any())])
    of_ranks = [torch.empty(2) for _ in range(process.world_size)]
    dist.all_gather(of_ranks, found)
    skipped = [bool(moved == 0) for _, moved in of_ranks]
    if not all(skipped) or len({float(scale) for scale, _ in of_ranks}) > 1:
        raise AssertionError(f"scales and moved weights of the ranks: {of_ranks}")
    return Outcome(facts={"step skipped on ranks 0, 1": "yes, yes"})


@combination(
    FORMATS,
    "checkpointing, bf16 policy, compile, 2 parts, clipping and a fused optimizer at once",
    sixteen_bits=True,
    clipped=True,
)
def all_at_once(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        block.forward = LESSON.recomputed(block.forward)
    shard(model, **policy(torch.bfloat16)).compile(dynamic=False, backend=process.compiler)
    optimizer = make_optimizer(model, fused=True)
    return train_compiled(model, process, optimizer=optimizer, accumulate=2, max_norm=MAX_NORM)


# --- tensor parallel --------------------------------------------------------------------------------------------------

TENSOR_PARALLEL = "tensor parallel"


def split_model(process: Process) -> tuple[GPT, DeviceMesh]:
    """Return the model with blocks whose layers can be divided, and a mesh of 1 x all ranks: dp and tp."""
    return make_split_model(DEPTH), init_device_mesh("cpu", (1, process.world_size), mesh_dim_names=("dp", "tp"))


def train_split(process: Process, *, sharded: bool, max_norm: float | None = None) -> Outcome:
    """Train with tensor parallel, perhaps together with FSDP2."""
    model, mesh = split_model(process)
    split_over_ranks(model, mesh["tp"])
    if sharded:
        shard(model, mesh=mesh["dp"])
    return train(model, process, same_batch=True, max_norm=max_norm)


@combination(TENSOR_PARALLEL, "`parallelize_module`, then `fully_shard`")
def split_then_shard(process: Process) -> Outcome:
    return train_split(process, sharded=True)


@combination(TENSOR_PARALLEL, "`fully_shard`, then `parallelize_module`")
def shard_then_split(process: Process) -> Outcome:
    model, mesh = split_model(process)
    shard(model, mesh=mesh["dp"])
    split_over_ranks(model, mesh["tp"])
    return train(model, process, same_batch=True)


def train_fused_qkv(model: nn.Module, process: Process) -> Outcome:
    """Divide the rows of the layer that computes q, k and v, as if they were all of one kind; train."""
    mesh = init_device_mesh("cpu", (process.world_size,))
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("qkv", "gate", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return train(model, process, same_batch=True)


@combination(TENSOR_PARALLEL, "the lesson's block as it is: one layer for q, k and v")
def fused_qkv(process: Process) -> Outcome:
    return train_fused_qkv(model_for(), process)


class LocalHeads(Block):
    """The lesson's block, but it counts the heads that its rank has: no error, and still wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, T, width) to the same shape."""
        n, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(n, tokens, 3, -1, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, tokens, -1))
        inside = self.network_norm(x)
        return x + self.down(F.silu(self.gate(inside)) * self.up(inside))


@combination(TENSOR_PARALLEL, "one layer for q, k and v, heads counted on each rank")
def fused_qkv_local_heads(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        block.__class__ = LocalHeads
    return train_fused_qkv(model, process)


# --- the optimizer ----------------------------------------------------------------------------------------------------

OPTIMIZER = "optimizer and clipping"


@combination(OPTIMIZER, "`fully_shard`, then the optimizer (lesson 05)")
def optimizer_after(process: Process) -> Outcome:
    return with_moved(train(shard(model_for()), process))


@combination(OPTIMIZER, "the optimizer, then `fully_shard`")
def optimizer_before(process: Process) -> Outcome:
    model = model_for()
    optimizer = make_optimizer(model)
    return with_moved(train(shard(model), process, optimizer))


@combination(OPTIMIZER, "`clip_grad_norm_` (lesson 05)", clipped=True)
def clip(process: Process) -> Outcome:
    return train(shard(model_for()), process, max_norm=MAX_NORM)


@combination(OPTIMIZER, "tensor parallel: `clip_grad_norm_`, some weights are plain tensors", clipped=True)
def clip_tensor_parallel(process: Process) -> Outcome:
    return train_split(process, sharded=False, max_norm=MAX_NORM)


@combination(OPTIMIZER, "tensor parallel and FSDP2: `clip_grad_norm_`, two meshes", clipped=True)
def clip_two_meshes(process: Process) -> Outcome:
    return train_split(process, sharded=True, max_norm=MAX_NORM)


# --- saving -----------------------------------------------------------------------------------------------------------

SAVING = "saving"  # the code that torch.compile generates does not matter here, so the backend is always "eager"


def saved_and_loaded(outcome: Outcome, state: dict[str, Any]) -> Outcome:
    """Save ``state``, and put what one process loads from these files into the outcome of the training."""
    with shared_folder() as folder:
        dcp.save({"model": state}, checkpoint_id=folder)
        loaded = model_for().state_dict()
        try:
            dcp.load({"model": loaded}, checkpoint_id=folder)
        except dcp.api.CheckpointException as errors:  # no Exception; has the error of each rank
            raise next(error for error, _ in errors.failures.values()) from None
    return Outcome(outcome.losses, loaded, outcome.facts)


@combination(SAVING, "saved by two ranks, loaded into one whole model")
def save(process: Process) -> Outcome:
    model = shard(model_for())
    return saved_and_loaded(train(model, process), get_model_state_dict(model))


@combination(SAVING, "with `torch.compile(model)`, `model.state_dict()`")
def save_optimized_module(process: Process) -> Outcome:
    model = torch.compile(shard(model_for()), dynamic=False, backend="eager")
    return saved_and_loaded(train(model, process, count=False), model.state_dict())


@combination(SAVING, "with `torch.compile(model)`, `get_model_state_dict(model)`")
def save_optimized_module_clean(process: Process) -> Outcome:
    model = torch.compile(shard(model_for()), dynamic=False, backend="eager")
    return saved_and_loaded(train(model, process, count=False), get_model_state_dict(model))


def main() -> None:
    """Try the combinations together with the other rank; rank 0 stores the tables."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--quick", choices=("true", "false"), default="false", help="torch.compile traces, but generates no code"
    )
    parser.add_argument("--only", default="", help="try only those whose group or name contains this text")
    arguments = parser.parse_args()
    chosen = [tried for tried in COMBINATIONS if arguments.only in f"{tried.group}, {tried.name}"]
    if not chosen:
        raise UserError(f"--only {arguments.only}: no combination has this in its group or name")
    torch.set_num_threads(1)
    with process_group(on_cpu=True) as (rank, world_size, _):
        if world_size != 2:
            raise UserError(
                "this experiment is for two ranks: torchrun --standalone --nproc-per-node 2 experiments/combinations.py"
            )
        try_all(chosen, Process(rank, world_size, "eager" if arguments.quick == "true" else "inductor"))


if __name__ == "__main__":
    run_reporting_user_errors(main)
