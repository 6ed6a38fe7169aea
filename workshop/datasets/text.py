"""Text as bytes: each byte is a token, so there are 256 kinds of them, and no tokenizer is needed.

``data/prepare.py text`` writes the bytes of many files one after the other into ``train.bin`` and ``val.bin``, and
`ORIGIN_FILE` says from where they are. No file is in both.
"""

from pathlib import Path

import torch
from torch.utils.data import Dataset

from workshop.datasets.files import ORIGIN_FILE, prepare_command
from workshop.errors import UserError
from workshop.jsonfile import read_json
from workshop.seeds import seed_of

NAME = "text"


def folder(data_dir: Path) -> Path:
    """Return the folder of the data set."""
    return data_dir / NAME


def file_of(data_dir: Path, split: str) -> Path:
    """Return the file of a split, ``"train"`` or ``"val"``."""
    return folder(data_dir) / f"{split}.bin"


def tokens(data_dir: Path, split: str) -> torch.Tensor:
    """Return the bytes of a split, (N,) uint8, as a memory map: pages that are not accessed are not read.

    Raises:
        UserError: the file is missing, or not as long as when it was written.
    """
    file = file_of(data_dir, split)
    size = file.stat().st_size if file.is_file() else 0
    if not size or size != read_json(folder(data_dir) / ORIGIN_FILE).get("lengths", {}).get(file.name):
        problem = f"{file} is {'not as long as when it was written' if size else 'missing'}"
        make_room = f"move {folder(data_dir)} away and " if folder(data_dir).exists() else ""
        raise UserError(f"{problem}; to prepare text {make_room}run `{prepare_command(NAME, data_dir)}`")
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)


def check(data_dir: Path) -> None:
    """Raise `UserError` unless both splits can be read."""
    for split in ("train", "val"):
        tokens(data_dir, split)


class TextDataset(Dataset):
    """Sequences of a text; ``dataset[epoch, index]`` is a sample: inputs (T,) and targets (T,), both int64.

    The target of each byte is the byte after it. Training sequences begin at random positions, which depend only on the
    seed, the epoch and the number of the sample. So a sample is the same on any rank, in any worker and batch, and no
    two ranks share one. Validation covers all bytes in order, without an incomplete last sequence.

    Args:
        data_dir: folder of all data sets.
        split: ``"train"`` or ``"val"``.
        sequence_length: T.
        limit: number of sequences; None: as many as the text has.
        seed: of the places.

    Raises:
        UserError: the text is missing or damaged, or shorter than a sequence.
    """

    def __init__(
        self, data_dir: Path, split: str, sequence_length: int, limit: int | None = None, seed: int = 0
    ) -> None:
        self.tokens = tokens(data_dir, split)
        self.training, self.sequence_length, self.seed = split == "train", sequence_length, seed
        whole = (len(self.tokens) - 1) // sequence_length
        if not whole:
            raise UserError(
                f"--sequence_length {sequence_length} needs {sequence_length + 1} bytes, but "
                f"{file_of(data_dir, split)} has {len(self.tokens)}: prepare a longer text, or choose shorter sequences"
            )
        self.samples = min(whole, limit or whole)
        self._starts: dict[int, torch.Tensor] = {}

    def starts(self, epoch: int) -> torch.Tensor:
        """Return where the sequences of an epoch begin, (samples,) int64."""
        if not self.training:
            return torch.arange(self.samples) * self.sequence_length
        if epoch not in self._starts:  # a worker needs those of one epoch after the other
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
            last = len(self.tokens) - self.sequence_length
            self._starts = {epoch: torch.randint(last, (self.samples,), generator=generator)}
        return self._starts[epoch]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, index = key
        start = int(self.starts(epoch)[index])
        sequence = self.tokens[start : start + self.sequence_length + 1].long()
        return sequence[:-1], sequence[1:]
