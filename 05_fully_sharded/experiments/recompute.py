"""Activation checkpointing: how much less is kept for backward, and how much more is computed?

    python experiments/recompute.py

One process trains a language model on the CPU, first as usual, then with torch.utils.checkpoint around each block,
around every second block, and around each layer of each block. You should see that checkpointing each block keeps a
small part of the bytes, for about a quarter more operations. Around each layer it saves little: backward needs the
input of each layer anyway, and the inputs of the layers are what a checkpoint keeps. Only a norm keeps more than that.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from lab import results
from lab.flags import Parser
from lab.launching import load_script
from mean_loss import mean_loss
from tensor_bytes import bytes_kept_for_backward, peak_bytes, stored_tensors
from workshop.config import require_positive
from workshop.errors import run_reporting_user_errors
from workshop.paths import REPOSITORY

LESSON = load_script(REPOSITORY / "05_fully_sharded")
BATCH_SIZE = 8
WAYS = ("no checkpointing", "each block", "every second block", "each layer of each block")


def measure(way: str, width: int, depth: int, sequence_length: int) -> tuple[float, float, float]:
    """Return what a training step keeps for backward and needs at most, in MB, and the GFLOP that it computes."""
    torch.manual_seed(0)
    model = LESSON.make_model(LESSON.Config(width=width, depth=depth))
    layers = [layer for block in model.blocks for layer in block.children()]
    for module in dict(zip(WAYS, ([], model.blocks, model.blocks[::2], layers), strict=True))[way]:
        module.forward = LESSON.recomputed(module.forward)  # the call that train.py makes for each block
    optimizer = torch.optim.AdamW(model.parameters())
    sequences = torch.randint(256, (BATCH_SIZE, sequence_length + 1))
    inputs, targets = sequences[:, :-1], sequences[:, 1:]

    def forward() -> torch.Tensor:
        return mean_loss(model(inputs), targets)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes the optimizer's state
    kept = bytes_kept_for_backward(model, forward)
    with FlopCounterMode(display=False) as counter:
        step()
    return kept / 1e6, peak_bytes(step, stored_tensors(model, optimizer)) / 1e6, counter.get_total_flops() / 1e9


def main() -> None:
    """Measure each way and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("--width", type=int, default=128, help="as in train.py (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=8, help="as in train.py (default: %(default)s)")
    parser.add_argument("--sequence_length", type=int, default=256, help="as in train.py (default: %(default)s)")
    arguments = parser.parse_args()
    require_positive(arguments, "width", "depth", "sequence_length")
    torch.set_num_threads(1)
    sizes = (arguments.width, arguments.depth, arguments.sequence_length)
    measured = {way: measure(way, *sizes) for way in WAYS}
    plain = measured[WAYS[0]]
    results.store(
        "recompute",
        title="Activation checkpointing",
        columns=["checkpoint around", "kept for backward, MB", "MB at most", "GFLOP in a step", "more"],
        rows=[[way, *figures, figures[2] / plain[2] - 1] for way, figures in measured.items()],
        formats={
            "kept for backward, MB": ",.1f",
            "MB at most": ",.1f",
            "GFLOP in a step": ",.2f",
            "more": "+.1%",
        },
        spread="{} blocks of width {}, {} samples of {} bytes".format(*sizes[1::-1], BATCH_SIZE, sizes[2]),
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
