"""Operations that exist on CUDA only, computed on the CPU: attention, cells of recurrent networks, and others.

Each function has the signature of its operation in PyTorch's native_functions.yaml, and returns what that returns.
Outputs that only the backward pass of the same kernel reads are left out where the function below does not read them.
"""
# ruff: noqa: ANN401  (arguments of functions of any kind are passed on)

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import norms


def weights_of(
    query: Tensor, key: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float, seed: int
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return, in float32, the weights (N, heads, T, S), the logarithm of their sums, and the factors of dropout."""
    scores = (query.float() @ key.float().transpose(-2, -1)) * scale
    if bias is not None:
        scores = scores + bias.float()
    if causal:  # as torch does: token t sees the keys 0 to t
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.masked_fill(sums == -math.inf, 0).unsqueeze(-1)).exp()
    if not dropout:
        return weights, sums, 1.0
    kept = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed)) >= dropout
    return weights, sums, kept / (1 - dropout)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return attention (N, heads, T, d) and the logarithm of its sums (N, heads, T), computed in float32."""
    groups = query.shape[1] // key.shape[1]  # heads that share keys and values
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = scale or 1 / math.sqrt(query.shape[-1])
    weights, sums, factor = weights_of(query, key, bias, dropout, causal, scale, seed)
    return ((weights * factor) @ value.float()).to(query.dtype), sums


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and bias. (Autograd does not record what an operation does inside.)"""
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1).float(), value.repeat_interleave(groups, 1).float()
    scale = scale or 1 / math.sqrt(query.shape[-1])
    weights, _, factor = weights_of(query, keys, bias, dropout, causal, scale, seed)
    g = grad.float()
    of_values = (weights * factor).transpose(-2, -1) @ g
    of_weights = (g @ values.transpose(-2, -1)) * factor
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_query, of_keys = (of_scores @ keys) * scale, (of_scores.transpose(-2, -1) @ query.float()) * scale
    of_key, of_value = (x.unflatten(1, (-1, groups)).sum(2) for x in (of_keys, of_values))
    of_bias = None if bias is None else of_scores.sum_to_size(bias.shape).to(bias.dtype)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_bias


def new_seed(dropout: float) -> tuple[Tensor, int]:
    """Return the state of the random numbers of a dropout, as a tensor that the backward pass gets, and as a number."""
    seed = int(torch.randint(2**31, ())) if dropout else 0
    return torch.tensor(seed), seed


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple:
    """aten::_scaled_dot_product_flash_attention"""
    state, seed = new_seed(dropout)
    out, sums = attention(q, k, v, None, dropout, causal, scale, seed)
    return out, sums, None, None, q.shape[2], k.shape[2], torch.stack([state, state]), None, None


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    cum_q: Any,
    cum_k: Any,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    state: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple:
    """aten::_scaled_dot_product_flash_attention_backward"""
    return attention_backward(grad, q, k, v, None, dropout, causal, scale, int(state.flatten()[0]) if dropout else 0)[
        :3
    ]


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """aten::_scaled_dot_product_efficient_attention"""
    state, seed = new_seed(dropout)
    out, sums = attention(q, k, v, bias, dropout, causal, scale, seed)
    if not compute_log_sumexp:
        return out, None, state, state
    padded = torch.full((*sums.shape[:2], -(-sums.shape[2] // 32) * 32), math.inf)  # the kernel pads it to 32 rows
    padded[:, :, : sums.shape[2]] = sums
    return out, padded, state, state


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: list[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """aten::_scaled_dot_product_efficient_attention_backward"""
    if grad is None or not grad.numel():
        return None, None, None, None
    return attention_backward(grad, q, k, v, bias, dropout, causal, scale, int(state) if dropout else 0)


def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple:
    """aten::_scaled_dot_product_cudnn_attention"""
    state, seed = new_seed(dropout)
    out, sums = attention(q, k, v, bias, dropout, causal, scale, seed)
    return out, sums.unsqueeze(-1), None, None, q.shape[2], k.shape[2], state, state, None


def cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    state: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    cum_q: Any,
    cum_k: Any,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple:
    """aten::_scaled_dot_product_cudnn_attention_backward"""
    return attention_backward(grad, q, k, v, bias, dropout, causal, scale, int(state) if dropout else 0)[:3]


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple:
    """aten::_fused_rms_norm_backward"""
    g, normed = grad.float(), x.float() * rstd.float()
    scaled = g if weight is None else g * weight.float()
    of_x = rstd.float() * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    of_weight = None if weight is None else (g * normed).reshape(-1, *shape).sum(0).to(weight.dtype)
    return of_x.to(x.dtype), of_weight


def lstm_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple:
    """aten::_thnn_fused_lstm_cell"""
    gates = from_input + from_hidden
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hidden: Tensor | None, grad_cell: Tensor | None, cell: Tensor, new: Tensor, workspace: Tensor, has_bias: bool
) -> tuple:
    """aten::_thnn_fused_lstm_cell_backward_impl"""
    i, f, g, o = workspace.chunk(4, 1)
    tanh = new.tanh()
    of_hidden = torch.zeros_like(new) if grad_hidden is None else grad_hidden
    of_new = of_hidden * o * (1 - tanh**2) + (0 if grad_cell is None else grad_cell)
    gates = [
        of_new * g * i * (1 - i),
        of_new * cell * f * (1 - f),
        of_new * i * (1 - g**2),
        of_hidden * tanh * o * (1 - o),
    ]
    of_gates = torch.cat(gates, 1)
    return of_gates, of_new * f, of_gates.sum(0) if has_bias else None


def gru_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple:
    """aten::_thnn_fused_gru_cell"""
    a = from_input if input_bias is None else from_input + input_bias
    b = from_hidden if hidden_bias is None else from_hidden + hidden_bias
    (ar, az, an), (br, bz, bn) = a.chunk(3, 1), b.chunk(3, 1)
    r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
    n = (an + r * bn).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, bn], 1)


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple:
    """aten::_thnn_fused_gru_cell_backward"""
    r, z, n, hidden, bn = workspace.chunk(5, 1)
    of_n = grad * (1 - z) * (1 - n**2)
    of_z = grad * (hidden - n) * z * (1 - z)
    of_r = of_n * bn * r * (1 - r)
    of_input, of_hidden = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    return of_input, of_hidden, grad * z, of_input.sum(0) if has_bias else None, of_hidden.sum(0) if has_bias else None


def grid_sampler(x: Tensor, grid: Tensor) -> Tensor:
    """aten::cudnn_grid_sampler: bilinear, zeros outside, corners aligned"""
    return torch.grid_sampler(x, grid, 0, 0, True)


def grid_sampler_backward(x: Tensor, grid: Tensor, grad: Tensor) -> tuple:
    """aten::cudnn_grid_sampler_backward"""
    return torch.ops.aten.grid_sampler_2d_backward(grad, x, grid, 0, 0, True, [True, True])


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    """Return the bags, the bag of each index, which the CPU's kernel often leaves out, and the sizes of the bags."""
    more = (scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx)
    output, _, sizes, largest = torch.ops.aten._embedding_bag(weight, indices, offsets, *more)
    starts = offsets[:-1] if include_last_offset else offsets
    numbers = torch.arange(indices.numel(), dtype=starts.dtype)
    bags = torch.searchsorted(starts.contiguous(), numbers, right=True) - 1
    return output, bags, sizes, largest if mode == MAX else None


MAX = 2
"""``mode`` of the operation for the largest number of each bag"""

SPECIAL: dict[str, Callable[..., Any]] = {
    **norms.SPECIAL,
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
    "aten::_embedding_bag": embedding_bag,
    "aten::_embedding_bag_forward_only": embedding_bag,
    "aten::cudnn_grid_sampler": grid_sampler,
    "aten::cudnn_grid_sampler_backward": grid_sampler_backward,
}
