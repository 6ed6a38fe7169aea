"""The folder own_tokens of lesson 05, copied as its page says: tokens are written, trained on, and validated."""

import gzip
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest

from conftest import REPOSITORY
from workshop.errors import UserError

FOLDER = REPOSITORY / "05_fully_sharded/own_tokens"
SMALL = ["--width", "64", "--depth", "1", "--vocabulary", "256", "--sequence_length", "16", "--num_workers", "0"]


def module(name: str) -> ModuleType:
    """A script of the folder, as a module of another name than those of the lessons."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(f"own_tokens_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    loaded = module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


TRAIN: Any = module("train")
WRITE: Any = module("write_tokens")


class Bytes:
    """Stands in for a tokenizer of the package tokenizers: each byte is a token, and 256 is the end of a text."""

    vocabulary, unknown = 257, ""
    cut = padded = True  # as the file may ask for

    @classmethod
    def from_file(cls, file: str) -> "Bytes":
        assert Path(file).name == "tokenizer.json"
        return cls()

    def no_truncation(self) -> None:
        self.cut = False

    def no_padding(self) -> None:
        self.padded = False

    def token_to_id(self, token: str) -> int | None:
        return {"</s>": 256, "a": ord("a")}.get(token)

    @property
    def model(self) -> SimpleNamespace:
        return SimpleNamespace(unk_token=self.unknown or None)

    def get_vocab_size(self) -> int:
        return self.vocabulary

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        assert not (add_special_tokens or self.cut or self.padded), "text would be lost, or padding trained on"
        return [SimpleNamespace(ids=list(text.encode())) for text in texts]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the tokens of a file in this folder, in which a tokenizer lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Bytes))  # type: ignore[arg-type]
    (tmp_path / "tokenizer.json").touch()

    def run(name: str, text: str, *more: str, files: tuple[str, ...] = ()) -> None:
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(sys, "argv", ["write_tokens.py", name, *files, "data", *more])
        WRITE.main()

    return run


@pytest.mark.parametrize(("vocabulary", "dtype"), [(257, numpy.uint16), (70_000, numpy.uint32)])
def test_every_text_is_in_one_of_the_files_and_ends_with_its_token(
    write: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    vocabulary: int,
    dtype: type,
) -> None:
    texts = [f"text {number}" for number in range(400)]
    monkeypatch.setattr(Bytes, "vocabulary", vocabulary)
    write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    written = {}
    for name in ("train", "val"):
        tokens = numpy.fromfile(f"data/{name}.{dtype.__name__}", dtype).tolist()
        written[name] = "".join("\n" if token == 256 else chr(token) for token in tokens).splitlines()
    assert len(written["val"]) == 2 and sorted(written["val"] + written["train"]) == sorted(texts)
    assert written["train"] != sorted(written["train"], key=texts.index)
    assert f"--vocabulary {384 if vocabulary == 257 else 70_016}\n" in capsys.readouterr().out


def test_letters_of_a_fasta_file_are_tokens(write: Callable[..., None]) -> None:
    write("p.fasta", ">one\nACD\nEF\n>two\nGHI\n>three\r\nKL\r\n")
    found = b"".join(bytes(numpy.fromfile(f"data/{name}.uint16", numpy.uint16).tolist()) for name in ("train", "val"))
    assert sorted(found.decode().splitlines()) == ["ACDEF", "GHI", "KL"] and found.endswith(b"\n")


def test_sequences_in_two_cases_are_named_or_made_equal(
    write: Callable[..., None], capsys: pytest.CaptureFixture
) -> None:
    write("genome.fa", ">one\nACgt\n>two\nACGT\n")
    assert "25% of the letters are in lower case" in capsys.readouterr().out
    write("genome.fa", ">one\nACgt\n>two\nACGT\n", "--upper")
    found = b"".join(bytes(numpy.fromfile(f"data/{name}.uint16", numpy.uint16).tolist()) for name in ("train", "val"))
    assert found == b"ACGT\nACGT\n" and "note" not in capsys.readouterr().out


def test_what_the_tokenizer_does_not_know_is_counted(
    write: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write("texts.jsonl", '{"text": "ab"}\n{"text": "cd"}\n')
    assert "does not know" not in capsys.readouterr().out
    monkeypatch.setattr(Bytes, "unknown", "a")
    write("texts.jsonl", '{"text": "ab"}\n{"text": "cd"}\n')
    assert "note: 16.7% of the tokens stand for what the tokenizer does not know" in capsys.readouterr().out


def test_a_tokenizer_that_is_named_is_for_sequences_too(write: Callable[..., None], tmp_path: Path) -> None:
    write("p.fasta", ">one\nACD\n>two\nGHI\n", "--tokenizer", "tokenizer.json")
    assert numpy.fromfile("data/val.uint16", numpy.uint16)[-1] == 256, "its own token ends a sequence"
    with pytest.raises(UserError, match="is missing"):
        write("p.fasta", ">one\nACD\n>two\nGHI\n", "--tokenizer", "letters.json")


def test_files_are_unpacked_and_shuffled_together(write: Callable[..., None], tmp_path: Path) -> None:
    first, second = ("".join(f">{n}\n{letter * (1 + n % 7)}\n" for n in range(300)) for letter in "AC")
    with gzip.open(tmp_path / "b.fasta.gz", "wt") as packed:
        packed.write(second)
    write("a.fasta", first, files=("b.fasta.gz",))
    words = bytes(numpy.fromfile("data/train.uint16", numpy.uint16).tolist()).decode().splitlines()
    assert sorted(words) == sorted(
        ["A" * (1 + n % 7) for n in range(300) if n % 200] + ["C" * (1 + n % 7) for n in range(300) if (300 + n) % 200]
    )
    changes = sum(one[0] != other[0] for one, other in itertools.pairwise(words))
    assert changes > 200, "sequences of both files are mixed"


def test_documents_that_were_held_out_by_the_user_are_the_validation(
    write: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "val.fasta").write_text(">other\nMN\n")
    write("train.fasta", ">one\nACD\n", "--validation", "val.fasta")
    assert bytes(numpy.fromfile("data/val.uint16", numpy.uint16).tolist()) == b"MN\n"
    assert bytes(numpy.fromfile("data/train.uint16", numpy.uint16).tolist()) == b"ACD\n"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("p.fasta", "ACD\n", "does not begin with >"),
        ("p.fasta", ">one\nACD\n", "0 documents to train on, 1 for validation"),
        ("p.txt", "ACD\n", "its name must end with .fasta, .fa"),
        ("t.jsonl", '{"text": "a"}\n{"body": "b"}\n', "line 2: no JSON object with the key"),
        ("t.jsonl", "[1]\n", "line 1: no JSON object"),
    ],
)
def test_documents_that_cannot_be_read_are_named(write: Callable[..., None], name: str, text: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        write(name, text)


def test_an_epoch_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    numpy.arange(21, dtype=numpy.uint16).tofile(tmp_path / "train.uint16")
    data = TRAIN.TokenFile(TRAIN.token_file(tmp_path, "train"), 4, 21)
    assert len(data) == 5
    inputs, targets = data[1, 4]
    assert inputs.tolist() == [16, 17, 18, 19] and targets.tolist() == [17, 18, 19, 20]
    limited = TRAIN.TokenFile(tmp_path / "train.uint16", 4, 21, limit=2)
    assert len(limited) == 2 and limited.tokens is None  # nothing large is pickled for a worker
    first = [int(limited[epoch, index][0][0]) for epoch in (1, 2, 3) for index in (0, 1)]
    assert first == [0, 4, 8, 12, 16, 0] and int(limited[0, 1][0][0]) == 4  # epoch 0 is the validation's


def test_tokens_of_32_bits_are_read_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no train\.uint16 or train\.uint32"):
        TRAIN.token_file(tmp_path, "train")
    numpy.array([70_000, 1, 2], numpy.uint32).tofile(tmp_path / "train.uint32")
    file = TRAIN.token_file(tmp_path, "train")
    assert TRAIN.TokenFile(file, 2, 70_016)[1, 0][0].tolist() == [70_000, 1]
    with pytest.raises(UserError, match="has the token 70000: --vocabulary 50304 is too small"):
        TRAIN.TokenFile(file, 2, 50_304)[1, 0]
    with pytest.raises(UserError, match="has 1 sequences of 2 tokens, not 2: see --limit_train"):
        TRAIN.TokenFile(file, 2, 70_016, limit=2)


@pytest.mark.slow
def test_a_copy_trains_and_validates_its_checkpoint(tmp_path: Path, user_environment: dict[str, str]) -> None:
    shutil.copytree(FOLDER, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    rows = "".join(f">p{number}\n{'ACDEFGHIKLMNPQRSTVWY'[number % 7 :]}\n" for number in range(1000))
    (tmp_path / "mine/p.fasta").write_text(rows)
    environment = user_environment | {"PYTHONPATH": str(REPOSITORY)}

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path / "mine", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "--data_dir data --dataset p --vocabulary 256" in run("write_tokens.py", "p.fasta", "data")
    flags = [*SMALL, "--data_dir", "data", "--limit_train", "128"]
    run("train.py", *flags, "--run_dir", "run", "--resume", "true", "--epochs", "2")
    first, second = json.loads((tmp_path / "mine/run/summary.json").read_text())["epochs"]
    assert second["val_loss"] < first["val_loss"] < numpy.log(256), "it learns from more than frequencies of tokens"
    checkpoint = "run/checkpoints/epoch0003_step0000000"
    said = run("validate.py", checkpoint, "--data_dir", "data", "--num_workers", "0")
    loss = f"{checkpoint}: validation loss {second['val_loss']:.6f} of "
    assert said.startswith(loss) and said.endswith(" tokens (--limit_val)\n"), "it takes the flags of the training"
    with pytest.raises(AssertionError, match="was trained with --depth 1: leave out --depth"):
        run("validate.py", checkpoint, "--data_dir", "data", "--depth", "2")
    log = run("train.py", *flags, "--run_dir", "other", "--resume", "true")
    assert "no checkpoint in other: training begins at step 0\n" in log
