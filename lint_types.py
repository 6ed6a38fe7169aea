"""Check the types of the packages, and of each train script with the modules beside it. Run by `make lint`.

The scripts of all lessons have the same module name, so each of them is checked in a run of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent


def main() -> None:
    """Run mypy; exit with status 1 if it finds an error anywhere."""
    failed = False
    packages = [word for name in ("workshop", "lab", "clinic", "nullgpu") for word in ("-p", name)]
    checks = [(REPOSITORY, packages), (REPOSITORY, ["exercise.py"])]
    checks += [(script.parent, [str(script)]) for script in sorted(REPOSITORY.glob("0*/train.py"))]
    for folder, what in checks:
        path = os.pathsep.join(dict.fromkeys([str(folder), str(REPOSITORY)]))
        command = [sys.executable, "-m", "mypy", *what]
        failed |= subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"MYPYPATH": path}).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
