"""What test_draws.py runs on two null GPUs, with values, in one process, because importing torch takes seconds.

    nullgpu --gpus 2 --values python draws.py FILE

FILE gets what was found, as JSON: for each promise the names of what broke it, or what was measured.
"""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

Given = Generator | None
GPU = "cuda"


def ones(*shape: int, device: str = GPU) -> Tensor:
    """Return ones on a GPU."""
    return torch.ones(shape, device=device)


def attention(dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a function that computes attention with dropout, in the kernel that PyTorch chooses for this format."""

    def compute() -> Tensor:
        q = torch.linspace(-1, 1, 2 * 16 * 64, device=GPU).reshape(1, 2, 16, 64).to(dtype)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    return compute


WITH_GENERATOR: dict[str, Callable[[Given], Tensor]] = {
    "rand": lambda g: torch.rand(50, device=GPU, generator=g),
    "randn": lambda g: torch.randn(50, device=GPU, generator=g),
    "randint": lambda g: torch.randint(0, 1000, (50,), device=GPU, generator=g),
    "randperm": lambda g: torch.randperm(100, device=GPU, generator=g),
    "bernoulli": lambda g: torch.bernoulli(ones(100) / 2, generator=g),
    "bernoulli_": lambda g: ones(100).bernoulli_(0.5, generator=g),
    "multinomial": lambda g: torch.multinomial(ones(50), 20, generator=g),
    "multinomial, replacement": lambda g: torch.multinomial(ones(50), 20, replacement=True, generator=g),
    "normal": lambda g: torch.normal(ones(50), ones(50), generator=g),
    "normal, one mean": lambda g: torch.normal(1.0, ones(50), generator=g),
    "normal_": lambda g: ones(50).normal_(generator=g),
    "uniform_": lambda g: ones(50).uniform_(generator=g),
    "exponential_": lambda g: ones(50).exponential_(generator=g),
    "geometric_": lambda g: ones(50).geometric_(0.1, generator=g),
    "poisson": lambda g: torch.poisson(9 * ones(50), generator=g),
}
WITHOUT_GENERATOR: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(ones(100)),
    "dropout, bf16": lambda: F.dropout(ones(100).bfloat16()),
    "dropout2d": lambda: F.dropout2d(ones(4, 50, 2, 2)),
    "alpha_dropout": lambda: F.alpha_dropout(ones(100), training=True),
    "rrelu": lambda: F.rrelu(-ones(100), training=True),
    "rand_like": lambda: torch.rand_like(ones(50)),
    "randn_like": lambda: torch.randn_like(ones(50)),
    "randint_like": lambda: torch.randint_like(ones(50), 1000),
    "gumbel_softmax": lambda: F.gumbel_softmax(ones(50)),
    "trunc_normal_": lambda: nn.init.trunc_normal_(ones(50)),
    "Normal": lambda: torch.distributions.Normal(ones(50), ones(1)).sample(),
    "Categorical": lambda: torch.distributions.Categorical(ones(20, 50)).sample(),
    "Gamma": lambda: torch.distributions.Gamma(ones(50), 1.0).sample(),
    "flash attention": attention(torch.bfloat16),
    "efficient attention": attention(torch.float32),
}
DRAWS: dict[str, Callable[[], Tensor]] = {
    **{name: (lambda draw=draw: draw(None)) for name, draw in WITH_GENERATOR.items()},  # type: ignore[misc]
    **WITHOUT_GENERATOR,
}
NOT_IN_A_GRAPH = {"trunc_normal_", "Normal", "Categorical", "Gamma"}
"""the CPU waits for them, or copies to the GPU, which PyTorch refuses during a capture"""


def broken(holds: Callable[[Callable[[], Tensor]], bool]) -> list[str]:
    """Return the names of the operations for which a promise does not hold."""
    return [name for name, draw in DRAWS.items() if not holds(draw)]


def same_seed(draw: Callable[[], Tensor]) -> bool:
    """Whether the same seed gives the same numbers, twice one after the other, and the second are others."""
    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    return torch.equal(first, draw()) and torch.equal(second, draw()) and not torch.equal(first, second)


def other_seed(draw: Callable[[], Tensor]) -> bool:
    """Whether another seed gives other numbers."""
    torch.cuda.manual_seed(3)
    first = draw()
    torch.cuda.manual_seed(4)
    return not torch.equal(first, draw())


def restored_state(draw: Callable[[], Tensor]) -> bool:
    """Whether a state that was saved and restored gives the same numbers."""
    draw()
    state = torch.cuda.get_rng_state()
    first = draw()
    draw()
    torch.cuda.set_rng_state(state)
    return torch.equal(first, draw())


def forked(draw: Callable[[], Tensor]) -> bool:
    """Whether what a fork draws is drawn again after it."""
    with torch.random.fork_rng():
        first = draw()
    return torch.equal(first, draw())


def cpu_untouched(draw: Callable[[], Tensor]) -> bool:
    """Whether the random numbers of the CPU stay as they were."""
    before = torch.get_rng_state()
    draw()
    return torch.equal(before, torch.get_rng_state())


def as_in_graph(draw: Callable[[], Tensor]) -> bool:
    """Whether replays of a graph draw what the operation draws without a graph, and go on from the same place."""
    if draw in [DRAWS[name] for name in NOT_IN_A_GRAPH]:
        return True
    torch.cuda.manual_seed(5)
    wanted = [draw() for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = draw(), draw()
    torch.cuda.manual_seed(5)
    found = []
    graph.replay()
    found += [first.clone(), second.clone()]
    graph.replay()
    found += [first.clone(), second.clone()]
    after = draw()
    torch.cuda.manual_seed(5)
    for _ in range(4):
        draw()
    return all(map(torch.equal, wanted, found)) and torch.equal(after, draw())


def own_generator() -> list[str]:
    """Return the operations that do not draw from a generator that they are given, or also from the default one."""
    wrong = []
    for name, draw in WITH_GENERATOR.items():
        default = torch.cuda.get_rng_state()
        own = Generator(GPU).manual_seed(8)
        first, state = draw(own), own.get_state()
        second = draw(own)
        own.set_state(state)
        again = draw(own)
        own.manual_seed(8)
        good = torch.equal(second, again) and torch.equal(first, draw(own)) and not torch.equal(first, second)
        if not good or not torch.equal(default, torch.cuda.get_rng_state()):
            wrong.append(name)
    return wrong


def own_generator_in_graph() -> bool:
    """Whether a generator that is registered with a graph draws in replays what it draws without a graph."""
    own = Generator(GPU).manual_seed(8)
    wanted = [torch.rand(9, device=GPU, generator=own) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(own)
    with torch.cuda.graph(graph):
        drawn = torch.rand(9, device=GPU, generator=own)
    own.manual_seed(8)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(drawn.clone())
    return all(map(torch.equal, wanted, found))


def gpus() -> list[bool]:
    """Return whether the second GPU has numbers of its own, and draws the first one's after the same seed."""
    torch.cuda.manual_seed_all(6)
    first = torch.rand(9, device="cuda:0").cpu()
    torch.rand(9, device="cuda:0")
    second = torch.rand(9, device="cuda:1").cpu()
    with torch.cuda.device(1):
        torch.cuda.manual_seed(7)  # of this GPU only
    third, of_first = torch.rand(9, device="cuda:1").cpu(), torch.rand(9, device="cuda:0").cpu()
    torch.cuda.manual_seed_all(6)
    for _ in range(2):
        torch.rand(9, device="cuda:0")
    return [
        torch.equal(first, second),
        not torch.equal(second, third),
        torch.equal(of_first, torch.rand(9, device="cuda:0").cpu()),
    ]


MISTAKES: dict[str, Callable[[], Tensor]] = {
    "a negative deviation": lambda: torch.normal(ones(5), -ones(5)),
    "a negative probability": lambda: torch.multinomial(-ones(5), 2),
    "an index that is too large": lambda: ones(5, 5).gather(1, torch.full((5, 1), 7, device=GPU)),
}


def mistakes() -> list[str]:
    """Return the mistakes of a script that raise no error."""
    unseen = []
    for name, mistake in MISTAKES.items():
        try:
            mistake()
            unseen.append(name)
        except (RuntimeError, IndexError):
            pass
    return unseen


def beside_a_thread() -> bool:
    """Whether a thread draws the same numbers of the CPU while this one draws numbers of the GPU."""
    torch.manual_seed(1)
    wanted = [torch.rand(1000) for _ in range(50)]
    torch.manual_seed(1)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.rand(1000) for _ in range(50)))
    thread.start()
    while thread.is_alive():
        F.dropout(ones(1000))
        torch.randn(1000, device=GPU)
    thread.join()
    return all(map(torch.equal, wanted, found))


def shares() -> dict[str, float]:
    """Return what is measured of 100,000 numbers: shares and means."""
    torch.manual_seed(0)
    kept = F.dropout(ones(100_000), 0.3)
    return {
        "dropped": (kept == 0).float().mean().item(),
        "mean of dropout": kept.mean().item(),
        "mean of normal": torch.normal(3 * ones(100_000), 2 * ones(1)).mean().item(),
        "deviation of normal": torch.normal(3 * ones(100_000), 2 * ones(1)).std().item(),
        "mean of randn": torch.randn(100_000, device=GPU).mean().item(),
        "deviation of randn": torch.randn(100_000, device=GPU).std().item(),
        "mean of rand": torch.rand(100_000, device=GPU).mean().item(),
    }


class Residual(nn.Module):
    """Adds to its input what another module makes of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return x + (out[0] if isinstance(out, tuple) else out)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.2)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, activation="gelu", batch_first=True),
    "lstm": lambda: nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True),
    "alpha": lambda: nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.3), nn.Linear(8, 8)),
    "rrelu": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)),
    "channels": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout1d(0.3), nn.Linear(8, 8)),
}


def gradients(model: nn.Module, x: Tensor, recomputed: dict[str, Any] | None) -> list[Tensor]:
    """Return the loss of two blocks, and all gradients, with or without recomputation."""
    torch.cuda.manual_seed(9)
    model.zero_grad()
    own = x.clone().requires_grad_()
    out = own
    for _ in range(2):
        out = model(out) if recomputed is None else checkpoint(model, out, **recomputed)
    loss = (out * torch.linspace(-1, 1, out.numel(), device=GPU).reshape(out.shape)).sum()
    loss.backward()
    return [loss.detach(), own.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item, union-attr]


def recomputed() -> list[str]:
    """Return the models whose gradients differ with activation checkpointing, or from those of a second run."""
    wrong = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, x = Residual(make()).to(GPU), torch.randn(3, 5, 8).to(GPU)
        plain = gradients(model, x, None)
        for how in (None, {"use_reentrant": False}, {"use_reentrant": True}):
            if not all(map(torch.allclose, plain, gradients(model, x, how))):  # sums in another order
                wrong.append(f"{name}, {how}")
        forgets = gradients(model, x, {"use_reentrant": False, "preserve_rng_state": False})
        if all(map(torch.equal, plain[1:], forgets[1:])):  # as on a GPU, this gives other numbers in backward
            wrong.append(f"{name}, without the state")
    return wrong


def slopes() -> dict[str, list[float]]:
    """Return, by model, the change of the loss along a direction, from the gradient, and from two losses."""
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, x = Residual(make()).to(GPU), torch.randn(3, 5, 8).to(GPU)
        along, step = torch.randn(3, 5, 8).to(GPU), 1e-3
        _, gradient, *_ = gradients(model, x, None)
        above, below = (gradients(model, x + sign * step * along, None)[0] for sign in (1, -1))
        found[name] = [(gradient * along).sum().item(), ((above - below) / (2 * step)).item()]
    return found


def attention_gradient(kernel: SDPBackend, in_graph: bool) -> Tensor:
    """Return the gradient of attention with dropout in one kernel, computed at once or by the replay of a graph."""
    q = torch.linspace(-1, 1, 2 * 16 * 64, device=GPU).reshape(1, 2, 16, 64).square().bfloat16().requires_grad_()

    def compute() -> Tensor:
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
            return torch.autograd.grad(out.float().square().sum(), q)[0]

    torch.cuda.manual_seed(4)
    gradient = compute()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradient = compute()
        torch.cuda.manual_seed(4)
        graph.replay()
    return gradient.float().cpu()


def attention_kernels() -> list[str]:
    """Return the kernels of attention, with and without graph, whose gradient differs from that of the first one."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    first = attention_gradient(kernels[0], False)
    runs = [(kernel, in_graph) for kernel in kernels for in_graph in (False, True)]
    return [str(run) for run in runs if not torch.allclose(first, attention_gradient(*run))]


def main() -> None:
    """Note what was found."""
    promises = (same_seed, other_seed, restored_state, forked, cpu_untouched, as_in_graph)
    found: dict[str, Any] = {promise.__name__: broken(promise) for promise in promises}
    probes = (
        own_generator,
        own_generator_in_graph,
        gpus,
        beside_a_thread,
        mistakes,
        shares,
        recomputed,
        slopes,
        attention_kernels,
    )
    found |= {probe.__name__: probe() for probe in probes}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
