"""Data sets of a number of samples that the ranks cannot share evenly, in the runs with uneven data."""
# ruff: noqa: ANN401  (data sets of any kind)

from collections.abc import Callable
from typing import Any

from torch.utils import data

from .common import patch


def cut_datasets() -> None:
    """Give data sets one sample more than can be shared evenly: at least half of them, a power of two plus one."""

    def uneven(size: int) -> int:
        unit = 256 if size > 256 else 1 << max(0, size.bit_length() - 2)
        return size - (size - 1) % unit if size > 2 else size

    def cut(kind: type) -> None:
        if "__len__" in vars(kind) and not hasattr(vars(kind)["__len__"], "_rankdoctor_cut"):
            own_len = kind.__len__  # type: ignore[attr-defined]

            def length(dataset: Any) -> int:
                return uneven(own_len(dataset))

            length._rankdoctor_cut = True  # type: ignore[attr-defined]
            kind.__len__ = length  # type: ignore[attr-defined]

    def init_subclass(cls: type, **kwargs: Any) -> None:
        super(data.Dataset, cls).__init_subclass__(**kwargs)
        cut(cls)

    data.Dataset.__init_subclass__ = classmethod(init_subclass)
    for kind in (data.Subset, data.TensorDataset, data.ConcatDataset):
        cut(kind)
    patch(data, "random_split", _fitting_split, data.dataset)


def _fitting_split(own: Callable[..., list]) -> Callable[..., list]:
    """Let a script split a data set, which was cut, into parts of known sizes: the largest becomes smaller."""

    def split(dataset: Any, lengths: Any, *args: Any, **kwargs: Any) -> list:
        too_many = sum(lengths) - len(dataset)
        if all(isinstance(length, int) for length in lengths) and too_many > 0:
            lengths = list(lengths)
            largest = lengths.index(max(lengths))
            lengths[largest] -= too_many
        return own(dataset, lengths, *args, **kwargs)

    return split
