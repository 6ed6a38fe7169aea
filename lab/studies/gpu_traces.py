"""List the operations of traces that `gpu_trainings.py --traces TRACES` has stored: sizes, strides, microseconds.

    python lab/studies/gpu_traces.py TRACES --folder results/nvidia_h200_1gpu

It writes operations_in_trainings.json, and adds the milliseconds of all kernels to the rows of trainings.json.
"""

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lab.flags import Parser  # noqa: E402
from workshop.errors import UserError, run_reporting_user_errors  # noqa: E402
from workshop.jsonfile import read_json, write_json  # noqa: E402

SHORTEST = 0.01
"""share of the kernels' time that an operation takes at least to be listed"""
FROM_THE_HOST = "HtoD"
"""copies that begin a training are not part of its updates"""
COMMAND = "python lab/studies/gpu_traces.py TRACES --folder DIR"
COLUMNS = ["training", "operation", "sizes", "types", "strides", "per update", "microseconds"]


def on_gpu(event: dict[str, Any]) -> bool:
    """Return whether an event is work of the GPU in an update."""
    category = event.get("cat")
    return category in ("kernel", "gpu_memset") or (category == "gpu_memcpy" and FROM_THE_HOST not in event["name"])


def read(file: Path, updates: int) -> tuple[float, list[list[Any]]]:
    """Return the milliseconds of an update's kernels, and rows of its longest operations without the training."""
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    operations = {event["args"].get("External id"): event for event in events if event.get("cat") == "cpu_op"}
    times: defaultdict[int, float] = defaultdict(float)
    total = 0.0
    for event in events:
        if on_gpu(event):
            total += event["dur"]
            if event["args"].get("External id") in operations:
                times[event["args"]["External id"]] += event["dur"]
    found: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for number, microseconds in times.items():
        args = operations[number]["args"]
        words = [json.dumps(args.get(key, [])) for key in ("Input Dims", "Input type", "Input Strides")]
        found[operations[number]["name"].removeprefix("aten::"), *words].append(microseconds)
    rows = [
        [name, *map(json.loads, words), len(each) / updates, round(median(each), 1)]
        for (name, *words), each in sorted(found.items(), key=lambda item: -sum(item[1]))
        if sum(each) > SHORTEST * total
    ]
    return total / 1e3 / updates, rows


def main() -> None:
    """Write both files."""
    parser = Parser(__doc__)
    parser.add_argument("traces", type=Path, help="folder with the traces")
    parser.add_argument("--folder", type=Path, required=True, help="folder with trainings.json")
    arguments = parser.parse_args()
    trainings = arguments.folder / "trainings.json"
    if not trainings.is_file():
        raise UserError(f"no file {trainings}: lab/studies/gpu_trainings.py writes it")
    table = read_json(trainings)
    listed: list[list[Any]] = []
    for row in table["rows"]:
        file = arguments.traces / f"{row['name'].replace(' ', '_')}.json.gz"
        if file.is_file():
            row["kernels_ms"], rows = read(file, row["profiled_updates"])
            listed += [[row["name"], *cells] for cells in rows]
    write_json(trainings, table)
    about = {key: table[key] for key in ("machine", "versions", "date", "commit")}
    head = {"title": f"Operations in trainings on the {table['gpu']}", "columns": COLUMNS, "formats": {}, **about}
    head |= {"unit": "microseconds", "spread": "median of an operation of these sizes", "command": COMMAND}
    lines = ",\n".join(json.dumps(row) for row in listed)
    (arguments.folder / "operations_in_trainings.json").write_text(
        f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'
    )
    print(f"{len(listed)} operations")


if __name__ == "__main__":
    run_reporting_user_errors(main)
