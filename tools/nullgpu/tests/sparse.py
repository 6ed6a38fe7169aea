"""Compare sparse tensors on the null GPU, with values, with the CPU: operations, gradients, optimizers.

    nullgpu --values python tests/sparse.py

It prints a line for each one that differs, and nothing else.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

DEVICES = "cpu", "cuda"
STAYS_ON_CPU = {"numbers", "to the CPU", "of columns", "copied to the CPU"}
LAYOUTS = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc


torch.sparse.check_sparse_tensor_invariants.disable()  # and no warning that says so
warnings.filterwarnings("ignore", "Sparse CS[RC] tensor support is in beta")


def table_of_edges(device: str) -> torch.Tensor:
    """Return an adjacency matrix with two equal edges, which is therefore not coalesced."""
    edges = torch.tensor([[0, 1, 3, 3, 5, 4], [2, 2, 0, 0, 1, 4]], device=device)
    return torch.sparse_coo_tensor(edges, torch.arange(1.0, 7.0, device=device), (6, 5))


def operations(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Return operations, by name; what they return is compared."""
    a = table_of_edges(device)
    x = torch.linspace(-1, 1, 5 * 4, device=device).view(5, 4)
    y = torch.linspace(-2, 1, 6 * 5, device=device).view(6, 5)

    def in_place(change: Callable[[torch.Tensor], object]) -> torch.Tensor:
        changed = table_of_edges(device)
        change(changed)
        return changed

    return {
        "to_dense": lambda: a.to_dense(),
        "coalesce": lambda: a.coalesce().values(),
        "numbers": lambda: torch.tensor([a._nnz(), a.coalesce()._nnz(), int(a.coalesce().is_coalesced())]),
        "add": lambda: a + a.coalesce() * 2,
        "add to a dense one": lambda: y.clone().add_(a, alpha=-0.5),
        "mm": lambda: torch.sparse.mm(a, x),
        "@": lambda: a.coalesce() @ x[:, 0],
        "addmm": lambda: torch.sparse.addmm(torch.ones(6, 4, device=device), a, x),
        "sum": lambda: torch.sparse.sum(a),
        "sum of rows": lambda: torch.sparse.sum(a, dim=1),
        "softmax": lambda: torch.sparse.softmax(a.coalesce(), dim=1),
        "transpose": lambda: a.t(),
        "mask": lambda: y.sparse_mask(a.coalesce()),
        "index_select": lambda: a.index_select(0, torch.tensor([3, 0], device=device)),
        "to_sparse": lambda: F.relu(y).to_sparse(),
        "double": lambda: a.double(),
        "to the CPU": lambda: a.coalesce().cpu(),
        "from the CPU": lambda: table_of_edges("cpu").to(device) * 2,
        "of columns": lambda: torch.sparse_coo_tensor(a._indices().t().contiguous().t(), a._values(), (6, 5)).cpu(),
        "copy_": lambda: in_place(lambda it: it.copy_(table_of_edges("cpu").coalesce())),
        "copied to the CPU": lambda: table_of_edges("cpu").copy_(a * 2),
        "mul_": lambda: in_place(lambda it: it.mul_(3)),
        "add_": lambda: in_place(lambda it: it.add_(it.coalesce())),
        "zero_": lambda: in_place(lambda it: it.zero_()),
        **{f"{layout}": lambda layout=layout: y.relu().to_sparse(layout=layout) for layout in LAYOUTS},  # type: ignore[misc]
        "CSR, mm": lambda: y.relu().to_sparse_csr() @ x,
    }


def differ(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    """Print a line if tensors differ, or their layouts."""
    if one.layout != other.layout or other.is_cuda == (name in STAYS_ON_CPU):
        print(f"{name}: {one.layout} and {other.layout} on {other.device}")
        return
    one, other = (value.to_dense() if value.layout is not torch.strided else value for value in (one, other.cpu()))
    if one.dtype != other.dtype or not torch.allclose(one, other, atol=1e-6):
        print(f"{name}: {one.tolist()} and {other.tolist()}")


class Graph(nn.Module):
    """Embeddings with sparse gradients, and a convolution on a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(5, 4, sparse=True)
        self.bag = nn.EmbeddingBag(6, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 1)
        self.weights = nn.Parameter(torch.rand(6))

    def forward(self) -> torch.Tensor:
        device = self.head.weight.device
        edges = table_of_edges(device.type)._indices()
        graph = torch.sparse_coo_tensor(edges, self.weights, (6, 5))
        x = self.words(torch.tensor([0, 1, 2, 2, 4], device=device))
        bags = self.bag(torch.tensor([[0, 1], [1, 5], [3, 3], [4, 4], [0, 0], [2, 1]], device=device))
        return self.head(torch.tanh(torch.sparse.mm(graph, x) + bags)).pow(2).mean()


def trained(device: str, kind: Callable[[list], torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the losses of a training and what it has learned."""
    model = Graph().to(device)
    sparse = [model.words.weight, model.bag.weight]
    optimizers = kind(sparse), torch.optim.Adam([*model.head.parameters(), model.weights], lr=0.05)
    losses = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(2):  # gradients are added up
            loss = model()
            loss.backward()
        losses.append(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
    return [torch.stack(losses), *(value.detach() for value in model.state_dict().values())]


def main() -> None:
    """Compare all."""
    on_cpu, on_gpu = map(operations, DEVICES)
    for name, operation in on_cpu.items():
        differ(name, operation(), on_gpu[name]())
    optimizers: dict[str, Callable[[list], torch.optim.Optimizer]] = {
        "SparseAdam": lambda weights: torch.optim.SparseAdam(weights, lr=0.05),
        "SGD": lambda weights: torch.optim.SGD(weights, lr=0.5),
        "SGD, momentum": lambda weights: torch.optim.SGD(weights, lr=0.5, momentum=0.5),
        "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    }
    for name, kind in optimizers.items():
        for one, other in zip(trained("cpu", kind), trained("cuda", kind), strict=True):
            differ(name, one, other)
    wrong = torch.tensor([[0, 9]], device="cuda")
    try:
        torch.sparse_coo_tensor(wrong, torch.ones(2, device="cuda"), (5,), check_invariants=True)
        print("an index that is too large: no error")
    except RuntimeError:
        pass


main()
