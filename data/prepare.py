"""Prepare a data set: download it, or generate synthetic data in the same format, which needs no network.

It is safe to interrupt this script and to run it again: a data set is either complete or not there, a complete one is
not changed, and data that this script did not write are never overwritten.
"""

import argparse
import sys
from pathlib import Path

from filling import find_damage
from lab.flags import Parser
from sources import SOURCES, download, generate, pack
from workshop.datasets import IMAGES, shards
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError, nearest
from workshop.paths import default_data_dir


def parse_arguments() -> argparse.Namespace:
    """Read the command line; `UserError` if it makes no sense."""
    parser = Parser(__doc__)
    parser.add_argument("name", metavar="NAME", help=f"the data set: {', '.join(SOURCES)}")
    parser.add_argument(
        "--synthetic", action="store_true", help="generate synthetic data, in the file format of the real data"
    )
    parser.add_argument(
        "--data_dir",
        type=Path,
        default=default_data_dir(),
        metavar="DIR",
        help="folder for all data sets (default: $WORKSHOP_DATA, else data/ of the repository; now %(default)s)",
    )
    parser.add_argument(
        "--shards", action="store_true", help="also pack the samples into tar files for --loader shards"
    )
    sizes = parser.add_argument_group("with --synthetic", "what is not given is as in the data there, else:")
    sizes.add_argument(
        "--train_samples", type=int, metavar="N", help="images to generate (as many as the real data have)"
    )
    sizes.add_argument(
        "--val_samples", type=int, metavar="N", help="images to generate (as many as the real data have)"
    )
    sizes.add_argument("--cells", type=int, metavar="N", help="along each edge of an N-body box (64)")
    sizes.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same data (0)")
    return parser.parse_args()


def is_there(name: str, data_dir: Path) -> bool:
    """Return whether the data set's files are there and sound, wherever they come from."""
    return find_damage(SOURCES[name].folder(data_dir), SOURCES[name].check_folder) is None


def main() -> None:
    """Run the command line."""
    arguments = parse_arguments()
    name, data_dir = arguments.name, arguments.data_dir
    if name not in SOURCES:
        raise UserError(f"no data set {name!r}; {nearest(name, SOURCES)}")
    given = {key: getattr(arguments, key) for key in ("train_samples", "val_samples", "cells", "seed")}
    asked = {key: value for key, value in given.items() if value is not None}
    for key in asked:
        if key not in SOURCES[name].defaults:
            raise UserError(f"--{key} is not for {name}, which takes --{', --'.join(SOURCES[name].defaults)}")
    if arguments.shards and name not in IMAGES:
        raise UserError(f"--shards packs images ({', '.join(IMAGES)}), not {name}")
    if arguments.synthetic:
        generate(name, data_dir, **asked)
    elif not (arguments.shards and is_there(name, data_dir)):  # any complete data can be packed
        for key in asked:
            raise UserError(f"--{key} needs --synthetic: real data are downloaded as they are")
        download(name, data_dir)
    if arguments.shards or shards.folder_of(name, data_dir).exists():
        pack(name, data_dir)


if __name__ == "__main__":
    try:
        run_reporting_user_errors(main)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again")
