"""Random numbers that workers repeat: what happens to a sample is to follow from seed, epoch and sample alone.

The images here show where they were moved to: one bright pixel, in a frame of even color that carries the number.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from clinic.runs import Script
from workshop.datasets import cifar10
from writing import write_cifar10, write_cifar10_names

SAMPLES, BATCH, EPOCHS = 160, 8, 3
SEED = 4711
"""another seed than the default"""
FEW = 0.2
"""share of samples that may be moved alike by chance; there are 162 ways"""
ALIKE = 0.65
"""share of an epoch's moves that may also be those of another epoch, of whichever samples; by chance it is near 0.48"""
Moves = list[dict[int, tuple[int, ...]]]
"""for each epoch, where each sample's bright pixel was moved to, in the order in which the model saw the samples"""


def grade(script: Script) -> Iterator[str]:
    """Yield what is still seen to be wrong."""
    data_dir = script.folder / "cifar10"
    write_images(cifar10.folder(data_dir))
    (alone, _), (by_workers, processes) = (moves_of(script, workers, data_dir) for workers in (0, 2))
    if processes < 2:
        yield f"with --num_workers 2, {processes} processes load the training data"
        return
    for epochs, workers in ((alone, "no"), (by_workers, "2")):
        if any(sorted(epoch) != list(range(SAMPLES)) for epoch in epochs):
            yield f"with {workers} workers, an epoch does not have each of the {SAMPLES} samples once"
            return
        if wrong := [f"with {workers} workers, {line}" for line in repeated(epochs)]:
            yield from wrong[:2]
            return
    if different := number_of_differences(alone, by_workers):
        yield f"{different} of {SAMPLES * EPOCHS} times, a sample is moved differently with 2 workers than with none"
    again, _ = moves_of(script, 0, data_dir)
    if different := number_of_differences(alone, again):
        yield f"{different} of {SAMPLES * EPOCHS} times, a sample is moved differently in a second run with equal flags"
    other_seed, _ = moves_of(script, 0, data_dir, "--seed", SEED)
    if (same := SAMPLES * EPOCHS - number_of_differences(alone, other_seed)) > FEW * SAMPLES * EPOCHS:
        yield f"{same} of {SAMPLES * EPOCHS} times, a sample is moved in the same way with another --seed"


def repeated(epochs: Moves) -> Iterator[str]:
    """Yield which moves occur again, in the same epoch or in a later one."""
    if min(len(set(epoch.values())) for epoch in epochs) < SAMPLES / 4:
        yield f"{SAMPLES} samples are mirrored and shifted in hardly any different ways"
        return
    first = epochs[0]
    for number, epoch in enumerate(epochs, 1):
        moves, others = list(first.values()), list(epoch.values())
        if (same := sum(a == b for a, b in zip(others, others[BATCH:], strict=False))) > FEW * SAMPLES:
            yield f"in epoch {number}, {same} samples are moved as in the batch before"
        if number == 1:
            continue
        if (same := sum(first[sample] == epoch[sample] for sample in epoch)) > FEW * SAMPLES:
            yield f"{same} of {SAMPLES} samples are moved alike in epochs 1 and {number}"
        elif (same := sum(a == b for a, b in zip(moves, others, strict=True))) > FEW * SAMPLES:
            yield f"epoch {number} repeats {same} of the {SAMPLES} moves of epoch 1 in turn"
        elif (same := (Counter(moves) & Counter(others)).total()) > ALIKE * SAMPLES:
            chance = "for other samples; by chance it would be about half"
            yield f"epoch {number} has {same} of the {SAMPLES} moves of epoch 1 again, {chance}"


def number_of_differences(these: Moves, those: Moves) -> int:
    """Return how often a sample was moved differently in the same epoch of two runs."""
    return sum(a[sample] != b.get(sample) for a, b in zip(these, those, strict=True) for sample in a)


def moves_of(script: Script, workers: int, data_dir: Path, *more_flags: object) -> tuple[Moves, int]:
    """Train on the images with ``workers``; return where they were moved to, and how many processes loaded them."""
    flags = ("--dataset", "cifar10", "--model", "cifar_cnn", "--batch_size", BATCH, "--epochs", EPOCHS)
    rank = script.run(*flags, "--num_workers", workers, *more_flags, data_dir=data_dir, keep=True)[0]
    images = torch.cat([call.inputs for call in rank.training if call.inputs is not None])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cifar10.MEAN, cifar10.STD))
    pixels = (images * std + mean).mul(255).round().long()
    numbers = (pixels[:, 1, 16, 16] - 1).tolist()
    places = [divmod(place, 32) for place in pixels[:, 0].flatten(1).argmax(1).tolist()]
    moves = list(zip(numbers, places, strict=True))
    epochs = [dict(moves[SAMPLES * epoch :][:SAMPLES]) for epoch in range(EPOCHS)]
    return epochs, max(len(call.children) for call in rank.training)


def write_images(folder: Path) -> None:
    """Write images of one color, which is their number, with one bright pixel."""
    folder.mkdir(parents=True)
    for split, count in (("train", SAMPLES), ("val", BATCH)):
        images = torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
        images[:, 1] = torch.arange(1, count + 1, dtype=torch.uint8)[:, None, None]
        images[:, 0, 12, 7] = 255
        write_cifar10(folder, split, images, torch.arange(count) % 10)
    write_cifar10_names(folder, [str(number) for number in range(10)])
