"""Trainings of other kinds than the clock was made with, each with data on the GPU, for a blind test of the clock.

    nullgpu --clock h100 python lab/studies/clock_others.py bert

`gpu_trainings.py` measures them and `clock_blind.py` simulates them. Between the two, the clock is not changed.
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

STEPS = 14
CLASSES = 1000


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    dtype: torch.dtype | None = None,
    clip: float = 0.0,
) -> None:
    """Make some updates; in ``dtype`` with autocast, and with a GradScaler if that is float16."""
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of()
        scaler.scale(loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()


def images(name: str, batch: int, dtype: torch.dtype | None, fast: bool = False) -> None:
    """Train a network of torchvision on images of 224 pixels; ``fast``: channels last, and a fused AdamW."""
    layout = torch.channels_last if fast else torch.contiguous_format
    model = getattr(torchvision.models, name)().cuda().to(memory_format=layout)
    x = torch.zeros(batch, 3, 224, 224, device="cuda").to(memory_format=layout)
    y = torch.zeros(batch, dtype=torch.long, device="cuda")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if fast:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    train(model, optimizer, lambda: F.cross_entropy(model(x), y), dtype)


def bert() -> None:
    """Train an encoder of BERT's size with PyTorch's layers: 32 sequences of 512 tokens, a quarter padding."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(30522, 768), "encoder": encoder, "head": nn.Linear(768, 30522)}
    ).cuda()
    x = torch.zeros(32, 512, dtype=torch.long, device="cuda")
    padding = torch.arange(512, device="cuda").expand(32, 512) >= 384
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def loss_of() -> Tensor:
        hidden = model["encoder"](model["tokens"](x), src_key_padding_mask=padding)
        return F.cross_entropy(model["head"](hidden[:, ::8]).flatten(0, 1), x[:, ::8].flatten())

    train(model, optimizer, loss_of, torch.bfloat16, clip=1.0)


def lstm() -> None:
    """Train two layers of LSTM in fp32 on 64 series of 256 steps of 64 variables."""
    model = nn.ModuleDict({"lstm": nn.LSTM(64, 512, 2, batch_first=True), "head": nn.Linear(512, 64)}).cuda()
    x = torch.zeros(64, 256, 64, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    train(model, optimizer, lambda: F.mse_loss(model["head"](model["lstm"](x)[0]), x), clip=1.0)


class Residual(nn.Module):
    """Two convolutions with group norms, and a shortcut."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, after), nn.Conv2d(after, after, 3, padding=1)
        self.short = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to x (N, before, H, W); return (N, after, H, W)."""
        return self.short(x) + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class Diffusion(nn.Module):
    """The network of a diffusion model: a small 2-D U-Net with attention in its middle."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList((Residual(width, width), Residual(width, 2 * width), Residual(2 * width, 4 * width)))
        self.norm, self.qkv = nn.GroupNorm(32, 4 * width), nn.Conv2d(4 * width, 12 * width, 1)
        self.up = nn.ModuleList(
            (Residual(8 * width, 2 * width), Residual(4 * width, width), Residual(2 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the noise (N, 3, H, W) of the images x of the same shape."""
        h, kept = self.first(x), []
        for block in self.down:
            h = block(h)
            kept.append(h)
            h = F.avg_pool2d(h, 2)
        n, channels, height, width = h.shape
        q, k, v = self.qkv(self.norm(h)).view(n, 3, 8, channels // 8, height * width).transpose(-1, -2).unbind(1)
        h = h + F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(h.shape)
        for block in self.up:
            h = block(torch.cat((F.interpolate(h, scale_factor=2), kept.pop()), 1))
        return self.last(h)


def diffusion() -> None:
    """Train it on 64 images of 64 pixels an edge."""
    model = Diffusion().cuda()
    x = torch.zeros(64, 3, 64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    train(model, optimizer, lambda: F.mse_loss(model(x + torch.randn_like(x)), x), torch.bfloat16)


class Fourier(nn.Module):
    """A Fourier neural operator: four layers that multiply the lowest modes of a field by weights."""

    def __init__(self, width: int = 64, modes: int = 24) -> None:
        super().__init__()
        self.modes = modes
        self.first, self.last = nn.Conv2d(3, width, 1), nn.Conv2d(width, 1, 1)
        self.weights = nn.ParameterList(torch.randn(width, width, modes, modes, 2) / width for _ in range(4))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a field (N, 1, H, W) of the fields x (N, 3, H, W)."""
        h, m = self.first(x), self.modes
        for weights, local in zip(self.weights, self.local, strict=True):
            spectrum = torch.fft.rfft2(h)
            kept = torch.einsum("nixy,ioxy->noxy", spectrum[:, :, :m, :m], torch.view_as_complex(weights))
            out = torch.zeros_like(spectrum)
            out[:, :, :m, :m] = kept
            h = F.gelu(torch.fft.irfft2(out, s=h.shape[-2:]) + local(h))
        return self.last(h)


def fourier() -> None:
    """Train it on 32 fields of 256 x 256 points in fp32."""
    model = Fourier().cuda()
    x = torch.zeros(32, 3, 256, 256, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    train(model, optimizer, lambda: F.mse_loss(model(x), x[:, :1]))


class Messages(nn.Module):
    """Messages along the edges of a graph, summed at their ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.update, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Apply it to nodes x (N, width) with edges (E,) between them."""
        messages = self.message(torch.cat((x[source], x[target]), 1))
        sums = torch.zeros_like(x).index_add(0, target, messages)
        return x + self.norm(self.update(torch.cat((x, sums), 1)))


def graph() -> None:
    """Train four layers of messages on 40,000 nodes with 640,000 edges in fp32."""
    model = nn.ModuleList(Messages(128) for _ in range(4)).cuda()
    x = torch.zeros(40_000, 128, device="cuda")
    edges = torch.arange(640_000, device="cuda")
    source, target = edges * 7919 % 40_000, edges % 40_000
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss_of() -> Tensor:
        h = x
        for layer in model:
            h = layer(h, source, target)
        return h.square().mean()

    train(model, optimizer, loss_of)


def recommender() -> None:
    """Train 26 embeddings of 200,000 rows and a perceptron on 16,384 clicks in fp32."""
    tables = nn.ModuleList(nn.EmbeddingBag(200_000, 64) for _ in range(26)).cuda()
    top = nn.Sequential(nn.Linear(27 * 64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
    bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()
    model = nn.ModuleList((tables, top, bottom))
    numbers = torch.zeros(16_384, 13, device="cuda")
    clicks = torch.arange(16_384, device="cuda")[:, None] * 7919 % 200_000
    wanted = (clicks[:, :1] % 2).float()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss_of() -> Tensor:
        features = [bottom(numbers), *(table(clicks) for table in tables)]
        return F.binary_cross_entropy_with_logits(top(torch.cat(features, 1)), wanted)

    train(model, optimizer, loss_of)


def table() -> None:
    """Train a perceptron of eight layers on 4,096 rows of a table in fp32."""
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(1024, 1)).cuda()
    x = torch.zeros(4096, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(model, optimizer, lambda: F.mse_loss(model(x), x[:, :1]))


class Block(nn.Module):
    """A layer of a language model of today: root mean square norms, rotary positions, a gated network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width // 2, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply it to x (N, T, width)."""
        n, t, width = x.shape
        h = self.norm1(x)
        q = rotated(self.q(h).view(n, t, self.heads, -1).transpose(1, 2), cos, sin)
        k, v = self.kv(h).view(n, t, 2, self.heads // 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, rotated(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (N, heads, T, width), whose halves are turned."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def llama() -> None:
    """Train a language model of 16 layers of 1,024 on 8 sequences of 2,048 tokens, four query heads to a key."""
    blocks = nn.ModuleList(Block(1024, 16) for _ in range(16))
    model = nn.ModuleDict({"tokens": nn.Embedding(32_000, 1024), "blocks": blocks, "norm": nn.RMSNorm(1024)})
    model["head"] = nn.Linear(1024, 32_000, bias=False)
    model = model.cuda()
    x = torch.zeros(8, 2048, dtype=torch.long, device="cuda")
    angles = torch.outer(torch.arange(2048, device="cuda"), 1e4 ** (-torch.arange(0, 1, 1 / 32, device="cuda")))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)

    def loss_of() -> Tensor:
        h = model["tokens"](x)
        for block in model["blocks"]:
            h = block(h, cos, sin)
        return F.cross_entropy(model["head"](model["norm"](h)).flatten(0, 1), x.flatten())

    train(model, optimizer, loss_of, torch.bfloat16, clip=1.0)


OTHERS: dict[str, Callable[[], None]] = {
    "resnet152": lambda: images("resnet152", 64, torch.float16),
    "densenet121": lambda: images("densenet121", 64, torch.float16),
    "mobilenet": lambda: images("mobilenet_v3_large", 128, None),
    "convnext": lambda: images("convnext_tiny", 64, torch.bfloat16, fast=True),
    "swin": lambda: images("swin_t", 64, torch.bfloat16, fast=True),
    "bert": bert,
    "llama": llama,
    "diffusion": diffusion,
    "lstm": lstm,
    "fourier": fourier,
    "graph": graph,
    "recommender": recommender,
    "table": table,
}


if __name__ == "__main__":
    OTHERS[sys.argv[1]]()
