"""Check the types of everything but the tests and the exercises. Run by `make lint`, without PyTorch.

All lessons have a module called train, so mypy runs once for each lesson, with train.py and the experiments. All runs
share mypy's cache, so the packages are read once.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("workshop", "lab", "clinic")
SCRIPTS = ("data", "slurm")
"""folders of scripts that import each other without the name of the folder"""
TOOLS = ("tools/nullgpu/src", "tools/rankdoctor/src")
"""folders with a package of its own"""


def main() -> None:
    """Run mypy; exit with status 1 if it finds an error anywhere."""
    checks: list[tuple[tuple[str, ...], list[str]]] = [((*SCRIPTS, *TOOLS), [*PACKAGES, *SCRIPTS, "exercise.py"])]
    checks += [(TOOLS, [tool]) for tool in TOOLS]
    for script in sorted(REPOSITORY.glob("0*/train.py")):
        experiments = script.parent / "experiments"
        files = [script, *sorted(experiments.glob("*.py"))]
        checks.append(((str(experiments), str(script.parent), *TOOLS), [str(file) for file in files]))
    own = REPOSITORY / "05_fully_sharded/own_tokens"
    checks.append(((str(own),), [str(file) for file in sorted(own.glob("*.py"))]))
    failed = False
    for folders, what in checks:
        path = os.pathsep.join(str(REPOSITORY / folder) for folder in (*folders, ""))
        command = [sys.executable, "-m", "mypy", *what]
        failed |= subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"MYPYPATH": path}).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
