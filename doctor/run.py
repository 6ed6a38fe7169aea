"""``python PATH/doctor/run.py SCRIPT ARGS...``: the same as ``python -m doctor``, from any folder."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # instead of this folder
    from doctor.cli import main

    sys.exit(main())
