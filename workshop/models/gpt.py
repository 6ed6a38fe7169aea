"""A decoder-only transformer: blocks of causal self-attention and a gated MLP, each with a residual connection.

The architecture is Llama's (Touvron et al. 2023, https://arxiv.org/abs/2302.13971): RMSNorm before attention and MLP,
rotary position embeddings, SwiGLU, no biases. Embedding and output layer share their weights, as in GPT-2. The
initialization is GPT-2's (Radford et al. 2019): normal with a standard deviation of 0.02, divided by sqrt(2 x depth) in
the layers that write to the residual stream, so that its values start no larger in a deep model.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from workshop.errors import UserError

HEAD_DIMENSION = 64
"""a multiple of 8 up to 256, as the fast attention kernels in 16 bits need it: FlashAttention's (compute capability 8.x
and 12.0) and cuDNN's (9.0 and 10.0)"""
ROTARY_BASE = 10_000.0
TOKENS_AT_ONCE = 2048
"""whose logits exist at the same time, if the loss is computed with them"""


@dataclass(frozen=True)
class GPTSize:
    """Size of one model of the family."""

    width: int
    """embedding width (d_model)"""
    depth: int
    """number of blocks"""
    vocabulary: int = 256
    """number of different tokens; 256 for bytes"""
    head_dimension: int = HEAD_DIMENSION

    @property
    def heads(self) -> int:
        """Attention heads in each block."""
        return self.width // self.head_dimension

    @property
    def hidden(self) -> int:
        """Hidden width of the gated MLP (d_ff): 8/3 of the width, rounded up to a multiple of 256."""
        return 256 * math.ceil(8 * self.width / 3 / 256)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.vocabulary * self.width + self.depth * block + self.width

    def flops_per_token(self, sequence_length: int) -> int:
        """Return the floating-point operations of a forward and a backward pass for one token.

        Six for each weight of a matrix, the output's included (a product and a sum, forward once and backward twice),
        and for attention to all tokens, as if it were not causal: 12 x depth x width x sequence length. This is the
        count of the PaLM paper, appendix B, which the MFU of other publications is based on too.
        """
        matrices = self.parameters - (2 * self.depth + 1) * self.width
        return 6 * matrices + 12 * self.depth * self.width * sequence_length


SIZES = {
    "gpt_tiny": GPTSize(width=128, depth=4),
    "gpt2_124m": GPTSize(width=768, depth=12, vocabulary=50_304),  # GPT-2's 50,257, rounded up to a multiple of 128
    "gpt_1b": GPTSize(width=2048, depth=20, vocabulary=32_000),
    "gpt_7b": GPTSize(width=4096, depth=32, vocabulary=32_000, head_dimension=128),
}
"""the models of the family, by the value of ``--model``"""


def gpt_size(name: str, width: int | None = None, depth: int | None = None, vocabulary: int | None = None) -> GPTSize:
    """Return the size of a model of the family, with another width, depth or vocabulary if one is given.

    Raises:
        UserError: the head dimension does not divide the width.
    """
    size = SIZES[name]
    size = replace(
        size,
        width=width or size.width,
        depth=depth or size.depth,
        vocabulary=vocabulary or size.vocabulary,
    )
    if size.width % size.head_dimension:
        near = max(round(size.width / size.head_dimension), 1) * size.head_dimension
        raise UserError(f"--width {size.width} is no multiple of the head dimension {size.head_dimension}; {near} is")
    return size


RotaryTables = tuple[torch.Tensor, torch.Tensor]


def rotary_tables(tokens: int, dimension: int, device: torch.device, dtype: torch.dtype) -> RotaryTables:
    """Return the cosines and sines of rotary position embeddings, each (T, 1, d) for heads of d numbers; see `rotated`.

    They are the same in all blocks, so a model makes them once in a forward pass. The angles are computed in float32:
    those of late tokens are large.
    """
    half = dimension // 2
    speeds = ROTARY_BASE ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    positions = torch.arange(tokens, device=device, dtype=torch.float32)
    angles = torch.outer(positions, torch.cat([speeds, -speeds]))[:, None]  # the second half turns the other way
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Apply rotary position embeddings to (N, T, heads, d): rotate pairs of numbers by angles that grow with T.

    So the dot product of a query and a key depends on the distance between their tokens (Su et al. 2021,
    https://arxiv.org/abs/2104.09864).

    Args:
        x: queries, keys, or both side by side.
        tables: what `rotary_tables` returned for T and d.
    """
    cosines, sines = tables
    others = (x * sines).roll(x.shape[-1] // 2, dims=-1)  # numbers i and i + d / 2 are a pair: each takes the other's
    return torch.addcmul(others, x, cosines)


def dtype_of_products(x: torch.Tensor) -> torch.dtype:
    """Return the type in which linear layers compute from ``x``: its own, which the weights have too, or autocast's."""
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


class Block(nn.Module):
    """A transformer block: causal self-attention and a gated MLP; (N, T, width) -> the same shape."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.network_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        # Layers with the same input are one layer: one large product of matrices is faster than several small ones.
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate_up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        """Map (N, T, width) to the same shape; ``tables`` are those of `rotary_tables`."""
        n, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(n, tokens, 3 * self.heads, width // self.heads)
        qk, value = qkv.split((2 * self.heads, self.heads), dim=2)
        query, key = rotated(qk, tables).chunk(2, dim=2)  # each (N, T, heads, width / heads)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(n, tokens, width))
        gate, up = self.gate_up(self.network_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class GPT(nn.Module):
    """Predict each next token: (N, T) int64 -> logits (N, T, vocabulary).

    The logits at position t depend only on the tokens up to t.
    """

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights; also those that `to_empty` has moved from the meta device."""
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(weight)
            else:
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.size.depth) if added else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits or, given targets (N, T) int64, the sum () of their cross-entropy; needs torch 2.13 then.

        With targets, the output layer and the loss are computed together, for some of the tokens at a time. So the
        logits never exist whole: with a large vocabulary they are the largest tensors of a training.
        """
        x = self.hidden(tokens)
        if targets is None:
            return F.linear(x, self.embed.weight)
        dtype = dtype_of_products(x)  # autocast does not know this function
        losses = F.linear_cross_entropy(
            x.flatten(0, 1).to(dtype),
            self.embed.weight.to(dtype),
            targets.flatten(),
            reduction="none",  # not "sum", which returns a sum in 16 bits, with three digits
            options=nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=TOKENS_AT_ONCE),
        )
        return losses.float().sum()

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the output layer reads, (N, T, width)."""
        x = self.embed(tokens)
        tables = rotary_tables(tokens.shape[1], self.size.head_dimension, x.device, dtype_of_products(x))
        for block in self.blocks:
            x = block(x, tables)
        return self.norm(x)
