"""Compare layers, losses and optimizers on the null GPU, with values, with the CPU: outputs and gradients.

    nullgpu --values python tests/layers.py

It prints a line for each one that differs, and nothing else. 16-bit formats are compared with float32 on the CPU. Each
layer and each loss is also compared with dropout behind the layer: the CPU drops what the GPU has dropped.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Bags(nn.Module):
    """Scales rows by sums or means of embeddings; one bag is empty.

    Not by the largest number, whose backward pass PyTorch does not have on GPUs in bf16.
    """

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 8, mode=mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = torch.arange(11, device=x.device) % 5, torch.tensor([0, 3, 3, 7], device=x.device)
        with torch.no_grad():  # another operation
            known = self.bag(*words)
        return x * (self.bag(*words) + known)


IMAGES, VOLUMES, ROWS, SEQUENCES = (2, 8, 8, 8), (2, 4, 4, 4, 4), (4, 8), (2, 5, 8)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(8), ROWS),
    "RMSNorm": (lambda: nn.RMSNorm(8), ROWS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), IMAGES),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), ROWS),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), IMAGES),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), VOLUMES),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True), IMAGES),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGES),
    "Conv1d": (lambda: nn.Conv1d(5, 4, 3), SEQUENCES),
    "Conv2d": (lambda: nn.Conv2d(8, 4, 3, stride=2), IMAGES),
    "Conv2d, depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), IMAGES),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 3), VOLUMES),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 4, 3, stride=2), IMAGES),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 4, 2, stride=2), VOLUMES),
    "Linear": (lambda: nn.Linear(8, 4), ROWS),
    "Linear, weight_norm": (lambda: weight_norm(nn.Linear(8, 4)), ROWS),
    "Linear, spectral_norm": (lambda: spectral_norm(nn.Linear(8, 4)), ROWS),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGES),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), VOLUMES),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGES),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), VOLUMES),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), IMAGES),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(2), IMAGES),
    **{
        f"Upsample, {mode}": (lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode), shape)  # type: ignore[misc]
        for mode, shape in (("nearest", IMAGES), ("bilinear", IMAGES), ("bicubic", IMAGES), ("trilinear", VOLUMES))
    },
    "Unfold": (lambda: nn.Unfold(2), IMAGES),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), IMAGES),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), IMAGES),
    **{f"EmbeddingBag, {mode}": (lambda mode=mode: Bags(mode), ROWS) for mode in ("sum", "mean")},  # type: ignore[misc]
    "GRU": (lambda: nn.GRU(8, 6, batch_first=True), SEQUENCES),
    "LSTM": (lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True), SEQUENCES),
    "RNN": (lambda: nn.RNN(8, 6), SEQUENCES),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), SEQUENCES),
    **{
        name: (getattr(nn, name), ROWS)
        for name in ("PReLU", "GELU", "SiLU", "Mish", "GLU", "Softmax", "LogSoftmax", "Hardswish", "ELU")
    },
}
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda out, target: F.cross_entropy(out, target.argmax(-1)),
    "nll_loss": lambda out, target: F.nll_loss(out.log_softmax(-1), target.argmax(-1)),
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy_with_logits": lambda out, target: F.binary_cross_entropy_with_logits(out, target.sigmoid()),
    "kl_div": lambda out, target: F.kl_div(out.log_softmax(-1), target.softmax(-1), reduction="batchmean"),
    "cosine_embedding_loss": lambda out, target: F.cosine_embedding_loss(
        out, target, torch.ones(len(out), device=out.device)
    ),
    "triplet_margin_loss": lambda out, target: F.triplet_margin_loss(out, target, out.flip(0)),
}
OPTIMIZERS = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "LBFGS", "Rprop"),
    *("Adafactor", "Muon"),
)
DROPOUT = 0.3
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def dropped(out: torch.Tensor) -> torch.Tensor:
    """Return the output of a layer after dropout on the GPU; on the CPU, with what the GPU drops for this seed."""
    torch.cuda.manual_seed(2)
    out = out.contiguous()  # numbers are drawn in the order of the memory
    if out.is_cuda:
        return F.dropout(out, DROPOUT)
    return out * F.dropout(torch.ones(out.shape, device="cuda"), DROPOUT).to(out)


def sums(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    device: str,
    dtype: torch.dtype,
    loss: Loss,
    with_dropout: bool,
) -> list[float]:
    """Return the loss of a layer, and the sum of the absolute values of each of its gradients."""
    torch.manual_seed(0)
    layer = make().to(dtype).to(device)
    x = torch.randn(*shape).to(dtype).to(device).requires_grad_()
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    out = dropped(out) if with_dropout else out
    torch.manual_seed(1)
    value = loss(out, torch.randn(out.shape).to(out.dtype).to(device))
    value.backward()
    gradients = [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
    return [value.float().item(), *(gradient.float().cpu().abs().sum().item() for gradient in gradients)]


def weight_after_updates(name: str, device: str, **how: Any) -> float:  # noqa: ANN401
    """Return the sum of the absolute values of a weight after three updates."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False).to(device)
    x = torch.randn(5, 8).to(device)
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.01, **how)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = layer(x).pow(2).sum()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    return layer.weight.detach().cpu().abs().sum().item()


def near(one: list[float], other: list[float], tolerance: float) -> bool:
    """Return whether the numbers are equal but for rounding."""
    return len(one) == len(other) and all(
        abs(a - b) <= tolerance * (1 + abs(a)) for a, b in zip(one, other, strict=True)
    )


def main() -> None:
    """Compare all of them; print those that differ."""

    def product(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out.float() * target.float()).sum()

    cases: dict[str, tuple] = {name: (*layer, product) for name, layer in LAYERS.items()}
    cases |= {name: (lambda: nn.Linear(8, 6), ROWS, loss) for name, loss in LOSSES.items()}
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.08), (torch.float16, 0.08)):
        for (name, case), with_dropout in itertools.product(cases.items(), (False, True)):
            make, shape, loss = case
            cpu = sums(make, shape, "cpu", torch.float32, loss, with_dropout)
            gpu = sums(make, shape, "cuda", dtype, loss, with_dropout)
            if not near(cpu, gpu, tolerance):
                print(name, dtype, "with dropout" if with_dropout else "", cpu, gpu)
    for name in (name for name in OPTIMIZERS if hasattr(torch.optim, name)):
        fused = [{"fused": True}] if name in ("SGD", "Adam", "AdamW", "Adagrad") else []
        for how in ({}, *fused):
            weights = [weight_after_updates(name, device, **how) for device in ("cpu", "cuda")]
            if not near(weights[:1], weights[1:], 1e-4):
                print(name, how, weights)


if __name__ == "__main__":
    main()
