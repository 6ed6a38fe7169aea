"""How often did each part of the traced steps run, and for how long? Counted in the trace of ``--trace true``.

    python experiments/trace_counts.py ../runs/my_run/rank0.pt.trace.json.gz

You should see one line for each part of a step. The line ``all-reduces`` counts those of gradients only, which start
during backward. The ranks also reduce other values, such as the sum of the losses. With a GPU, the times are the GPU's;
``forward launches`` and similar lines are the time that the CPU needed to launch this work.
"""

import zlib
from pathlib import Path

from lab.flags import Parser
from lab.tables import format_table
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError
from workshop.profiling.timeline import read_rows


def main() -> None:
    """Count and print.

    Raises:
        UserError: the file cannot be read, or is not a trace of train.py.
    """
    parser = Parser(__doc__)
    parser.add_argument("file", type=Path, help="a trace, of any lesson")
    file = parser.parse_args().file
    try:
        rows = read_rows(file)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"it is not a whole trace ({error})"
        raise UserError(f"cannot read {file}: {reason}; python train.py --trace true writes one") from None
    if not rows:
        raise UserError(f"{file} has no step of train.py: python train.py --trace true writes a trace that has some")
    cells = []
    for row, lanes in rows.items():
        lengths = [length for spans in lanes for _, length in spans]
        cells.append((row, str(len(lengths)), f"{sum(lengths) / len(lengths):.2f}"))
    print(format_table(["", "times", "mean ms"], cells))


if __name__ == "__main__":
    run_reporting_user_errors(main)
