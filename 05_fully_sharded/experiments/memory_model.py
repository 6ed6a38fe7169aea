"""Bytes that a rank needs in a training step, found without a GPU and without that memory.

The step is really made, on a null GPU (``tools/nullgpu``): PyTorch's own CUDA code runs, kernels compute nothing, and
the memory is reserved but never touched. So the bytes are those of PyTorch's own allocator. One process is rank 0 of a
job of any size; the other ranks do not exist, and collectives return at once.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lab.launching import load_script, reason
from lab.simulated import null_gpu
from workshop.errors import UserError, nearest, warn
from workshop.models.gpt import GPT, SIZES, Block, GPTSize, RotaryTables, rotated
from workshop.paths import REPOSITORY

LESSON: Any = load_script(REPOSITORY / "05_fully_sharded")
"""the lesson's script: its loss, and its activation checkpointing"""
STATE_BYTES = 16
"""per parameter: weight, gradient and the two running means of AdamW, 4 bytes each"""
NOT_COUNTED = (
    "Counted is what PyTorch's allocator has allocated and reserved, on a GPU that computes nothing. Not counted are "
    "the CUDA context (0.5 to 2 GiB), NCCL's buffers (1 to 2 GiB), and the workspaces of cuDNN."
)

LLAMA_SIZE = GPTSize(width=4096, depth=32, vocabulary=128_256, head_dimension=128)
LLAMA_KEY_HEADS, LLAMA_HIDDEN = 8, 14_336
"""of Llama 3.1 8B: Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, table 3"""


class LlamaBlock(Block):
    """A block of Llama 3.1 8B: four heads of queries share one of keys and values, and the gated network is wider."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__(size)
        self.head = size.head_dimension
        del self.qkv, self.gate_up
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, LLAMA_KEY_HEADS * self.head, bias=False)
        self.value = nn.Linear(size.width, LLAMA_KEY_HEADS * self.head, bias=False)
        # Apart, as in torchtitan: which products are kept depends on their order (see `half_recomputed`).
        self.gate = nn.Linear(size.width, LLAMA_HIDDEN, bias=False)
        self.up = nn.Linear(size.width, LLAMA_HIDDEN, bias=False)
        self.down = nn.Linear(LLAMA_HIDDEN, size.width, bias=False)

    def forward(self, x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        """Map (N, T, width) to the same shape; ``tables`` are those of `rotary_tables`."""
        n, tokens, width = x.shape
        inside = self.attention_norm(x)
        q, k, v = (layer(inside).view(n, tokens, -1, self.head) for layer in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in (rotated(q, tables), rotated(k, tables), v))
        key, value = (each.repeat_interleave(self.heads // LLAMA_KEY_HEADS, dim=1) for each in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, tokens, width))
        inside = self.network_norm(x)
        return x + self.down(F.silu(self.gate(inside)) * self.up(inside))


class Llama(GPT):
    """The shape of Llama 3.1 8B, to compare with what others have measured; its output has weights of its own."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__(size)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.depth))
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """See the class."""
        assert targets is None
        return self.output(self.hidden(tokens))


Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model and the length of the sequences that it is trained on."""

    size: GPTSize
    sequence_length: int
    kind: type[GPT] = GPT

    def build(self, depth: int = 0, width: int = 0) -> GPT:
        """Return the model; a depth or width of 0 is the model's own."""
        return self.kind(replace(self.size, depth=depth or self.size.depth, width=width or self.size.width))

    def batch(self, samples: int, sequence_length: int = 0) -> Batch:
        """Return inputs and targets, each (samples, T) int64; all are zero, because only the shapes matter."""
        zeros = torch.zeros(samples, sequence_length or self.sequence_length, dtype=torch.long)
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
"""DDP, or FSDP2 with one of the values of the lesson's --shard"""
UPDATES = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}
"""how the optimizer updates the weights: all tensors together (PyTorch's default on a GPU), one after the other (its
default on a CPU), or in one kernel (the lesson's default)"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training step of one rank."""

    model: str
    """name of a workload"""
    depth: int = 0
    """number of blocks; 0: that of the model"""
    width: int = 0
    """embedding width (d_model); 0: that of the model"""
    sequence_length: int = 0
    """tokens in a sample; 0: that of the workload"""
    batch_size: int = 1
    """samples per rank"""
    ranks: int = 1
    way: str = "alone"
    """one of `WAYS`, or "alone": one process without a wrapper"""
    checkpointing: bool = False
    """whether each block computes its activations again in backward"""
    selective: bool = False
    """with checkpointing: whether some results are kept, as `half_recomputed` says"""
    replicas: int = 1
    """groups of ranks that each hold the whole model (HSDP); 1: all ranks share one model"""
    precision: str = "fp32"
    """fp32 or bf16; bf16 is autocast with DDP, as in lesson 04, and FSDP2's policy otherwise, as in lesson 05"""
    update: str = "fused"
    """one of `UPDATES`"""
    parts: int = 1
    """of a batch, computed one after the other, whose gradients are added up (the lesson's --accumulate)"""
    reduce_each: bool = False
    """whether FSDP2 reduces the gradients after each part, not only after the last"""
    keep_weights: bool = False
    """whether FSDP2 keeps the weights gathered between the parts"""

    def __post_init__(self) -> None:
        workload(self.model)  # raises UserError if there is no such model
        if self.ranks % self.replicas:
            raise UserError(f"{self.ranks} ranks cannot form {self.replicas} groups of equal size")


@dataclass(frozen=True)
class Prediction:
    """The bytes of one rank in a training step after the first ones, by PyTorch's allocator."""

    parameters: int
    """number of parameters of the whole model"""
    weights: int
    """bytes of the weights that this rank stores"""
    gradients: int
    """bytes of their gradients, which exist from backward to the end of the step"""
    optimizer: int
    """bytes of the optimizer's state"""
    stored: int
    """bytes allocated between two steps: weights, optimizer state, the batch, DDP's buckets"""
    kept: int
    """bytes that forward leaves: activations, the scores, weights that stay gathered, autocast's copies of weights"""
    peaks: dict[str, int]
    """most bytes allocated in forward, backward and optimizer"""
    reserved: int
    """bytes that the allocator has taken from the GPU at the end: the peak, and gaps that no tensor fitted into"""

    @property
    def peak(self) -> int:
        """Most bytes allocated at any moment of the step."""
        return max(self.peaks.values())

    @property
    def moment(self) -> str:
        """Part of the step with the peak: forward, backward or optimizer."""
        return max(self.peaks, key=lambda part: self.peaks[part])


def build(setup: Setup) -> GPT:
    """Return the model of a setup, without any sharding."""
    model = workload(setup.model).build(setup.depth, setup.width)
    if setup.checkpointing:
        for block in model.blocks:
            block.forward = (half_recomputed if setup.selective else LESSON.recomputed)(block.forward)
    return model


ATEN = torch.ops.aten
ATTENTION = (
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN.bmm.default,  # where no kernel computes all of attention, as on the meta device
)


def half_recomputed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a forward that keeps its input, the result of attention, and those of every second matrix product.

    torchtitan trains Llama with this selective activation checkpointing (``selective_ac_option = "op"``).
    """

    def contexts() -> tuple[Any, Any]:
        products = {False: count(), True: count()}  # in forward, and when it is computed again

        def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:  # noqa: ANN401
            every_second = operation is ATEN.mm.default and next(products[context.is_recompute]) % 2 == 0
            kept = every_second or operation in ATTENTION
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)


def mesh_of(setup: Setup, device: str) -> DeviceMesh:
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


SCRIPT = Path(__file__).resolve().with_name("bytes_of_step.py")
_known: dict[Setup, Prediction] = {}


def predict(*setups: Setup) -> list[Prediction]:
    """Return the bytes of rank 0 for each setup, on a null GPU; each setup is computed once.

    Raises:
        UserError: no null GPU is possible here, or a step has failed.
    """
    # DDP needs the same on any number of ranks, so it is computed on one.
    asked = [replace(setup, ranks=1) if setup.way == "ddp" else setup for setup in setups]
    missing = [setup for setup in dict.fromkeys(asked) if setup not in _known]
    if missing:
        found = [
            Prediction(**one)
            for one in run_steps(missing, start=null_gpu("--gb", 1_000_000, "--world", 1))
            if one is not None
        ]
        _known.update(zip(missing, found, strict=True))
    return [_known[setup] for setup in asked]


def measure(*setups: Setup) -> list[Prediction | None]:
    """Return the same bytes, measured on the GPU of this machine; None where its memory is not enough.

    Raises:
        UserError: a step has failed.
    """
    assert all(setup.way in ("alone", "ddp") or setup.ranks == 1 for setup in setups), "one GPU is one rank"
    return [None if one is None else Prediction(**one) for one in run_steps(setups)]


def peaks_if_possible(*setups: Setup) -> list[float | None]:
    """Return the peak of each setup in MB; without a null GPU a warning, and None for each."""
    try:
        return [found.peak / 1e6 for found in predict(*setups)]
    except UserError as error:
        warn(f"the peaks are left out: {error}")
        return [None] * len(setups)


def run_steps(setups: Sequence[Setup], start: Sequence[str] = ()) -> list[dict[str, Any] | None]:
    """Let `bytes_of_step.py` make the steps; return what it writes. ``start``: words of the command before Python."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "setups.json"), Path(folder, "bytes.json")
        asked.write_text(json.dumps([asdict(setup) for setup in setups]))
        words = [*start, sys.executable, str(SCRIPT), str(asked), str(answered)]
        lines = []
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr or ():
                lines.append(line)
                if re.match("nullgpu: (?!error)", line):  # that it compiles, at its first use: this takes a minute
                    print(line, end="", file=sys.stderr, flush=True)
        if process.returncode:
            text = "".join(lines)
            if impossible := re.search("^nullgpu: error: (.*)", text, re.MULTILINE):
                raise UserError(impossible[1])
            sys.stderr.write(text)  # a traceback
            raise UserError(reason(text) or f"exit status {process.returncode} from {SCRIPT.name}")
        return json.loads(answered.read_text())
