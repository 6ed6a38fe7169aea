"""Pickle files of arrays are read whoever wrote them; damaged ones, and those that would run code, are refused."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from workshop.datasets.cifar10 import read_dictionary
from workshop.errors import UserError
from writing import write_dictionary

CONTENT = {"data": np.arange(300, dtype=np.uint16).astype(np.uint8).reshape(3, 100), "labels": [1, 0, 9], "name": "ä"}


class Python2Pickler(pickle._Pickler):
    """Writes as Python 2 and NumPy 1 did, and so as the real CIFAR-10 files are."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_string(self, string: str | bytes) -> None:
        data = string.encode("latin1") if isinstance(string, str) else string
        self.write(pickle.BINSTRING + len(data).to_bytes(4, "little") + data)

    dispatch[str] = dispatch[bytes] = save_string


def pickled_by_python_2(content: object) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    pickled = file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in pickled
    return pickled


def assert_read(path: Path) -> None:
    found = read_dictionary(path)
    assert found["data"].dtype == np.uint8 and np.array_equal(found["data"], CONTENT["data"])
    assert found | {"data": None} == CONTENT | {"data": None}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_dictionary(tmp_path / "file", CONTENT)
    assert_read(tmp_path / "file")


@pytest.mark.filterwarnings("error")
def test_files_of_python_2_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickled_by_python_2(CONTENT))
    assert_read(tmp_path / "file")


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_no_code_is_run(tmp_path: Path) -> None:
    write_dictionary(tmp_path / "file", {"data": RunsCode(tmp_path / "run")})
    with pytest.raises(UserError, match=r"file: damaged, or not such a file \(refused to run posix.mkdir\)"):
        read_dictionary(tmp_path / "file")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("python", [2, 3])
def test_every_truncation_is_reported(python: int, tmp_path: Path) -> None:
    write_dictionary(tmp_path / "whole", CONTENT)
    whole = pickled_by_python_2(CONTENT) if python == 2 else (tmp_path / "whole").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(UserError, match="cut: damaged"):
            read_dictionary(tmp_path / "cut")


def test_other_contents_are_reported(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(1000))
    (tmp_path / "list").write_bytes(pickle.dumps([1]))
    for name, message in {
        "zeros": "zeros: damaged",
        "list": "expected a dictionary, found list",
        "no": "No such",
    }.items():
        with pytest.raises(UserError, match=message):
            read_dictionary(tmp_path / name)
