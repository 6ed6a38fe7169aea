"""How much a trace of the user's own run is worth to the null GPU's clock: trainings on a real GPU.

    python lab/studies/gpu_trainings.py --folder DIR --traces TRACES                        # on the GPU
    python lab/studies/gpu_traces.py TRACES --folder DIR                                    # the time of the kernels
    python lab/studies/clock_blind.py predict h200 curves.json                              # here, without a GPU
    python lab/studies/clock_calibrate.py DIR/trainings.json TRACES curves.json             # here: a quarter of an hour

Each training is simulated with its trace of four updates, and the time of its kernels is compared with that of the real
GPU, as clock_blind.py does for the curves alone.
"""

import json
import subprocess
import sys
import tempfile
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "lab/studies")]

from clock_blind import NAMES, command_of  # noqa: E402

from lab import results  # noqa: E402
from lab.flags import Parser  # noqa: E402
from lab.simulated import null_gpu  # noqa: E402
from workshop.errors import UserError, run_reporting_user_errors  # noqa: E402
from workshop.jsonfile import read_json  # noqa: E402

COLUMNS = ["training", "its kernels", "by curves", "with the trace", "from the trace"]


def simulated(title: str, gpu: str, trace: Path) -> dict[str, Any]:
    """Return the clock's figures of a training whose operations are looked up in a trace."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        command = null_gpu("--clock", gpu, "--calibrate", trace, "--json", figures)
        done = subprocess.run([*command, *command_of(title)], cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode or not figures.exists():
            raise UserError(f"{title}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        return json.loads(figures.read_text())["clock"]["ranks"][0]


def wrong(ratios: list[float]) -> list[float]:
    """Return by what factor they are wrong, in the median and at most."""
    errors = [abs(log(ratio)) for ratio in ratios]
    return [exp(median(errors)), exp(max(errors))]


def main() -> None:
    """Simulate each training with its trace, and store the table."""
    parser = Parser(__doc__)
    parser.add_argument("trainings", type=Path, help="trainings.json of a real GPU, with the time of the kernels")
    parser.add_argument("traces", type=Path, help="folder with the traces")
    parser.add_argument("curves", type=Path, help="what clock_blind.py has predicted without them")
    parser.add_argument("--gpu", default="h200", help="the simulated GPU")
    parser.add_argument("--only", default="", metavar="WORD", help="the trainings with this word; stores no table")
    arguments = parser.parse_args()
    if not arguments.trainings.is_file():
        raise UserError(f"no file {arguments.trainings}: lab/studies/gpu_trainings.py writes it, on a GPU")
    real, curves = read_json(arguments.trainings), read_json(arguments.curves)
    rows: list[list[results.Cell]] = []
    ratios: list[tuple[float, float]] = []
    for row in real["rows"]:
        title = row["name"]
        trace = arguments.traces / f"{title.replace(' ', '_')}.json.gz"
        if "kernels_ms" not in row or "ms" not in curves.get(title, {}) or arguments.only not in title:
            continue
        if not trace.is_file():
            raise UserError(f"no trace {trace}: lab/studies/gpu_trainings.py --traces writes it, on a GPU")
        figures, plain = simulated(title, arguments.gpu, trace), curves[title]
        by_curves = plain["ms"] * plain["busy"] / row["kernels_ms"]
        with_trace = 1e3 * figures["seconds"] * figures["busy"] / row["kernels_ms"]
        ratios.append((by_curves, with_trace))
        rows.append([NAMES[title], row["kernels_ms"], by_curves, with_trace, figures["known_by"].get("trace", 0.0)])
        print(*rows[-1], sep=" | ", flush=True)
    errors = [wrong(list(column)) for column in zip(*ratios, strict=True)]
    rows += [
        [f"wrong by, {word}", None, *(each[at] for each in errors), None]
        for at, word in enumerate(("median", "at most"))
    ]
    results.store(
        "clock_calibrate",
        title=f"The kernels' time of trainings on the {real['gpu']}, simulated with a trace of four updates",
        columns=COLUMNS,
        rows=rows,
        formats={"its kernels": ",.1f", "by curves": ".2f", "with the trace": ".2f", "from the trace": ".0%"},
        unit="ms per update; by curves and with the trace: simulated divided by measured",
        spread="from the trace: share of the simulated time of the kernels that was looked up in it",
        command="python lab/studies/clock_calibrate.py trainings.json TRACES curves.json",
        finished=not arguments.only,
    )


if __name__ == "__main__":
    run_reporting_user_errors(main)
