"""Write documents as files of tokens for the train.py beside this script: FOLDER/train.uint16 and FOLDER/val.uint16.

    python write_tokens.py texts.jsonl FOLDER                    # needs tokenizer.json here; pip install tokenizers
    python write_tokens.py a.fasta b.fasta.gz FOLDER             # each letter is a token: no tokenizer is needed
    python write_tokens.py proteins.fasta FOLDER --validation held_out.fasta   # if you have held out some yourself
    python write_tokens.py genome.fa.gz FOLDER --upper                         # lower case, as of repeats, is not kept

A line of texts.jsonl is a JSON object with the key "text". tokenizer.json is the file of an open model, or of a
tokenizer that you have trained. A token ends each document, and each 200th one (--every) is for validation. All of them
are shuffled, also between files, in parts that fit into memory: the documents may be far larger than it. With more than
65,536 tokens in the vocabulary the files are train.uint32 and val.uint32.

To train a tokenizer on your own documents:

    import json
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    texts = (json.loads(line)["text"] for line in open("texts.jsonl"))
    tokenizer.train_from_iterator(texts, vocab_size=32768, special_tokens=["<|endoftext|>"])
    tokenizer.save("tokenizer.json")

For a vocabulary of letters, smaller than that of bytes, give this file with --tokenizer, also for sequences:

    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {letter: number for number, letter in enumerate(["<eos>", "X", *"ACDEFGHIKLMNPQRSTVWY"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="X"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save("letters.json")
"""

import argparse
import gzip
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workshop.errors import UserError, run_reporting_user_errors

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""what tokenizers call the token after a document"""
FASTA, LINES = (".fasta", ".fa", ".fas", ".faa", ".fna"), (".jsonl",)
"""how the names of files end, before .gz"""
AT_ONCE = 1000
"""documents that a tokenizer gets at once, because it then uses all CPU cores"""
PARTS = 64
"""that are shuffled one after the other: each must fit into memory"""


def ending_of(file: Path) -> str:
    """Return how the name of a file ends, without .gz."""
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def documents_of(files: Sequence[Path]) -> Iterator[str]:
    """Yield the sequences of files in FASTA format, or the texts of files of JSON lines."""
    for file in files:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            yield from sequences_of(file, lines) if ending_of(file) in FASTA else texts_of(file, lines)


def watched(texts: Iterable[str], upper: bool, cases: Counter[str]) -> Iterator[str]:
    """Yield the texts, in upper case on request; count their letters of each case."""
    for text in texts:
        one = text.upper() if upper else text
        cases.update(lower=sum(map(str.islower, one)), upper=sum(map(str.isupper, one)))
        yield one


def warn(cases: Counter[str], unknown: int, tokens: int, is_sequences: bool) -> None:
    """Say what is probably not meant: sequences in two cases, or documents that the tokenizer does not know."""
    lower = cases["lower"] / max(1, cases.total())
    if is_sequences and 0.001 < lower < 0.999:
        print(
            f"note: {lower:.0%} of the letters are in lower case, as masked repeats are: they are other tokens than "
            "those in upper case, or unknown to the tokenizer. If that is not meant, write the files again with --upper"
        )
    if unknown > 0.001 * tokens:
        print(
            f"note: {unknown / tokens:.1%} of the tokens stand for what the tokenizer does not know. What they were is "
            "lost, and a model learns quickly to predict them: is it the right tokenizer?"
        )


def sequences_of(file: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yield the sequences of a file in FASTA format."""
    sequence: list[str] | None = None
    for line in lines:
        if line.startswith(">"):
            if sequence is not None:
                yield "".join(sequence)
            sequence = []
        elif sequence is not None:
            sequence.append(line.strip())
        elif line.strip():
            raise UserError(f"{file} is no FASTA file: it does not begin with >")
    if sequence is not None:
        yield "".join(sequence)


def texts_of(file: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yield the texts of a file whose lines are JSON objects with the key "text"."""
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{file}, line {number}: no JSON object with the key "text"') from error


def tokenizer_of(file: Path) -> tuple[Any, int]:
    """Return a tokenizer and its token for the end of a document."""
    if not file.is_file():
        raise UserError(f"{file} is missing: take the tokenizer.json of an open model, or train a tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError("the package tokenizers is missing: pip install tokenizers") from error
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()  # the file may ask for both, for other uses: then text is lost, and padding trained on
    tokenizer.no_padding()
    for name in ENDS:
        if (end := tokenizer.token_to_id(name)) is not None:
            return tokenizer, end
    raise UserError(f"{file} has none of the tokens {', '.join(ENDS)}: add the name of its own to ENDS")


def tokens_of(texts: Iterator[str], tokenizer: Any) -> Iterator[Sequence[int]]:  # noqa: ANN401
    """Yield the tokens of each text; without a tokenizer its bytes."""
    if tokenizer is None:
        yield from (text.encode() for text in texts)
        return
    while some := list(itertools.islice(texts, AT_ONCE)):
        yield from (encoded.ids for encoded in tokenizer.encode_batch(some, add_special_tokens=False))


class Shuffled:
    """A file of tokens whose documents come in random order: they are dealt to parts, and each part is shuffled."""

    def __init__(self, file: Path, scratch: Path) -> None:
        self.file, self.dtype, self.documents, self.tokens = file, np.dtype(file.suffix[1:]), 0, 0
        self.unknown = 0
        self.random = np.random.default_rng(1)
        self.parts = [(scratch / f"{file.stem}_{n}").open("w+b") for n in range(PARTS)]
        self.lengths: list[list[int]] = [[] for _ in range(PARTS)]

    def add(self, document: Sequence[int], end: int, unknown: int | None) -> None:
        """Add a document, and the token that ends it; count the token for what is unknown."""
        tokens = np.array([*document, end], self.dtype)
        self.unknown += int((tokens == unknown).sum()) if unknown is not None else 0
        part = int(self.random.integers(PARTS))
        self.parts[part].write(tokens.tobytes())
        self.lengths[part].append(len(tokens))
        self.documents, self.tokens = self.documents + 1, self.tokens + len(tokens)

    def write(self) -> None:
        """Write the file."""
        with self.file.open("wb") as out:
            for part, lengths in zip(self.parts, self.lengths, strict=True):
                part.seek(0)
                whole = np.frombuffer(part.read(), self.dtype)
                part.close()
                documents = np.split(whole, np.cumsum(lengths[:-1])) if lengths else []
                for number in self.random.permutation(len(documents)):
                    out.write(documents[number].tobytes())
        print(f"{self.file}: {self.documents:,} documents, {self.tokens:,} tokens")


def check(files: Sequence[Path]) -> None:
    """Raise `UserError` unless these are files of one kind that can be read."""
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: there is no such file")
        if ending_of(file) not in (*FASTA, *LINES):
            raise UserError(f"{file}: its name must end with {', '.join((*FASTA, *LINES))}, or one of these and .gz")
    if len({ending_of(file) in FASTA for file in files}) > 1:
        raise UserError("sequences and texts need other tokens: run it once for each, with another folder")


def main() -> None:
    """Read the documents, hold some out, and write the tokens of both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "documents", type=Path, nargs="+", help="files of JSON lines, or in FASTA format; also with .gz"
    )
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--every", type=int, default=200, metavar="N", help="hold out each Nth document (%(default)s)")
    parser.add_argument("--validation", type=Path, nargs="+", metavar="FILE", default=[], help="files for validation")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="default: tokenizer.json for texts, and bytes for sequences"
    )
    parser.add_argument("--upper", action="store_true", help="write all letters in upper case")
    arguments = parser.parse_args()
    if arguments.every < 2:
        raise UserError(f"--every must be 2 or more, got {arguments.every}")
    check([*arguments.documents, *arguments.validation])
    tokenizer, end, unknown, vocabulary = None, ord("\n"), None, 256
    if arguments.tokenizer or ending_of(arguments.documents[0]) in LINES:
        tokenizer, end = tokenizer_of(arguments.tokenizer or Path("tokenizer.json"))
        vocabulary = tokenizer.get_vocab_size()
        name_of_unknown = getattr(tokenizer.model, "unk_token", None)
        unknown = tokenizer.token_to_id(name_of_unknown) if isinstance(name_of_unknown, str) else None
    kind = "uint16" if vocabulary <= 2**16 else "uint32"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        train, val = (Shuffled(arguments.folder / f"{name}.{kind}", Path(scratch)) for name in ("train", "val"))
        cases: Counter[str] = Counter()
        texts = watched(documents_of(arguments.documents), arguments.upper, cases)
        for number, document in enumerate(tokens_of(texts, tokenizer)):
            is_held_out = number % arguments.every == 0 and not arguments.validation
            (val if is_held_out else train).add(document, end, unknown)
        for document in tokens_of(watched(documents_of(arguments.validation), arguments.upper, cases), tokenizer):
            val.add(document, end, unknown)
        if not train.documents or not val.documents:
            raise UserError(f"{train.documents} documents to train on, {val.documents} for validation: both need some")
        train.write()
        val.write()
    is_sequences = ending_of(arguments.documents[0]) in FASTA
    warn(cases, train.unknown + val.unknown, train.tokens + val.tokens, is_sequences)
    name = arguments.documents[0].name.partition(".")[0]
    flags = f"--data_dir {arguments.folder} --dataset {name} --vocabulary {128 * -(-vocabulary // 128)}"
    print(f"{vocabulary:,} different tokens; train with {flags}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
