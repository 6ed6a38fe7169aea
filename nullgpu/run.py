"""``python PATH/nullgpu/run.py COMMAND...``: the same as ``python -m nullgpu``, from any folder."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # instead of this folder
    from nullgpu.command import main

    sys.exit(main())
