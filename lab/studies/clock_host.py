"""What the clock costs the host: updates on the null GPU, and on a simulated GPU that needs no time at all.

    python lab/studies/clock_host.py             # ten minutes on an idle machine
    python lab/studies/clock_host.py busy        # the same, while as many processes compute as there are CPUs
    python lab/studies/clock_host.py densenet121 # those with this word in their name

Both should take the same time. On an idle machine they run in turn, several times each, and the fastest update counts,
because it was disturbed least. On a busy one they run at the same time, so that both are disturbed alike, and the mean
of the updates of some seconds counts.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

LOOPS = {
    "resnet18 fp32": "ResNet-18, fp32",
    "resnet50 bf16": "ResNet-50, autocast",
    "resnet152 fp16": "ResNet-152, autocast and GradScaler",
    "densenet121 fp16": "DenseNet-121, autocast and GradScaler",
    "mobilenet_v3_small fp32": "MobileNetV3, fp32",
    "vit_b_16 bf16": "ViT-B/16, autocast",
    "gpt2 bf16": "GPT-2 124M, autocast",
    "gpt2 compiled": "GPT-2 124M, compiled",
    "lstm fp32": "an LSTM of PyTorch's own cells",
    "mlp adam": "a perceptron, Adam without foreach",
    "mlp loader": "a perceptron, a loader with two workers",
    "resnet18 parallel": "ResNet-18, DataParallel on two GPUs",
}
UPDATES, FIRST, ROUNDS = 44, 14, 5
IDLE_SECONDS, SECONDS, MOST = 0.5, 3.0, 3000
"""updates are made for at least so long, on an idle machine and on a busy one, but no more than so many"""
INSTANT = """
like = "a100"
name = "GPU that needs no time"
bandwidth = 1e18
clock_rate = 1e15
[clock]
launch = 1e-12
shortest = 1e-12
pinned = 1e18
pageable = 1e18
peak = { fp32 = 1e21, tf32 = 1e21, bf16 = 1e21, fp16 = 1e21 }
"""


def loop_of(name: str, option: str) -> Callable[[], None]:
    """Return a function that makes an update."""
    import clock_workloads
    import torch
    import torch.nn.functional as F
    import torchvision
    from torch import nn

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "compiled": torch.bfloat16}.get(option)
    device = torch.device("cuda")
    if name == "gpt2":
        model: nn.Module = clock_workloads.GPT2(fast=True)
        x = torch.zeros(2, 256, dtype=torch.long, device=device)
        labels = x.flatten()
    elif name == "lstm":
        model = nn.LSTM(64, 64, 1, batch_first=True)
        x, labels = torch.zeros(8, 16, 64, device=device), torch.zeros(8 * 16, dtype=torch.long, device=device)
    elif name == "mlp":
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(12)))
        x, labels = torch.zeros(32, 256, device=device), torch.zeros(32, dtype=torch.long, device=device)
    else:
        model = getattr(torchvision.models, name)()
        x, labels = torch.zeros(8, 3, 224, 224, device=device), torch.zeros(8, dtype=torch.long, device=device)
    model = model.to(device)
    if option == "parallel":
        model = nn.DataParallel(model)
    if option == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    else:
        optimizer = (
            torch.optim.AdamW(model.parameters()) if name == "gpt2" else torch.optim.SGD(model.parameters(), 0.1)
        )
    scaler = torch.amp.GradScaler("cuda", enabled=option == "fp16")
    samples = torch.utils.data.TensorDataset(torch.zeros(32 * MOST, 256), torch.zeros(32 * MOST, dtype=torch.long))
    loader = iter(torch.utils.data.DataLoader(samples, 32, num_workers=2 if option == "loader" else 0))

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return F.cross_entropy((out[0] if isinstance(out, tuple) else out).flatten(0, -2), labels)

    compute = torch.compile(loss_of) if option == "compiled" else loss_of

    def update() -> None:
        inputs, targets = (it.to(device) for it in next(loader)) if option == "loader" else (x, labels)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = compute(inputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return update


def run(name: str, option: str, seconds: str) -> None:
    """Make the updates, and print the milliseconds of the fastest one and their mean, by the real clock."""
    update, ends = loop_of(name, option), []
    for number in range(MOST):
        update()
        ends.append(time.clock_gettime(time.CLOCK_MONOTONIC))  # which --clock does not replace
        if number + 1 >= UPDATES and ends[-1] - ends[FIRST] >= float(seconds):
            break
    times = [end - begin for begin, end in zip(ends[FIRST:], ends[FIRST + 1 :], strict=False)]
    print(f"real ms {1e3 * min(times):.4f} {1e3 * mean(times):.4f}", flush=True)


def started(loop: str, gpu: Path | None, seconds: float) -> subprocess.Popen:
    """Start a loop on a null GPU, with a clock if ``gpu`` is a file."""
    from lab.simulated import null_gpu

    clock = ["--clock", gpu] if gpu else []
    words = [str(Path(__file__).resolve()), "run", *loop.split(), str(seconds)]
    command = [*null_gpu("--gpus", 2, *clock), sys.executable, *words]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def milliseconds(loop: str, process: subprocess.Popen, which: int) -> float:
    """Return the milliseconds that a loop prints when it ends: 1 for those of the fastest update, 2 for the mean."""
    from workshop.errors import UserError

    out, error = process.communicate(timeout=900)
    found = re.search(r"real ms ([\d.]+) ([\d.]+)", out)
    if found is None:
        raise UserError(f"{loop}: {out[-500:]}{error[-1500:]}")
    return float(found[which])


def compared(loop: str, gpu: Path, busy: bool) -> tuple[float, float, list[float]]:
    """Return the milliseconds of an update without the clock and with it, and the ratio in each round."""
    rounds = []
    for _ in range(ROUNDS):
        if busy:
            both = [started(loop, None, SECONDS), started(loop, gpu, SECONDS)]
            rounds.append([milliseconds(loop, one, 2) for one in both])
        else:
            rounds.append([milliseconds(loop, started(loop, one, IDLE_SECONDS), 1) for one in (None, gpu)])
    plain, clocked = zip(*rounds, strict=True)
    ratios = sorted(with_clock / without for without, with_clock in rounds)
    return (mean(plain), mean(clocked), ratios) if busy else (min(plain), min(clocked), ratios)


@contextmanager
def others(count: int) -> Iterator[None]:
    """Let so many other processes compute all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10_000))"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def main(words: list[str]) -> None:
    """Run all loops, and store the table if it was all of them."""
    from lab import results
    from workshop.hardware import available_cpus

    busy, words = "busy" in words, [word for word in words if word != "busy"]
    rows: list[list[results.Cell]] = []
    wanted = [loop for loop in LOOPS if not words or any(word in loop for word in words)]
    cpus = available_cpus()
    with tempfile.TemporaryDirectory() as scratch, others(cpus if busy else 0):
        gpu = Path(scratch, "instant.toml")
        gpu.write_text(INSTANT)
        for loop in wanted:
            plain, clocked, ratios = compared(loop, gpu, busy)
            rows.append([LOOPS[loop], plain, clocked, clocked / plain, f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
            print(*rows[-1], sep=" | ", flush=True)
    results.store(
        "clock_host_busy" if busy else "clock_host",
        title="The host's time of an update, without the clock and with a simulated GPU that needs no time"
        + (f", beside {cpus} processes that compute" if busy else ""),
        columns=["loop", "null GPU", "with --clock", "ratio", "ratio in a round"],
        rows=rows,
        formats={"null GPU": ",.1f", "with --clock": ",.1f", "ratio": ".2f"},
        unit="ms",
        spread=f"{ROUNDS} runs of some seconds at the same time"
        if busy
        else f"the fastest update of {ROUNDS} runs in turn",
        command=f"python lab/studies/clock_host.py{' busy' if busy else ''}",
        finished=not words,
    )


if __name__ == "__main__":
    run(*sys.argv[2:]) if sys.argv[1:2] == ["run"] else main(sys.argv[1:])
