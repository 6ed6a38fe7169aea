"""The combinations that composition.py tries: FSDP2 with everything else that a training uses, in different orders.

Each function divides the model, trains it, and returns losses, weights and what is worth knowing about it. Where the
order matters, there is a function for each order.
"""

# ruff: noqa: D103, what a function does is said by the name of its combination

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from combination_training import (
    COMBINATIONS,
    MAX_NORM,
    Combination,
    Outcome,
    Process,
    combination,
    compiled_graphs,
    is_block,
    kept_bytes,
    model_for,
    recompute_block,
    recompute_in_function,
    shard,
    shared_folder,
    train,
    with_moved,
)
from small_training import (
    LESSON,
    batches,
    make_optimizer,
    part_of,
)
from tensor_parallel import SplitBlock, split_over_ranks
from workshop.commandline import load_config
from workshop.models.vit import Block, VisionTransformer

# --- FSDP2 alone ------------------------------------------------------------------------------------------------------

ALONE = "fully_shard"


@combination(ALONE, "each block, then the model")
def blocks_first(process: Process) -> Outcome:
    return train(shard(model_for()), process)


@combination(ALONE, "only the model")
def only_root(process: Process) -> Outcome:
    return train(fully_shard(model_for()), process)


@combination(ALONE, "the model, then each block")
def root_first(process: Process) -> Outcome:
    model = fully_shard(model_for())
    for block in model.blocks:
        fully_shard(block)
    return train(model, process)


@combination(ALONE, "then DistributedDataParallel around it")
def ddp_around(process: Process) -> Outcome:
    return train(DistributedDataParallel(shard(model_for())), process)


@combination(ALONE, "CPUOffloadPolicy(), without a GPU")
def offload(process: Process) -> Outcome:
    return train(shard(model_for(), offload_policy=CPUOffloadPolicy()), process)


@combination(ALONE, "CPUOffloadPolicy(pin_memory=False), without a GPU")
def offload_not_pinned(process: Process) -> Outcome:
    return train(shard(model_for(), offload_policy=CPUOffloadPolicy(pin_memory=False)), process)


@combination(ALONE, "validate under torch.inference_mode() first")
def inference_first(process: Process) -> Outcome:
    model = shard(model_for())
    with torch.inference_mode():
        model(next(batches())[0])
    return train(model, process)


def validate(model: nn.Module) -> None:
    """Compute the outputs for a batch, and no gradients."""
    with torch.no_grad():
        model(next(batches())[0])


@combination(ALONE, "the optimizer, then a validation under torch.no_grad(), then training (lesson 05)")
def no_grad_first(process: Process) -> Outcome:
    model = shard(model_for())
    optimizer = make_optimizer(model)
    validate(model)
    return train(model, process, optimizer)


@combination(ALONE, "a validation under torch.no_grad(), then the optimizer, then training")
def optimizer_after_validation(process: Process) -> Outcome:
    model = shard(model_for())
    validate(model)
    return with_moved(model_for().state_dict(), train(model, process))


@combination(ALONE, "a validation, model.reshard(), then the optimizer, then training")
def optimizer_after_reshard(process: Process) -> Outcome:
    model = shard(model_for())
    validate(model)
    model.reshard()
    return with_moved(model_for().state_dict(), train(model, process))


@combination(ALONE, "copy.deepcopy of the sharded model, as for an average of the weights")
def copied(process: Process) -> Outcome:
    return train(copy.deepcopy(shard(model_for())), process)


# --- activation checkpointing -----------------------------------------------------------------------------------------

CHECKPOINTING = "activation checkpointing"


def with_kept_bytes(model: nn.Module, process: Process) -> Outcome:
    """Train, and add how many bytes are kept for backward."""
    outcome = train(model, process)
    outcome.facts["kept MB"] = round(kept_bytes(model, process) / 1e6, 2)
    return outcome


@combination(CHECKPOINTING, "none, for comparison")
def no_checkpointing(process: Process) -> Outcome:
    return with_kept_bytes(shard(model_for()), process)


@combination(CHECKPOINTING, "checkpoint_wrapper, then fully_shard of the wrapper")
def wrapper_sharded(process: Process) -> Outcome:
    model = model_for()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    return with_kept_bytes(shard(model), process)


@combination(CHECKPOINTING, "checkpoint_wrapper, then fully_shard of the block inside")
def block_inside_sharded(process: Process) -> Outcome:
    model = model_for()
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    for block in blocks:
        fully_shard(block)
    return with_kept_bytes(fully_shard(model), process)


@combination(CHECKPOINTING, "fully_shard, then checkpoint_wrapper")
def wrapped_after_sharding(process: Process) -> Outcome:
    model = shard(model_for())
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_block)
    return with_kept_bytes(model, process)


@combination(CHECKPOINTING, "block.forward = partial(checkpoint, block.forward), then fully_shard")
def lesson_checkpointing(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        recompute_block(block)
    return with_kept_bytes(shard(model), process)


@combination(CHECKPOINTING, "fully_shard, then block.forward = partial(checkpoint, block.forward)")
def forward_replaced_after(process: Process) -> Outcome:
    model = shard(model_for())
    for block in model.blocks:
        recompute_block(block)
    return with_kept_bytes(model, process)


# --- torch.compile ----------------------------------------------------------------------------------------------------

COMPILE = "torch.compile"


def train_compiled(model: nn.Module, process: Process, **options: Any) -> Outcome:  # noqa: ANN401
    """Train, and add how many graphs were compiled."""
    compiled_graphs()
    outcome = train(model, process, count=False, **options)
    outcome.facts |= compiled_graphs()
    return outcome


@combination(COMPILE, "fully_shard, then model.compile() (lesson 05)")
def lesson_compile(process: Process) -> Outcome:
    model = shard(model_for())
    model.compile(dynamic=False, backend=process.compiler)
    return train_compiled(model, process)


@combination(COMPILE, "model.compile(), then fully_shard")
def compile_first(process: Process) -> Outcome:
    model = model_for()
    model.compile(dynamic=False, backend=process.compiler)
    return train_compiled(shard(model), process)


@combination(COMPILE, "fully_shard, then torch.compile(model)")
def optimized_module(process: Process) -> Outcome:
    return train_compiled(torch.compile(shard(model_for()), dynamic=False, backend=process.compiler), process)


@combination(COMPILE, "torch.compile(model), then fully_shard of what it returns")
def optimized_module_first(process: Process) -> Outcome:
    return train_compiled(shard(torch.compile(model_for(), dynamic=False, backend=process.compiler)), process)


@combination(COMPILE, "block.compile() of each block, then fully_shard")
def blocks_compiled_first(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        block.compile(dynamic=False, backend=process.compiler)
    return train_compiled(shard(model), process)


@combination(COMPILE, "fully_shard, then block.compile() of each block")
def blocks_compiled_after(process: Process) -> Outcome:
    model = shard(model_for())
    for block in model.blocks:
        block.compile(dynamic=False, backend=process.compiler)
    return train_compiled(model, process)


@combination(COMPILE, "checkpoint_wrapper, block.compile(), fully_shard")
def checkpointing_compiled(process: Process) -> Outcome:
    model = model_for()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
        model.blocks[number].compile(dynamic=False, backend=process.compiler)
    return train_compiled(shard(model), process)


@combination(COMPILE, "block.forward = partial(checkpoint, block.forward), fully_shard, model.compile()")
def partial_checkpointing_compiled(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        recompute_block(block)
    shard(model).compile(dynamic=False, backend=process.compiler)
    return train_compiled(model, process)


@combination(COMPILE, "block.forward = a function that calls checkpoint, fully_shard, model.compile()")
def function_checkpointing_compiled(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        recompute_in_function(block)
    shard(model).compile(dynamic=False, backend=process.compiler)
    return train_compiled(model, process)


@combination(COMPILE, "tensor parallel, block.compile(), fully_shard")
def tensor_parallel_compiled(process: Process) -> Outcome:
    model, mesh = split_model(process)
    split_over_ranks(model, mesh["tp"])
    for block in model.blocks:
        block.compile(dynamic=False, backend=process.compiler)
    shard(model, mesh=mesh["dp"])
    return train_compiled(model, process, optimizer=make_optimizer(model, foreach=False), same_batch=True)


# --- gradient accumulation --------------------------------------------------------------------------------------------

ACCUMULATION = "gradient accumulation, 4 parts"


@combination(ACCUMULATION, "no further call")
def reduce_each(process: Process) -> Outcome:
    return train(shard(model_for()), process, accumulate=4)


@combination(ACCUMULATION, "set_requires_gradient_sync(last) (lesson 05)")
def reduce_last(process: Process) -> Outcome:
    model = shard(model_for())
    return train(model, process, accumulate=4, before_part=model.set_requires_gradient_sync)


@combination(ACCUMULATION, "set_requires_gradient_sync(last) and set_reshard_after_backward(last)")
def gather_less(process: Process) -> Outcome:
    model = shard(model_for())

    def before_part(last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

    return train(model, process, accumulate=4, before_part=before_part)


@combination(ACCUMULATION, "DDP's model.no_sync()")
def no_sync(process: Process) -> Outcome:
    model = shard(model_for())
    with model.no_sync():
        return train(model, process)


# --- number formats ---------------------------------------------------------------------------------------------------

FORMATS = "16 bits"


def policy(dtype: torch.dtype) -> dict[str, Any]:
    """Return the option for `fully_shard`: send and compute in this format, add up and store in 32 bits."""
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}


def with_formats(model: nn.Module, outcome: Outcome) -> Outcome:
    """Add the format in which the weights are stored."""
    outcome.facts["stored"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    return outcome


@combination(FORMATS, "MixedPrecisionPolicy, bf16 (lesson 05)", sixteen_bits=True)
def bf16_policy(process: Process) -> Outcome:
    model = shard(model_for(), **policy(torch.bfloat16))
    return with_formats(model, train(model, process))


@combination(FORMATS, "torch.autocast, bf16, no policy", sixteen_bits=True)
def bf16_autocast(process: Process) -> Outcome:
    model = shard(model_for())
    return with_formats(model, train(model, process, autocast=torch.bfloat16))


@combination(FORMATS, "policy and autocast, bf16", sixteen_bits=True)
def bf16_both(process: Process) -> Outcome:
    model = shard(model_for(), **policy(torch.bfloat16))
    return with_formats(model, train(model, process, autocast=torch.bfloat16))


@combination(FORMATS, "model.to(bf16), then fully_shard", sixteen_bits=True)
def bf16_weights(process: Process) -> Outcome:
    model = shard(model_for().to(torch.bfloat16), **policy(torch.bfloat16))
    return with_formats(model, train(model, process))


@combination(FORMATS, "policy, fp16, and GradScaler (lesson 05)", sixteen_bits=True)
def fp16_scaler(process: Process) -> Outcome:
    model = shard(model_for(), **policy(torch.float16))
    scaler = torch.amp.GradScaler(process.device.type)
    outcome = with_formats(model, train(model, process, scaler=scaler))
    return Outcome(outcome.losses, outcome.weights, outcome.facts | {"scale": scaler.get_scale()})


@combination(FORMATS, "GradScaler, a gradient of rank 1 overflows: both ranks must skip the step")
def overflow_on_one(process: Process) -> Outcome:
    return overflow(shard(model_for()), process)


def overflow(model: nn.Module, process: Process) -> Outcome:
    """Make a gradient of one rank infinite; return what the scaler of each rank does."""
    optimizer, scaler = make_optimizer(model, foreach=False), torch.amp.GradScaler(process.device.type, init_scale=2.0)
    images, classes = part_of(next(batches()), process.rank, process.world_size)
    scaler.scale(LESSON.loss_function(model(images), classes)).backward()
    weight = model.blocks[0].up.weight  # each rank has a part of it; of a very small weight, some ranks have none
    if process.rank == 1:
        weight.grad.to_local().fill_(torch.inf)
    before = weight.detach().to_local().clone()
    scaler.step(optimizer)
    scaler.update()
    found = torch.tensor([scaler.get_scale(), float((weight.detach().to_local() != before).any())])
    every = [torch.empty(2) for _ in range(process.world_size)]
    dist.all_gather(every, found)
    skipped = [moved == 0 for _, moved in every]
    facts = {
        "scale on ranks 0, 1": ", ".join(f"{scale:g}" for scale, _ in every),
        "step skipped on ranks 0, 1": ", ".join("yes" if skip else "no" for skip in skipped),
    }
    if not all(skipped) or len({float(scale) for scale, _ in every}) > 1:
        raise AssertionError("; ".join(f"{name}: {value}" for name, value in facts.items()))
    return Outcome(facts=facts)


# --- clipping ---------------------------------------------------------------------------------------------------------

CLIPPING = "clip_grad_norm_"


@combination(CLIPPING, "FSDP2 (lesson 05)", clipped=True)
def clip(process: Process) -> Outcome:
    return train(shard(model_for()), process, max_norm=MAX_NORM)


@combination(CLIPPING, "FSDP2, fp16 and GradScaler, after unscale_ (lesson 05)", clipped=True, sixteen_bits=True)
def clip_fp16(process: Process) -> Outcome:
    scaler = torch.amp.GradScaler(process.device.type)
    return train(shard(model_for(), **policy(torch.float16)), process, scaler=scaler, max_norm=MAX_NORM)


@combination(CLIPPING, "tensor parallel, some weights are plain tensors", clipped=True)
def clip_tensor_parallel(process: Process) -> Outcome:
    model, mesh = split_model(process)
    split_over_ranks(model, mesh["tp"])
    optimizer = make_optimizer(model, foreach=False)
    return train(model, process, optimizer, max_norm=MAX_NORM, same_batch=True)


@combination(CLIPPING, "tensor parallel and FSDP2, two meshes", clipped=True)
def clip_two_meshes(process: Process) -> Outcome:
    model, mesh = split_model(process)
    split_over_ranks(model, mesh["tp"])
    shard(model, mesh=mesh["dp"])
    optimizer = make_optimizer(model, foreach=False)
    return train(model, process, optimizer, max_norm=MAX_NORM, same_batch=True)


# --- the optimizer ----------------------------------------------------------------------------------------------------

OPTIMIZER = "AdamW"


@combination(OPTIMIZER, "fully_shard, then the optimizer (lesson 05)")
def optimizer_after(process: Process) -> Outcome:
    model = shard(model_for())
    return train(model, process, make_optimizer(model))


@combination(OPTIMIZER, "the optimizer, then fully_shard")
def optimizer_before(process: Process) -> Outcome:
    model = model_for()
    optimizer = make_optimizer(model)
    return with_moved(model_for().state_dict(), train(shard(model), process, optimizer))


@combination(OPTIMIZER, "fused=True")
def fused(process: Process) -> Outcome:
    model = shard(model_for())
    return train(model, process, make_optimizer(model, fused=True))


@combination(OPTIMIZER, "foreach=True")
def foreach(process: Process) -> Outcome:
    model = shard(model_for())
    return train(model, process, make_optimizer(model, foreach=True))


def train_split(process: Process, *, sharded: bool, **options: bool) -> Outcome:
    """Train with tensor parallel, perhaps with FSDP2, and with these options of AdamW."""
    model, mesh = split_model(process)
    split_over_ranks(model, mesh["tp"])
    if sharded:
        shard(model, mesh=mesh["dp"])
    return train(model, process, make_optimizer(model, **options), same_batch=True)


@combination(OPTIMIZER, "tensor parallel, foreach=True")
def foreach_tensor_parallel(process: Process) -> Outcome:
    return train_split(process, sharded=False, foreach=True)


@combination(OPTIMIZER, "tensor parallel, fused=True")
def fused_tensor_parallel(process: Process) -> Outcome:
    return train_split(process, sharded=False, fused=True)


@combination(OPTIMIZER, "tensor parallel and FSDP2, foreach=True")
def foreach_two_meshes(process: Process) -> Outcome:
    return train_split(process, sharded=True, foreach=True)


@combination(OPTIMIZER, "tensor parallel and FSDP2, fused=True")
def fused_two_meshes(process: Process) -> Outcome:
    return train_split(process, sharded=True, fused=True)


@combination(OPTIMIZER, "tensor parallel and FSDP2, foreach=False")
def loop_two_meshes(process: Process) -> Outcome:
    return train_split(process, sharded=True, foreach=False)


# --- tensor parallel --------------------------------------------------------------------------------------------------

TENSOR_PARALLEL = "tensor parallel"


def split_model(process: Process) -> tuple[VisionTransformer, DeviceMesh]:
    """Return the model with blocks whose layers can be divided, and a mesh of 1 x all ranks: dp and tp."""
    model = model_for()
    model.blocks = nn.ModuleList(SplitBlock(block) for block in model.blocks)
    return model, init_device_mesh(process.device.type, (1, process.world_size), mesh_dim_names=("dp", "tp"))


@combination(TENSOR_PARALLEL, "parallelize_module, then fully_shard")
def split_then_shard(process: Process) -> Outcome:
    return train_split(process, sharded=True, foreach=False)


@combination(TENSOR_PARALLEL, "fully_shard, then parallelize_module")
def shard_then_split(process: Process) -> Outcome:
    model, mesh = split_model(process)
    shard(model, mesh=mesh["dp"])
    split_over_ranks(model, mesh["tp"])
    return train(model, process, make_optimizer(model, foreach=False), same_batch=True)


@combination(TENSOR_PARALLEL, "parallelize_module, checkpoint_wrapper, fully_shard")
def split_checkpoint_shard(process: Process) -> Outcome:
    model, mesh = split_model(process)
    split_over_ranks(model, mesh["tp"])
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    shard(model, mesh=mesh["dp"])
    return train(model, process, make_optimizer(model, foreach=False), same_batch=True)


@combination(TENSOR_PARALLEL, "with FSDP2 and the bf16 policy", sixteen_bits=True)
def split_bf16(process: Process) -> Outcome:
    model, mesh = split_model(process)
    split_over_ranks(model, mesh["tp"])
    shard(model, mesh=mesh["dp"], **policy(torch.bfloat16))
    return train(model, process, make_optimizer(model, foreach=False), same_batch=True)


FUSED_PLAN = {"qkv": ColwiseParallel, "out": RowwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}


@combination(TENSOR_PARALLEL, "the lesson's block as it is: one layer for q, k and v")
def fused_qkv(process: Process) -> Outcome:
    return train_fused_qkv(model_for(), process)


class LocalHeads(Block):
    """The lesson's block, but it counts the heads that its rank has: no error, and still wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, patches, width) to the same shape."""
        n, patches, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, patches, 3, -1, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(n, patches, -1))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


@combination(TENSOR_PARALLEL, "one layer for q, k and v, heads counted on each rank")
def fused_qkv_local_heads(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        block.__class__ = LocalHeads
    return train_fused_qkv(model, process)


def train_fused_qkv(model: nn.Module, process: Process) -> Outcome:
    """Divide the rows of the layer that computes q, k and v, as if they were all of one kind; train."""
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    for block in model.blocks:
        parallelize_module(block, mesh, {name: style() for name, style in FUSED_PLAN.items()})
    return train(model, process, make_optimizer(model, foreach=False), same_batch=True)


# --- saving -----------------------------------------------------------------------------------------------------------

SAVING = "torch.distributed.checkpoint"


def saved_and_loaded(model: nn.Module, outcome: Outcome, *, own_names: bool = False) -> Outcome:
    """Save the model, and put what one process loads from these files into the outcome.

    Args:
        model: that was trained.
        outcome: of its training.
        own_names: save what ``model.state_dict()`` returns, and not what `get_model_state_dict` does.
    """
    with shared_folder() as folder:
        state = model.state_dict() if own_names else get_model_state_dict(model)
        dcp.save({"model": state}, checkpoint_id=folder)
        loaded = model_for().state_dict()
        try:
            dcp.load({"model": loaded}, checkpoint_id=folder)
        except dcp.api.CheckpointException as errors:  # no Exception; has the error of each rank
            raise next(error for error, _ in errors.failures.values()) from None
    return Outcome(outcome.losses, loaded, outcome.facts)


@combination(SAVING, "FSDP2: saved by two ranks, loaded into one whole model")
def save(process: Process) -> Outcome:
    model = shard(model_for())
    return saved_and_loaded(model, train(model, process))


@combination(SAVING, "with checkpoint_wrapper, model.state_dict()")
def save_wrapped(process: Process) -> Outcome:
    model = shard(model_for())
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_block)
    return saved_and_loaded(model, train(model, process), own_names=True)


@combination(SAVING, "with model.compile(), model.state_dict()")
def save_compiled(process: Process) -> Outcome:
    model = shard(model_for())
    model.compile(dynamic=False, backend=process.compiler)
    return saved_and_loaded(model, train(model, process, count=False), own_names=True)


@combination(SAVING, "with torch.compile(model), model.state_dict()")
def save_optimized_module(process: Process) -> Outcome:
    model = torch.compile(shard(model_for()), dynamic=False, backend=process.compiler)
    return saved_and_loaded(model, train(model, process, count=False), own_names=True)


@combination(SAVING, "with torch.compile(model), get_model_state_dict(model)")
def save_optimized_module_clean(process: Process) -> Outcome:
    model = torch.compile(shard(model_for()), dynamic=False, backend=process.compiler)
    return saved_and_loaded(model, train(model, process, count=False))


# --- all together, and what the lesson refuses ------------------------------------------------------------------------

TOGETHER = "lesson 05"


@combination(
    TOGETHER,
    "checkpointing, bf16 policy, compile, 2 parts, clipping and a fused optimizer at once",
    sixteen_bits=True,
    clipped=True,
)
def all_at_once(process: Process) -> Outcome:
    model = model_for()
    for block in model.blocks:
        recompute_in_function(block)
    shard(model, **policy(torch.bfloat16)).compile(dynamic=False, backend=process.compiler)
    return train_compiled(
        model,
        process,
        optimizer=make_optimizer(model, fused=True),
        accumulate=2,
        before_part=model.set_requires_gradient_sync,
        max_norm=MAX_NORM,
    )


def check_flags(flags: str, process: Process) -> Outcome:
    """Have lesson 05 check these flags, for an epoch of 60,000 samples; `UserError` if it refuses them."""
    config = load_config(LESSON.Config, flags.split())
    LESSON.check_options(config, LESSON.make_model, process.device)
    LESSON.check_parts(config.accumulate, 60_000, config.batch_size * process.world_size, process.world_size)
    return Outcome()


for flags in (
    "--fused true --optimizer adadelta",
    "--model mnist_cnn --shard blocks",
    "--model mnist_cnn --shard root --activation_checkpointing true",
    "--accumulate 128",
    "--precision tf32",
    "--cuda_graph true",
):
    COMBINATIONS.append(Combination(TOGETHER, f"`{flags}`", partial(check_flags, flags)))
