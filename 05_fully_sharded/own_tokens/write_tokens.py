"""Write documents as files of tokens for the train.py beside this script: FOLDER/train.uint16 and FOLDER/val.uint16.

    python write_tokens.py documents.jsonl FOLDER      # needs tokenizer.json in this folder; pip install tokenizers
    python write_tokens.py proteins.fasta FOLDER       # each letter is a token, its byte: no tokenizer is needed

A line of documents.jsonl is a JSON object with the key "text". tokenizer.json is the file of an open model, or of a
tokenizer that you have trained. The documents are shuffled, and a token ends each of them. One of 200 is held out for
validation; with --validation FILE they are those of this file, for documents that are held out by other rules. With
more than 65,536 tokens in the vocabulary the files are train.uint32 and val.uint32. All documents are held in memory.
For more of them run it once for each part, and join the files: cat */train.uint16 > train.uint16.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workshop.errors import UserError, run_reporting_user_errors

HELD_OUT = 200
"""of so many documents, one is for validation"""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""what tokenizers call the token after a document"""
FASTA = (".fasta", ".fa", ".faa", ".fna")
"""how the names of files in FASTA format end"""
AT_ONCE = 1000
"""documents that a tokenizer gets at once, because it then uses all CPU cores"""


def sequences_of(file: Path) -> list[str]:
    """Return the sequences of a file in FASTA format."""
    sequences: list[list[str]] = []
    for line in file.read_text().splitlines():
        if line.startswith(">"):
            sequences.append([])
        elif sequences:
            sequences[-1].append(line.strip())
        elif line.strip():
            raise UserError(f"{file} is no FASTA file: it does not begin with >")
    return ["".join(lines) for lines in sequences]


def texts_of(file: Path) -> list[str]:
    """Return the texts of a file whose lines are JSON objects with the key "text"."""
    texts = []
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                texts.append(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f'{file}, line {number}: no JSON object with the key "text"') from error
    return texts


def tokenizer_of(file: Path) -> tuple[Any, int]:
    """Return a tokenizer and its token for the end of a document."""
    if not file.is_file():
        raise UserError(f"{file} is missing: take the tokenizer.json of an open model, or train a tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError("the package tokenizers is missing: pip install tokenizers") from error
    tokenizer = Tokenizer.from_file(str(file))
    for name in ENDS:
        if (end := tokenizer.token_to_id(name)) is not None:
            return tokenizer, end
    raise UserError(f"{file} has none of the tokens {', '.join(ENDS)}: add the name of its own to ENDS")


def tokens_of(texts: list[str], tokenizer: Any) -> Iterator[Sequence[int]]:  # noqa: ANN401
    """Yield the tokens of each text; without a tokenizer its bytes."""
    if tokenizer is None:
        yield from (text.encode() for text in texts)
        return
    for first in range(0, len(texts), AT_ONCE):
        for encoded in tokenizer.encode_batch(texts[first : first + AT_ONCE], add_special_tokens=False):
            yield encoded.ids


def write(file: Path, documents: Iterator[Sequence[int]], end: int) -> None:
    """Write the tokens of the documents, one after the other; ``end`` follows each."""
    dtype, tokens = np.dtype(file.suffix[1:]), 0
    with file.open("wb") as out:
        for document in documents:
            np.array([*document, end], dtype).tofile(out)
            tokens += len(document) + 1
    print(f"{file}: {tokens:,} tokens")


def documents_of(file: Path) -> list[str]:
    """Return the documents of a file in an order of their own, which is the same each time."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    documents = sequences_of(file) if file.suffix in FASTA else texts_of(file)
    random.Random(1).shuffle(documents)
    return documents


def main() -> None:
    """Read the documents, hold some out, and write the tokens of both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, help=f"documents.jsonl, or a file in FASTA format ({', '.join(FASTA)})")
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--validation", type=Path, metavar="FILE", help="documents for validation, in the same format")
    parser.add_argument("--tokenizer", type=Path, default=Path("tokenizer.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    train = documents_of(arguments.documents)
    if arguments.validation:
        val = documents_of(arguments.validation)
    else:
        held_out = max(1, len(train) // HELD_OUT)
        val, train = train[:held_out], train[held_out:]
    if not train or not val:
        raise UserError(f"{len(train)} documents to train on and {len(val)} for validation: each needs at least one")
    tokenizer, end, vocabulary = None, ord("\n"), 256
    if arguments.documents.suffix not in FASTA:
        tokenizer, end = tokenizer_of(arguments.tokenizer)
        vocabulary = tokenizer.get_vocab_size()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (("val", val), ("train", train)):
        file = arguments.folder / f"{name}.{'uint16' if vocabulary <= 2**16 else 'uint32'}"
        write(file, tokens_of(documents, tokenizer), end)
    rounded = 128 * -(-vocabulary // 128)
    print(f"{vocabulary:,} tokens in the vocabulary: train with --vocabulary {rounded}")


if __name__ == "__main__":
    run_reporting_user_errors(main)
