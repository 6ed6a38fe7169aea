"""What a change of a training loop does, on a simulated A100: a table, and the time lines of two steps.

    python lab/studies/clock_changes.py          # a minute or two

The network is small: with a batch of 512, the host launches a step faster than the GPU computes it; with 64, the host
needs longer.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

HOST = 1.5
"""times that the host counts as faster than this one, whose launches would otherwise limit all loops but one"""
VARIANTS = {
    "plain": "pinned memory, non_blocking copies",
    "item": "loss.item() in each step",
    "pageable": "pageable memory",
    "graph": "a CUDA graph",
    "small": "a batch of 64",
    "small graph": "a batch of 64 and a CUDA graph",
}
STEPS, BATCH, SMALL = 100, 512, 64


def train(variant: str) -> None:
    """Train a small network on images that lie in the memory of the host."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    blocks = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    batch = SMALL if variant.startswith("small") else BATCH
    images, labels = torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.long)
    if variant != "pageable":
        images, labels = images.pin_memory(), labels.pin_memory()
    x, y = images.cuda(), labels.cuda()

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        graph = None
        if variant.endswith("graph"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step()
        for _ in range(STEPS):
            x.copy_(images, non_blocking=True)
            y.copy_(labels, non_blocking=True)
            if graph:
                graph.replay()
                continue
            loss = step()
            if variant == "item":
                loss.item()
    torch.cuda.synchronize()


def main() -> None:
    """Run the variants, store the table and the plot."""
    import matplotlib.pyplot as plt

    from lab import results
    from lab.simulated import simulate

    rows: list[list[results.Cell]] = []
    figure, axes = plt.subplots(len(VARIANTS), 1, figsize=(9, 10), sharex=True, layout="constrained")
    for axis, (variant, meaning) in zip(axes, VARIANTS.items(), strict=True):
        found = simulate("a100", "python", Path(__file__).resolve(), variant, host=HOST)
        rows.append([meaning, found.milliseconds, found.busy, found.waits_in_words, found.minute])
        draw(axis, found.events, found.milliseconds)
        title = f"{meaning}: {found.milliseconds:.2f} ms, GPU busy {found.busy:.0%}"
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel("ms of simulated time")
    results.store(
        "clock_changes",
        title="A small network on a simulated A100",
        columns=["loop", "ms per step", "GPU busy", "it waits for", "s for a simulated minute"],
        rows=rows,
        formats={"ms per step": ".2f", "GPU busy": ".0%", "s for a simulated minute": ".0f"},
        figure=figure,
        unit=f"the host counts as {HOST} times as fast as this one",
        command="python lab/studies/clock_changes.py",
    )


def draw(axis, events: list[dict], step: float) -> None:  # noqa: ANN001
    """Draw some steps of a time line: what the host waits for, and what the GPU does."""
    spans = [e for e in events if e["ph"] == "X"]
    last = max(e["ts"] + e["dur"] for e in spans) / 1e3
    begin = last - 12 * max(step, 0.5)
    rows = {0: "host waits", 1: "copies", 2: "kernels"}
    colors = {0: "tab:red", 1: "tab:orange", 2: "tab:blue"}
    for e in spans:
        row = 0 if e["tid"] == 0 else 1 if "copy to" in e["name"] or "copy from" in e["name"] else 2
        start = e["ts"] / 1e3 - begin
        if 0 <= start <= 16:
            axis.barh(row, e["dur"] / 1e3, left=start, color=colors[row], edgecolor="none")
    axis.set_yticks(list(rows), list(rows.values()))
    axis.set_xlim(0, 16)
    axis.invert_yaxis()


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
