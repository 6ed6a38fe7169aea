"""Bring a data set to this computer: download it, or draw a stand-in that needs no network.

Safe to interrupt and to run again: a data set is there whole or not at all, one that is there is left alone, and data
that this script did not put there are never overwritten.
"""

import argparse
import sys
from pathlib import Path

from workshop.config import nearest
from workshop.datasets import DATASETS, IMAGES, DataSet, default_data_dir, shards
from workshop.errors import UserError, run_reporting_user_errors
from workshop.experiments.flags import Parser


def parse_arguments() -> argparse.Namespace:
    """Read the command line; `UserError` if it makes no sense."""
    parser = Parser(__doc__)
    parser.add_argument("name", metavar="NAME", help=f"the data set: {', '.join(DATASETS)}")
    parser.add_argument("--synthetic", action="store_true", help="draw stand-in data, in the real data's file format")
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
    drawn = parser.add_argument_group("with --synthetic", "what is not given is as in data drawn there before, else:")
    drawn.add_argument("--train_samples", type=int, metavar="N", help="images to draw (as many as the real data have)")
    drawn.add_argument("--val_samples", type=int, metavar="N", help="images to draw (as many as the real data have)")
    drawn.add_argument("--cells", type=int, metavar="N", help="along each edge of an N-body box (64)")
    drawn.add_argument("--seed", type=int, metavar="S", help="the same seed draws the same data (0)")
    return parser.parse_args()


def is_there(dataset: DataSet, data_dir: Path) -> bool:
    """Return whether the data set's files are there and sound, wherever they come from."""
    try:
        dataset.check(data_dir)
    except UserError:
        return False
    return True


def main() -> None:
    """Run the command line."""
    arguments = parse_arguments()
    if arguments.name not in DATASETS:
        raise UserError(f"no data set {arguments.name!r}; {nearest(arguments.name, DATASETS)}")
    dataset = DATASETS[arguments.name]
    given = {key: getattr(arguments, key) for key in ("train_samples", "val_samples", "cells", "seed")}
    drawn = {key: value for key, value in given.items() if value is not None}
    for key in drawn:
        if key not in dataset.RECIPE:
            raise UserError(f"--{key} is not for {arguments.name}, which takes --{', --'.join(dataset.RECIPE)}")
    if arguments.shards and arguments.name not in IMAGES:
        raise UserError(f"--shards packs images ({', '.join(IMAGES)}), not {arguments.name}")
    if arguments.synthetic:
        dataset.generate(arguments.data_dir, **drawn)
    elif not (arguments.shards and is_there(dataset, arguments.data_dir)):  # to pack, whatever is there will do
        for key in drawn:
            raise UserError(f"--{key} needs --synthetic: real data are downloaded as they are")
        dataset.download(arguments.data_dir)
    if arguments.shards or shards.folder_of(arguments.name, arguments.data_dir).exists():
        shards.pack(arguments.name, arguments.data_dir)


if __name__ == "__main__":
    try:
        run_reporting_user_errors(main)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again")
