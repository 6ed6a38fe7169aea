"""Python imports this module when it starts, because `nullgpu.environment` puts this folder on PYTHONPATH.

As soon as torch has been imported, `nullgpu.start` prepares the process.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class AfterTorch:
    """A finder that finds nothing itself, but lets `nullgpu.start` run after torch has been imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Return what the other finders find, with a loader that calls a function afterwards."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_then_start(module: ModuleType) -> None:
            exec_module(module)
            start()

        spec.loader.exec_module = exec_then_start  # type: ignore[method-assign]
        return spec


def start() -> None:
    """Import this package, also into a Python in which it is not installed, and prepare the process."""
    if "nullgpu" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "nullgpu", f"{FOLDER}/__init__.py", submodule_search_locations=[FOLDER]
        )
        assert spec and spec.loader
        module = sys.modules["nullgpu"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    importlib.import_module("nullgpu.start").start()


def run_other_sitecustomize() -> None:
    """Run the module of this name that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if not getattr(sys, "_nullgpu_is_here", False):  # the other one may look for a module that it hides, too
    sys._nullgpu_is_here = True  # type: ignore[attr-defined]
    run_other_sitecustomize()
    if os.environ.get("NULLGPU_LIBRARY") and "torch" not in sys.modules:
        sys.meta_path.insert(0, AfterTorch())  # type: ignore[arg-type]
