"""Digits that encode their own number: a model's inputs then show which samples they are, with any loader.

Beside them there is a text of random bytes for the lesson that trains a language model.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from workshop.datasets import mnist, text
from workshop.datasets.files import ORIGIN_FILE
from workshop.jsonfile import write_json

sys.path.append(str(Path(__file__).resolve().parent.parent / "data"))
from writing import write_mnist

BITS = 2 ** torch.arange(14)  # in each of the first two rows, in pairs of pixels
FIRST_VAL = 10_000
"""number of the first validation sample; those of training begin at 0"""
SEQUENCE_LENGTH = 16
"""of the text, which has as many such sequences as there are digits; a grader passes it with --sequence_length"""


class SmallReader(nn.Module):
    """A substitute for the lesson's model, which takes twenty times as long; it has dropout too."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 64)
        self.dropout = nn.Dropout(0.25)
        self.scores = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 1, 28, 28) to class scores (N, 10)."""
        return self.scores(self.dropout(F.relu(self.hidden(images.flatten(1)))))


def label_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return the classes (N,) of the samples ``numbers`` (N,): no two neighbors alike, and no simple pattern."""
    return numbers * 7919 % 104_729 % 10


def images_of(numbers: torch.Tensor) -> torch.Tensor:
    """Draw the samples ``numbers`` (N,) as (N, 28, 28) uint8: the number on top, below it noise around a bar."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 60, (len(numbers), 28, 28), generator=generator, dtype=torch.uint8)
    rows = 6 + 2 * label_of(numbers)
    noise[torch.arange(len(numbers)), rows] += 120
    noise[:, :2] = (numbers[:, None] // BITS % 2 * 255).repeat_interleave(2, 1)[:, None].to(torch.uint8)
    return noise


def numbers_of(inputs: torch.Tensor) -> torch.Tensor:
    """Decode the numbers (N,) int64 of samples from inputs of a model, (N, 1, 28, 28) normalized floats."""
    top = inputs[:, 0, :2].float().mean(1).view(len(inputs), 14, 2).mean(2)
    return ((top > 1).long() * BITS).sum(1)


def write(data_dir: Path, train: int, val: int) -> None:
    """Write ``train`` + ``val`` samples, as the files of MNIST and as a text."""
    folder = mnist.folder(data_dir)
    folder.mkdir(parents=True)
    for split, first, count in (("train", 0, train), ("val", FIRST_VAL, val)):
        numbers = first + torch.arange(count)
        write_mnist(folder, split, images_of(numbers), label_of(numbers).to(torch.uint8))
    generator = torch.Generator().manual_seed(2)
    lengths = [count * SEQUENCE_LENGTH + 1 for count in (train, val)]  # each byte is predicted from those before it
    write_text(data_dir, *(torch.randint(256, (length,), generator=generator) for length in lengths))


def write_text(data_dir: Path, train: torch.Tensor, val: torch.Tensor) -> None:
    """Write two texts, each the values (N,) of its bytes, as the files of the data set of text."""
    text.folder(data_dir).mkdir(parents=True)
    files = {text.file_of(data_dir, "train"): train, text.file_of(data_dir, "val"): val}
    for file, values in files.items():
        file.write_bytes(values.to(torch.uint8).numpy().tobytes())
    lengths = {file.name: len(values) for file, values in files.items()}
    write_json(text.folder(data_dir) / ORIGIN_FILE, {"lengths": lengths})
