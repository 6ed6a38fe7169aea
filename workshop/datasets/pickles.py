"""Pickle files of arrays, and of nothing else.

A pickle may name any code to be run while it is read. Those read here can have arrays built, and are refused otherwise.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from workshop.errors import UserError

_reconstruct = np.empty(0).__reduce__()[0]
KNOWN = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,  # as NumPy 1 called it
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}


class ArrayUnpickler(pickle.Unpickler):
    """Builds NumPy's arrays and Python's own containers, numbers and strings; refuses to look up anything else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        """Return what a pickle may call; `UnpicklingError` for all else."""
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"refused to run {module}.{name}")
        return KNOWN[module, name]


def read_dictionary(path: Path) -> dict[str, Any]:
    """Read a file that Python 2 or 3 wrote; raise `UserError` if it is damaged or holds something else."""
    try:
        with open(path, "rb") as file:
            content = ArrayUnpickler(file, encoding="latin1").load()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle may raise any
        raise UserError(f"{path}: damaged, or not such a file ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not such a file, expected a dictionary, found {type(content).__name__}")
    return content
