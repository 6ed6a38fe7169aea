"""What the clock costs the host: updates on the null GPU, and on a simulated GPU that needs no time at all.

    python lab/studies/clock_host.py             # some minutes
    python lab/studies/clock_host.py densenet121 # those with this word in their name

Both should take the same time. They run in turn, several times each, because a machine is busier at one time than at
another; of each, the fastest update counts, because the machine disturbed it least.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
UPDATES, FIRST, ROUNDS = 44, 14, 2
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
    samples = torch.utils.data.TensorDataset(
        torch.zeros(32 * UPDATES, 256), torch.zeros(32 * UPDATES, dtype=torch.long)
    )
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


def run(name: str, option: str) -> None:
    """Make the updates, and print the milliseconds of the fastest one by the real clock."""
    update, ends = loop_of(name, option), []
    for _ in range(UPDATES):
        update()
        ends.append(time.clock_gettime(time.CLOCK_MONOTONIC))  # which --clock does not replace
    times = [end - begin for begin, end in zip(ends[FIRST:], ends[FIRST + 1 :], strict=False)]
    print(f"real ms {1e3 * min(times):.4f}", flush=True)


def measured(loop: str, gpu: Path | None) -> float:
    """Return the milliseconds of the fastest update by the real clock."""
    from lab.simulated import null_gpu
    from workshop.errors import UserError

    clock = ["--clock", gpu] if gpu else []
    command = [*null_gpu("--gpus", 2, *clock), sys.executable, str(Path(__file__).resolve()), "run", *loop.split()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    found = re.search(r"real ms ([\d.]+)", done.stdout)
    if found is None:
        raise UserError(f"{loop}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return float(found[1])


def main() -> None:
    """Run all loops, and store the table if it was all of them."""
    from lab import results

    rows: list[list[results.Cell]] = []
    wanted = [loop for loop in LOOPS if not sys.argv[1:] or any(word in loop for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as scratch:
        gpu = Path(scratch, "instant.toml")
        gpu.write_text(INSTANT)
        for loop in wanted:
            plain, clocked = [], []
            for _ in range(ROUNDS):
                plain.append(measured(loop, None))
                clocked.append(measured(loop, gpu))
            rows.append([LOOPS[loop], min(plain), min(clocked), min(clocked) / min(plain)])
            print(*rows[-1], sep=" | ", flush=True)
    results.store(
        "clock_host",
        title="The host's time of an update, without the clock and with a simulated GPU that needs no time",
        columns=["loop", "null GPU", "with --clock", "ratio"],
        rows=rows,
        formats={"null GPU": ",.1f", "with --clock": ",.1f", "ratio": ".2f"},
        unit="ms",
        spread=f"the fastest update of {ROUNDS} runs in turn",
        command="python lab/studies/clock_host.py",
        finished=not sys.argv[1:],
    )


if __name__ == "__main__":
    run(*sys.argv[2:]) if sys.argv[1:2] == ["run"] else main()
