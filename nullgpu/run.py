"""The former place of tools/nullgpu, kept until version 0.2: says in one line what to type now."""

import sys

sys.exit(
    sys.stderr.write("error: type nullgpu COMMAND... in place of this file; make setup installs it into .venv\n") and 2
)
