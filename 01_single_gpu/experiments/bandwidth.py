"""How fast do data move on this machine, and how long would a petabyte take?

    python experiments/bandwidth.py                        # the disk that holds the data sets, memory, accelerator
    python experiments/bandwidth.py --folder $TMPDIR       # another disk

You should see each way that data take to the place where they are computed with, and that they differ by orders of
magnitude: training can be no faster than the slowest of them allows. GB are 1e9 bytes, a PB is 1e15; which bytes are
counted is said for each row. Disk figures are cold: this machine's copy of the file in memory is dropped first (what
lies further down, a controller or a file server, may still have one).
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from bandwidth_trials import Bandwidth, MiB, check_folder, measure_device, measure_disk, measure_memory
from lab.flags import Parser, make_output_folder
from lab.results import write_results
from lab.tables import format_table
from workshop.entry import run_reporting_user_errors
from workshop.hardware import pick_device
from workshop.paths import default_data_dir


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: it makes no sense.
    """
    parser = Parser(__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=default_data_dir(),
        metavar="DIR",
        help="a folder on the disk to measure (default: that of the data sets, %(default)s)",
    )
    parser.add_switch("--quick", "a quarter of the bytes")
    parser.add_out("bandwidth.json")
    return parser.parse_args()


def main() -> None:
    """Measure every path, print the table and write the results."""
    arguments = parse_arguments()
    size = 256 * MiB if arguments.quick else 1024 * MiB
    disk_seconds, copy_seconds = (1.5, 0.3) if arguments.quick else (5.0, 1.0)
    check_folder(arguments.folder, needed=size)
    make_output_folder(arguments.out)
    device = pick_device()

    rows = [
        *measure_disk(arguments.folder, size, disk_seconds),
        *measure_memory(size, copy_seconds),
        *measure_device(device, size, copy_seconds),
    ]
    header = ("from, to", "GB/s", "hours per PB", "bytes counted", "note")
    print(format_table(header, [cells(row) for row in rows], left=(0, 3, 4)))

    figures = {
        "rows": [
            asdict(row) | {"gb_per_second": row.gb_per_second, "hours_per_petabyte": row.hours_per_petabyte}
            for row in rows
        ],
    }
    file = arguments.out / "bandwidth.json"
    write_results(file, device, figures)
    print(f"\nwritten: {file}")


def cells(row: Bandwidth) -> tuple[str, ...]:
    """Return a row of the table as text."""
    if row.gb_per_second is None:
        return row.path, "-", "-", "-", row.note
    return row.path, f"{row.gb_per_second:.3f}", f"{row.hours_per_petabyte:,.1f}", row.counted, row.note


if __name__ == "__main__":
    run_reporting_user_errors(main)
