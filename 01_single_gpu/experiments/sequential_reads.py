"""Why shards: read the same samples once from tar files front to back, once from single files in random order.

    python ../data/prepare.py mnist --synthetic --shards
    python experiments/sequential_reads.py

You should see more samples per second from the shards, by how much depends on the disk: on a parallel file system each
file opened is a question to its metadata server. Both times are cold: before each, what this machine keeps of the files
in memory is dropped, for these files only.
"""

import argparse
import os
import random
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lab.flags import Parser, make_output_folder
from lab.results import write_results
from lab.tables import format_table
from workshop.datasets import IMAGES, shards
from workshop.entry import run_reporting_user_errors
from workshop.hardware import pick_device
from workshop.paths import default_data_dir

SHARDS_READ = 8
FILES_PER_SAMPLE = 2  # an image and its class


def drop_from_page_cache(paths: Sequence[Path]) -> str:
    """Make the system forget what it keeps of these files in memory; say so if it cannot."""
    if not hasattr(os, "posix_fadvise"):
        return "This system cannot be made to forget files it has in memory: both times are warm."
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only what is on disk can be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return ""


def read_all(paths: Sequence[Path]) -> tuple[float, int]:
    """Read files one after the other; return the seconds it took and the bytes read."""
    started = time.perf_counter()
    read = sum(len(path.read_bytes()) for path in paths)
    return time.perf_counter() - started, read


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--dataset", choices=sorted(IMAGES), default="mnist", help="default: %(default)s")
    parser.add_argument("--data_dir", type=Path, default=default_data_dir(), help="default: %(default)s")
    parser.add_out("sequential_reads.json")
    return parser.parse_args()


def main() -> None:
    """Unpack some shards into single files, read both, and print and save what came of it."""
    arguments = parse_arguments()
    shards.check(arguments.dataset, arguments.data_dir)
    make_output_folder(arguments.out)
    paths = shards.shard_paths(arguments.dataset, arguments.data_dir, "train")[:SHARDS_READ]
    tars = [Path(path) for path in paths]
    with tempfile.TemporaryDirectory(dir=arguments.data_dir) as folder:  # on the same disk as the shards
        for path in tars:
            with tarfile.open(path) as tar:
                for member in tar:
                    Path(folder, member.name).write_bytes(tar.extractfile(member).read())
        files = list(Path(folder).iterdir())
        random.Random(0).shuffle(files)
        samples = len(files) // FILES_PER_SAMPLE
        note = drop_from_page_cache([*tars, *files])
        rows = []
        for name, paths in (("shards, front to back", tars), ("single files, random order", files)):
            seconds, read = read_all(paths)
            rows.append({"read": name, "files": len(paths), "samples": samples, "seconds": seconds, "bytes": read})

    header = ["", "files", "samples/s", "MB/s"]
    lines = [
        (
            row["read"],
            f"{row['files']:,}",
            f"{samples / row['seconds']:,.0f}",
            f"{row['bytes'] / row['seconds'] / 1e6:,.1f}",
        )
        for row in rows
    ]
    print(format_table(header, lines))
    ratio = rows[1]["seconds"] / rows[0]["seconds"]
    print(f"\nThe shards give the same {samples:,} samples {ratio:.1f} times as fast.", note)
    figures = {
        "rows": rows,
        "ratio": ratio,
    }
    write_results(arguments.out / "sequential_reads.json", pick_device(), figures)


if __name__ == "__main__":
    run_reporting_user_errors(main)
