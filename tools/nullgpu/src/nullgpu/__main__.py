"""``python -m nullgpu COMMAND...``: the same as ``nullgpu COMMAND...``."""

import sys

from nullgpu.command import main

if __name__ == "__main__":
    sys.exit(main())
