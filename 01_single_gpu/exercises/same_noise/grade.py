"""Random numbers that workers repeat: what happens to a sample is to follow from seed, epoch and sample alone.

The images here show where they were moved to: one bright pixel, in a frame of even colour that carries the number.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from clinic.observe import Script
from workshop.datasets import cifar10
from writing import write_cifar10, write_cifar10_names

SAMPLES, BATCH, EPOCHS = 160, 8, 3
FEW = 0.2
"""share of samples that may be moved alike by chance; there are 162 ways"""
Moves = list[dict[int, tuple[int, ...]]]
"""for each epoch, where each sample's bright pixel was moved to, in the order in which the model saw the samples"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    data_dir = script.folder / "cifar10"
    write_images(data_dir / cifar10.FOLDER)
    (alone, _), (by_workers, processes) = (moves_of(script, workers, data_dir) for workers in (0, 2))
    if processes < 2:
        yield f"with --num_workers 2, {processes} processes load"
        return
    for epochs, workers in ((alone, "no"), (by_workers, "2")):
        if any(sorted(epoch) != list(range(SAMPLES)) for epoch in epochs):
            yield f"with {workers} workers, an epoch does not have each of the {SAMPLES} samples once"
            return
        if min(len(set(epoch.values())) for epoch in epochs) < SAMPLES / 4:
            yield f"with {workers} workers, {SAMPLES} samples are mirrored and shifted in hardly any different ways"
            return
        first = epochs[0]
        for number, epoch in enumerate(epochs[1:], 2):
            if (same := sum(first[sample] == epoch[sample] for sample in epoch)) > FEW * SAMPLES:
                yield f"with {workers} workers, {same} of {SAMPLES} samples are moved alike in epochs 1 and {number}"
            moves, others = list(first.values()), list(epoch.values())
            if (same := sum(a == b for a, b in zip(moves, others, strict=True))) > FEW * SAMPLES:
                yield f"with {workers} workers, epoch {number} repeats {same} of the {SAMPLES} moves of epoch 1 in turn"
        for number, epoch in enumerate(epochs, 1):
            moves = list(epoch.values())
            if (same := sum(a == b for a, b in zip(moves, moves[BATCH:], strict=False))) > FEW * SAMPLES:
                yield f"with {workers} workers, in epoch {number}, {same} samples are moved as in the batch before"
    different = sum(a[sample] != b[sample] for a, b in zip(alone, by_workers, strict=True) for sample in a)
    if different:
        yield f"{different} of {SAMPLES * EPOCHS} times, a sample is moved otherwise with 2 workers than with none"


def moves_of(script: Script, workers: int, data_dir: Path) -> tuple[Moves, int]:
    """Train on the images with ``workers``; return where they were moved to, and how many processes loaded them."""
    flags = ("--dataset", "cifar10", "--model", "cifar_cnn", "--batch_size", BATCH, "--epochs", EPOCHS)
    rank = script.run(*flags, "--num_workers", workers, data_dir=data_dir, keep=True)[0]
    training = [call for call in rank.shown if call.training]
    images = torch.cat([call.inputs for call in training]) if training else torch.zeros(0, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cifar10.MEAN, cifar10.STD))
    pixels = (images * std + mean).mul(255).round().long()
    numbers = (pixels[:, 1, 16, 16] - 1).tolist()
    places = [divmod(place, 32) for place in pixels[:, 0].flatten(1).argmax(1).tolist()]
    moves = list(zip(numbers, places, strict=True))
    epochs = [dict(moves[SAMPLES * epoch :][:SAMPLES]) for epoch in range(EPOCHS)]
    return epochs, max((len(call.children) for call in training), default=0)


def write_images(folder: Path) -> None:
    """Write images of one colour, which is their number, with one bright pixel."""
    folder.mkdir(parents=True)
    for split, count in (("train", SAMPLES), ("val", BATCH)):
        images = torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
        images[:, 1] = torch.arange(1, count + 1, dtype=torch.uint8)[:, None, None]
        images[:, 0, 12, 7] = 255
        write_cifar10(folder, split, images, torch.arange(count) % 10)
    write_cifar10_names(folder, [str(number) for number in range(10)])
