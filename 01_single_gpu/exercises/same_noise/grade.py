"""Random numbers that workers repeat: what happens to a sample is to follow from seed, epoch and sample alone.

The images here show where they were moved to: one bright pixel, in a frame of even colour that carries the number.
"""

import builtins
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from clinic.observe import Script
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
    write_images(data_dir / cifar10.FOLDER)
    (alone, _), (by_workers, processes) = (moves_of(script, workers, data_dir) for workers in (0, 2))
    if processes < 2:
        yield f"with --num_workers 2, {processes} processes load the training data"
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
            moves, others = list(first.values()), list(epoch.values())
            if (same := sum(first[sample] == epoch[sample] for sample in epoch)) > FEW * SAMPLES:
                yield f"with {workers} workers, {same} of {SAMPLES} samples are moved alike in epochs 1 and {number}"
            elif (same := sum(a == b for a, b in zip(moves, others, strict=True))) > FEW * SAMPLES:
                yield f"with {workers} workers, epoch {number} repeats {same} of the {SAMPLES} moves of epoch 1 in turn"
            elif (same := (Counter(moves) & Counter(others)).total()) > ALIKE * SAMPLES:
                text = f"epoch {number} has {same} of the {SAMPLES} moves of epoch 1 again, for other samples"
                yield f"with {workers} workers, {text}; by chance it would be about half"
        for number, epoch in enumerate(epochs, 1):
            moves = list(epoch.values())
            if (same := sum(a == b for a, b in zip(moves, moves[BATCH:], strict=False))) > FEW * SAMPLES:
                yield f"with {workers} workers, in epoch {number}, {same} samples are moved as in the batch before"
    if different := number_of_differences(alone, by_workers):
        yield f"{different} of {SAMPLES * EPOCHS} times, a sample is moved differently with 2 workers than with none"
    again, _ = moves_of(script, 0, data_dir, watch=other_hashes)
    if different := number_of_differences(alone, again):
        yield f"{different} of {SAMPLES * EPOCHS} times, a sample is moved differently in a second run with equal flags"
    other_seed, _ = moves_of(script, 0, data_dir, "--seed", SEED)
    if (same := SAMPLES * EPOCHS - number_of_differences(alone, other_seed)) > FEW * SAMPLES * EPOCHS:
        yield f"{same} of {SAMPLES * EPOCHS} times, a sample is moved in the same way with another --seed"


def number_of_differences(these: Moves, those: Moves) -> int:
    """Return how often a sample was moved differently in the same epoch of two runs."""
    return sum(a[sample] != b.get(sample) for a, b in zip(these, those, strict=True) for sample in a)


def other_hashes(_: Path) -> Callable[[], None]:
    """Have ``hash`` return other numbers for texts, as it does in each new Python process; see `Script.run`.

    The grader's runs are forks of one process, in which they would be the same.
    """
    own_hash = builtins.hash

    def other(value: object) -> object:
        if isinstance(value, (str, bytes)):
            return ("another process", value)
        return tuple(map(other, value)) if isinstance(value, tuple) else value

    builtins.hash = lambda value: own_hash(other(value))
    return lambda: None


def moves_of(
    script: Script,
    workers: int,
    data_dir: Path,
    *more_flags: object,
    watch: Callable[[Path], Callable[[], None]] | None = None,
) -> tuple[Moves, int]:
    """Train on the images with ``workers``; return where they were moved to, and how many processes loaded them."""
    flags = ("--dataset", "cifar10", "--model", "cifar_cnn", "--batch_size", BATCH, "--epochs", EPOCHS)
    flags += ("--num_workers", workers, *more_flags)
    rank = script.run(*flags, data_dir=data_dir, keep=True, watch=watch)[0]
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
