"""Why shards: read the same samples once from tar files front to back, once from single files in random order.

    python ../data/prepare.py mnist --synthetic --shards
    python experiments/sequential_reads.py

You should see more samples per second from the shards. By how much depends on the disk: on a parallel file system each
file that is opened is a question to its metadata server. Before each measurement the system is asked to forget what it
keeps of the files in memory.
"""

import os
import random
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lab import results
from lab.flags import Parser
from workshop.datasets import shards
from workshop.errors import run_reporting_user_errors, warn
from workshop.paths import default_data_dir

DATASET = "mnist"
SHARDS_READ = 8


def seconds_to_read(paths: Sequence[Path]) -> float:
    """Read files one after the other, from the disk; return the seconds it took."""
    if hasattr(os, "posix_fadvise"):
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())  # only what is on the disk can be forgotten
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        warn("this system cannot be asked to forget a file: what is read may come from memory")
    started = time.perf_counter()
    for path in paths:
        path.read_bytes()
    return time.perf_counter() - started


def main() -> None:
    """Unpack some shards into single files, read both, and store how fast each was."""
    parser = Parser(__doc__)
    parser.add_argument("--data_dir", type=Path, default=default_data_dir(), help="default: %(default)s")
    data_dir = parser.parse_args().data_dir
    shards.check(DATASET, data_dir)
    tars = [Path(path) for path in shards.shard_paths(DATASET, data_dir, "train")[:SHARDS_READ]]
    with tempfile.TemporaryDirectory(dir=data_dir) as folder:  # on the same disk as the shards
        for path in tars:
            with tarfile.open(path) as tar:
                tar.extractall(folder, filter="data")
        files = list(Path(folder).iterdir())  # one for each sample
        random.Random(0).shuffle(files)
        ways = {"shards, front to back": tars, "single files, random order": files}
        results.store(
            "sequential_reads",
            title="Shards and single files",
            columns=["read", "files", "samples/s"],
            rows=[[name, len(paths), len(files) / seconds_to_read(paths)] for name, paths in ways.items()],
            formats={"files": ",.0f", "samples/s": ",.0f"},
            spread="one run of each",
        )


if __name__ == "__main__":
    run_reporting_user_errors(main)
