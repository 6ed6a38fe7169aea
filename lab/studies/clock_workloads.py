"""Trainings whose speed on real GPUs was published, with data on the GPU. Run by clock_trust.py.

nullgpu --clock a100 python lab/studies/clock_workloads.py resnet50 amp
"""

import sys

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from workshop.models.unet3d import UNet3D

STEPS = 14


class Layer(nn.Module):
    """A layer of a transformer: attention and a network of two layers, both with a norm before them."""

    def __init__(self, width: int, heads: int, fast: bool, causal: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.fast, self.causal, self.dropout = heads, fast, causal, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x (N, T, width)."""
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fast:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:  # as before PyTorch 2: the scores are stored
            scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            y = F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), self.dropout) @ v
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(n, t, width)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class GPT2(nn.Module):
    """GPT-2 with 124 million weights."""

    def __init__(self, fast: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50304, 768), nn.Embedding(1024, 768)
        self.layers, self.norm = nn.ModuleList(Layer(768, 12, fast) for _ in range(12)), nn.LayerNorm(768)
        self.head = nn.Linear(768, 50304, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores (N, T, tokens)."""
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class WeatherViT(nn.Module):
    """A vision transformer as NERSC trains it: the next state of 20 variables of the weather on 360 x 720 points."""

    def __init__(self, width: int = 384, patch: int = 8) -> None:
        super().__init__()
        self.patch = patch
        self.cut = nn.Conv2d(20, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, 360 // patch * 720 // patch, width))
        self.layers = nn.ModuleList(Layer(width, 8, fast=True, causal=False, dropout=0.0) for _ in range(12))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20 * patch * patch, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the state (N, 20, 360, 720) that follows the state x of the same shape."""
        h = self.cut(x).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            h = layer(h)
        return F.fold(self.head(self.norm(h)).transpose(1, 2), x.shape[2:], self.patch, stride=self.patch)


def vit(precision: str) -> None:
    """Train the vision transformer with batches of 16 states."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    model = WeatherViT().cuda()
    x, y = (torch.zeros(16, 20, 360, 720, device="cuda") for _ in range(2))
    optimizer = torch.optim.Adam(model.parameters(), 5e-4)

    def loss() -> torch.Tensor:
        return ((model(x) - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean()

    train(optimizer, loss, amp=torch.bfloat16 if precision == "amp" else None)


def resnet50(precision: str) -> None:
    """Train ResNet-50 with batches of 256 images."""
    layout = torch.channels_last if precision == "amp" else torch.contiguous_format
    model = torchvision.models.resnet50().cuda().to(memory_format=layout)
    x = torch.zeros(256, 3, 224, 224, device="cuda").to(memory_format=layout)
    y = torch.zeros(256, dtype=torch.long, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.set_float32_matmul_precision("high")
    train(optimizer, lambda: F.cross_entropy(model(x), y), amp=torch.float16 if precision == "amp" else None)


def gpt2(attention: str) -> None:
    """Train GPT-2 with batches of 12 sequences of 1,024 tokens; "compiled" with PyTorch's fast attention, too."""
    model = GPT2(fast=attention != "slow").cuda()
    x = torch.zeros(12, 1024, dtype=torch.long, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4)
    torch.set_float32_matmul_precision("high")

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(x).view(-1, 50304), x.view(-1))

    train(optimizer, torch.compile(loss) if attention == "compiled" else loss, amp=torch.bfloat16, clip=model)


def unet(precision: str) -> None:
    """Train the 3-D U-Net with batches of 64 cubes of 64 cells an edge; "amp_benchmark" as NERSC does, whose script
    lets cuDNN try its algorithms (`torch.backends.cudnn.benchmark`)."""
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.benchmark = precision == "amp_benchmark"
    model = UNet3D().cuda()
    x, y = (torch.zeros(64, channels, 64, 64, 64, device="cuda") for channels in (4, 5))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    train(optimizer, lambda: F.l1_loss(model(x), y), amp=torch.float16 if "amp" in precision else None)


def train(optimizer, loss_function, *, amp: torch.dtype | None, clip: nn.Module | None = None) -> None:  # noqa: ANN001
    """Make some updates; with float16, with a GradScaler whose factor is never found too large."""
    scaler = torch.amp.GradScaler("cuda", enabled=amp == torch.float16)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", amp or torch.bfloat16, enabled=amp is not None):
            loss = loss_function()
        scaler.scale(loss).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(clip.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()


if __name__ == "__main__":
    {"resnet50": resnet50, "gpt2": gpt2, "unet": unet, "vit": vit}[sys.argv[1]](sys.argv[2])
