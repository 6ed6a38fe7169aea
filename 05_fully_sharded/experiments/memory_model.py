"""How many bytes of tensors a rank needs at most in a training step, found without a GPU and without that memory.

The step is run on *fake tensors*, which have a shape and a number format but no content, by one process of a *fake
process group*, whose collectives return at once. PyTorch's memory trackers add up the bytes that would be allocated.
Both are private parts of PyTorch, so each is imported where it is used; the tests compare what they predict with what
two real ranks allocate.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lab.launching import load_script
from tensor_bytes import local
from workshop.errors import UserError, nearest
from workshop.models.gpt import GPT, SIZES, Block, GPTSize, rotated
from workshop.paths import REPOSITORY

LESSON: Any = load_script(REPOSITORY / "05_fully_sharded")
"""the lesson's script: its loss, and its activation checkpointing"""
CPU = torch.device("cpu")
STATE_BYTES = 16
"""per parameter: weight, gradient and the two running means of AdamW, 4 bytes each"""
NOT_COUNTED = (
    "Counted are tensors only. Not counted are the CUDA context (0.5 to 2 GiB), NCCL's buffers (1 to 2 GiB), memory "
    "that PyTorch's allocator holds in pieces too small to be used (fragmentation), and the workspaces of cuDNN and "
    "of compiled code."
)


LLAMA_SIZE = GPTSize(width=4096, depth=32, vocabulary=128_256, head_dimension=128)
LLAMA_KEY_HEADS, LLAMA_HIDDEN = 8, 14_336
"""of Llama 3.1 8B: Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, table 3"""


class LlamaBlock(Block):
    """A block of Llama 3.1 8B: four heads of queries share one of keys and values, and the gated network is wider."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__(size)
        self.head = size.head_dimension
        self.qkv = nn.Linear(size.width, size.width + 2 * LLAMA_KEY_HEADS * self.head, bias=False)
        self.gate = nn.Linear(size.width, LLAMA_HIDDEN, bias=False)
        self.up = nn.Linear(size.width, LLAMA_HIDDEN, bias=False)
        self.down = nn.Linear(LLAMA_HIDDEN, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, T, width) to the same shape."""
        n, tokens, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(n, tokens, -1, self.head).transpose(1, 2)
        query, key, value = heads.split([self.heads, LLAMA_KEY_HEADS, LLAMA_KEY_HEADS], dim=1)
        key, value = (each.repeat_interleave(self.heads // LLAMA_KEY_HEADS, dim=1) for each in (rotated(key), value))
        attended = F.scaled_dot_product_attention(rotated(query), key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, tokens, width))
        inside = self.network_norm(x)
        return x + self.down(F.silu(self.gate(inside)) * self.up(inside))


class Llama(GPT):
    """The shape of Llama 3.1 8B, to compare with what others have measured; its output has weights of its own."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__(size)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.depth))
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model and the length of the sequences that it is trained on."""

    size: GPTSize
    sequence_length: int
    kind: type[GPT] = GPT

    def build(self, depth: int) -> GPT:
        """Return the model with so many blocks; 0: its own number."""
        return self.kind(replace(self.size, depth=depth or self.size.depth))

    def batch(self, samples: int) -> Batch:
        """Return inputs and targets, each (samples, T) int64; all are zero, because only the shapes matter."""
        zeros = torch.zeros(samples, self.sequence_length, dtype=torch.long)
        return zeros, zeros.clone()


WORKLOADS = {
    "gpt_tiny": Workload(SIZES["gpt_tiny"], 128),
    "gpt2_124m": Workload(SIZES["gpt2_124m"], 1024),
    "gpt_1b": Workload(SIZES["gpt_1b"], 2048),
    "gpt_7b": Workload(SIZES["gpt_7b"], 2048),
    "gpt_70b": Workload(GPTSize(width=8192, depth=80, vocabulary=128_256, head_dimension=128), 4096),
    "llama3_8b": Workload(LLAMA_SIZE, 8192, Llama),
}
"""the models that can be asked for, by the name that ``--model`` takes"""


def workload(name: str) -> Workload:
    """Return the workload of that name; `UserError` if there is none."""
    if name not in WORKLOADS:
        raise UserError(f"no model '{name}'; {nearest(name, WORKLOADS)}")
    return WORKLOADS[name]


WAYS = ("ddp", "blocks", "keep", "root")
"""how the ranks share the model: not at all (DDP), or as the lesson's --shard says"""
UPDATES = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}
"""how the optimizer updates the weights: all tensors together (PyTorch's default on a GPU), one after the other (its
default on a CPU), or in one kernel (the lesson's --fused true)"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the bytes are asked of."""

    model: str
    """name of a workload"""
    depth: int = 0
    """number of blocks; 0: that of the model"""
    batch_size: int = 1
    """samples per rank"""
    ranks: int = 1
    way: str = "alone"
    """one of `WAYS`, or "alone": one process without a wrapper"""
    checkpointing: bool = False
    """whether each block computes its activations again in backward"""
    replicas: int = 1
    """groups of ranks that each hold the whole model (HSDP); 1: all ranks share one model"""
    precision: str = "fp32"
    """fp32 or bf16; bf16 is autocast with DDP, as in lesson 04, and FSDP2's policy otherwise, as in lesson 05"""
    update: str = "foreach"
    """one of `UPDATES`"""
    parts: int = 1
    """of a batch, computed one after the other, whose gradients are added up (the lesson's --accumulate)"""

    def __post_init__(self) -> None:
        workload(self.model)  # raises UserError if there is no such model
        if self.ranks % self.replicas:
            raise UserError(f"{self.ranks} ranks cannot form {self.replicas} groups of equal size")


@dataclass(frozen=True)
class Prediction:
    """The most bytes of tensors on one rank at any moment of a training step, and what they are."""

    peak: int
    """bytes"""
    parts: dict[str, int]
    """bytes at that moment by what they are; their sum is the peak"""
    moment: str
    """in which part of the step that moment is: forward, backward or optimizer"""
    parameters: int
    """of the whole model"""


@cache
def private_tools() -> SimpleNamespace:
    """Return the private parts of PyTorch that are used here.

    Raises:
        UserError: this torch has them no more, or not yet.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise UserError(
            f"torch {torch.__version__} lacks a private part that this experiment needs ({error}); it was tested with "
            "torch 2.11 and 2.15"
        ) from None

    class PeakOfStep:
        """Notes in which part of the step the peak is.

        It does not keep the peak of each module, which takes most of the time where there are many.
        """

        now = moment = "forward"
        """the part of the step that is running, and the one that the peak is in"""

        def _update_peak_stats(self, peak_state: Any) -> None:  # noqa: ANN401, a private type
            modules, self.memory_tracking = self.memory_tracking, {}
            before = self._peak_mem.get(CPU, 0)
            super()._update_peak_stats(peak_state)
            if self._peak_mem.get(CPU, 0) > before:
                self.moment = self.now
            self.memory_tracking = modules

    class PlainTracker(PeakOfStep, MemTracker):
        """For a model that is not sharded."""

    class ShardedTracker(PeakOfStep, FSDPMemTracker):
        """For a sharded model."""

    return SimpleNamespace(
        FakeTensorMode=FakeTensorMode, PlainTracker=PlainTracker, ShardedTracker=ShardedTracker, FakeStore=FakeStore
    )


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of so many, of which the others do not exist: collectives return at once."""
    dist.init_process_group("fake", store=private_tools().FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(setup: Setup) -> GPT:
    """Return the model of a setup, without any sharding."""
    model = workload(setup.model).build(setup.depth)
    if setup.checkpointing:
        for block in model.blocks:
            block.forward = LESSON.recomputed(block.forward)
    return model


def mesh_of(setup: Setup, device: str = "cpu") -> DeviceMesh:
    """Return how the ranks are arranged: in a row, or with HSDP in groups that each hold the whole model."""
    if setup.replicas == 1:
        return init_device_mesh(device, (setup.ranks,))
    shape = (setup.replicas, setup.ranks // setup.replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def shard(setup: Setup, model: GPT, mesh: DeviceMesh) -> nn.Module:
    """Shard the model over a mesh as the lesson does; return it."""
    dtype = torch.bfloat16 if setup.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if setup.way != "root":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=setup.way == "blocks")
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def make_optimizer(model: nn.Module, update: str) -> torch.optim.Optimizer:
    """Return AdamW, with the state that it makes in its first step, over the parts of the weights of this rank.

    They are plain tensors here, because the shapes of sharded ones would be computed anew for each, which takes longer
    than the step and would be counted as memory.
    """
    optimizer = torch.optim.AdamW([local(weight) for weight in model.parameters()], **UPDATES[update])
    for weight in optimizer.param_groups[0]["params"]:
        means = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(1.0), **means}
    return optimizer


def train_step(setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, tracker: Any) -> None:  # noqa: ANN401
    """Make a training step as the lesson does, without its learning-rate schedule, and set what the tracker notes."""
    policy = isinstance(model, FSDPModule)
    split = [tensor.tensor_split(setup.parts) for tensor in batch]
    for number, (inputs, targets) in enumerate(zip(*split, strict=True), start=1):
        if number > 1:
            tracker.reset_mod_stats()  # else it refuses a second call of the model
        if policy:
            model.set_requires_gradient_sync(number == setup.parts)
        tracker.now = "forward"
        with torch.autocast("cpu", torch.bfloat16) if setup.precision == "bf16" and not policy else nullcontext():
            outputs = model(inputs)
        loss = LESSON.loss_function(outputs.float(), targets) * (len(inputs) / len(batch[0]))
        tracker.now = "backward"
        loss.backward()
    tracker.now = "optimizer"
    for part, weight in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True):
        part.grad = local(weight.grad)
    optimizer.step()


NAMES = {
    "parameters": ("Parameter", "Sharded Param"),
    "gradients": ("Gradient", "Sharded Grad"),
    "optimizer state": ("Optstate", "OptState"),
    "gathered weights": ("Unsharded Param", "All Gather"),
    "gradients to send": ("Unsharded Grad", "Reduce Scatter"),
    "activations": ("Activation",),
    "temporaries": ("Temp",),
    "batch": ("Inputs", "Buffer", "Other"),
}
"""what the bytes are, by the names that PyTorch's two trackers give them"""


def sum_of(in_use: dict[Any, int], what: str) -> int:
    """Return how many of the bytes that a tracker reports are of one kind, one of `NAMES`."""
    return sum(count for name, count in in_use.items() if getattr(name, "value", name) in NAMES[what])


@cache
def predict(setup: Setup) -> Prediction:
    """Return the most bytes of tensors that rank 0 would need in a training step after the first one."""
    if setup.way in ("alone", "ddp"):
        tracker, parameters = track_plain_model(setup)
    else:
        with fake_ranks(setup.ranks):
            tracker, parameters = track_sharded_model(setup, mesh_of(setup))
    at_peak = tracker.get_tracker_snapshot("peak")[CPU]
    parts = {what: sum_of(at_peak, what) for what in NAMES}
    state = 2 * parts["parameters"]  # the two running means; what else the optimizer's step has made, it frees at once
    parts["temporaries"] += max(parts["optimizer state"] - state, 0)
    parts["optimizer state"] = min(parts["optimizer state"], state)
    if setup.way == "ddp":  # its buckets hold all gradients a second time, from the first step on
        parts["gradients to send"] = 4 * parameters
    return Prediction(sum(parts.values()), parts, tracker.moment, parameters)


def track_plain_model(setup: Setup) -> tuple[Any, int]:
    """Return the tracker of a training step without a wrapper, and the number of parameters."""
    tools = private_tools()
    with tools.FakeTensorMode():
        model = build(setup)
        optimizer = make_optimizer(model, setup.update)
        batch = workload(setup.model).batch(setup.batch_size)
        tracker = tools.PlainTracker()
        tracker.track_external(model, optimizer, *batch)
        with tracker:
            train_step(setup, model, optimizer, batch, tracker)
    return tracker, sum(weight.numel() for weight in model.parameters())


def track_sharded_model(setup: Setup, mesh: DeviceMesh) -> tuple[Any, int]:
    """Return the tracker of a training step on one rank, and the number of parameters of the whole model."""
    tools = private_tools()
    with tools.FakeTensorMode():
        with torch.device("meta"):
            model = build(setup)
        parameters = sum(weight.numel() for weight in model.parameters())
        model = shard(setup, model, mesh)
        model.to_empty(device="cpu")
        optimizer = make_optimizer(model, setup.update)
        batch = workload(setup.model).batch(setup.batch_size)
        tracker = tools.ShardedTracker(model, optimizer)
        tracker.track_inputs(batch)
        with tracker:
            train_step(setup, model, optimizer, batch, tracker)
    return tracker, parameters
