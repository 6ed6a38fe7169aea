"""Prepare a data set: download it, or generate synthetic data in the same format, which needs no network.

It is safe to interrupt this script and to run it again: a data set is either complete or not there, and one that is
there is never changed.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from sources import SIZES, collect, download, generate, pack
from workshop.datasets import IMAGES, image_dataset, shards, text
from workshop.errors import UserError, run_reporting_user_errors
from workshop.paths import default_data_dir


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError`."""
        raise UserError(f"{message}; `{self.prog} --help` lists the flags")


def at_least_1(text: str) -> int:
    """Read a size."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def add_data_set(data_sets: "argparse._SubParsersAction[Parser]", name: str) -> Parser:
    """Add the subcommand of a data set, with the flag that all have; return its parser."""
    flags = data_sets.add_parser(name, description=__doc__, allow_abbrev=False)
    flags.add_argument(
        "--data_dir",
        type=Path,
        default=default_data_dir(),
        metavar="DIR",
        help="folder for all data sets (default: $WORKSHOP_DATA, else data/ of the repository; now %(default)s)",
    )
    return flags


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line; a size or a seed that is not on it has no attribute."""
    parser = Parser(description=__doc__)
    data_sets = parser.add_subparsers(dest="name", required=True)
    for name, sizes in SIZES.items():
        flags = add_data_set(data_sets, name)
        if name in IMAGES:
            flags.add_argument(
                "--shards", action="store_true", help="also pack images into tar files, for --loader shards"
            )
        flags.add_argument(
            "--synthetic", action="store_true", help="generate synthetic data, in the format of the real data"
        )
        options = flags.add_argument_group("with --synthetic", argument_default=argparse.SUPPRESS)
        options.add_argument("--seed", type=int, metavar="S", help="seed of the generated data (default: 0)")
        for size, default in sizes.items():
            options.add_argument(f"--{size}", type=at_least_1, metavar="N", help=f"default: {default}")
    flags = add_data_set(data_sets, text.NAME)
    flags.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="folder of text files (default: the standard library of this Python, without tests)",
    )
    flags.add_argument("--synthetic", action="store_true", help="no effect: this text needs no network")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """Prepare what the words of a command line ask for."""
    flags = parse_arguments(words)
    name, data_dir = flags.name, flags.data_dir
    if name == text.NAME:
        collect(data_dir, flags.source)
        return
    sizes = {key: value for key, value in vars(flags).items() if key in ("seed", *SIZES[name])}
    if flags.synthetic:
        generate(name, data_dir, **sizes)
    elif sizes:
        raise UserError(f"--{next(iter(sizes))} needs --synthetic: real data are downloaded as they are")
    elif not (name in IMAGES and flags.shards and image_dataset(name).folder(data_dir).exists()):
        download(name, data_dir)  # not if data are to be packed that are there, wherever they come from
    if name in IMAGES and (flags.shards or shards.folder_of(name, data_dir).exists()):
        pack(name, data_dir)


if __name__ == "__main__":
    run_reporting_user_errors(lambda: main(sys.argv[1:]))
