"""Python imports this module when it starts, because the doctor puts this folder on PYTHONPATH of the ranks.

So the script is run by Python itself, as `__main__`, and processes that it starts (ranks of `mp.spawn`, workers of a
loader) are observed too. Observation begins as soon as torch has been imported; files are protected from the start.
"""

import functools
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType


class AfterImport:
    """A finder that finds nothing itself, but calls a function after a module has been imported."""

    def __init__(self, callbacks: dict[str, Callable[[], object]]) -> None:
        self.callbacks = callbacks

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Return what the other finders find, with a loader that calls the function afterwards."""
        callback = self.callbacks.pop(name, None)
        spec = importlib.util.find_spec(name) if callback else None
        if spec is None or spec.loader is None or callback is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_then_call(module: ModuleType) -> None:
            exec_module(module)
            callback()

        spec.loader.exec_module = exec_then_call  # type: ignore[method-assign]
        return spec


def import_package() -> None:
    """Import the package that this file is part of, even if the script's Python would find another one, or none."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "rankdoctor", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    assert spec and spec.loader
    module = sys.modules["rankdoctor"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def observe() -> None:
    """Begin to observe torch, which has just been imported."""
    importlib.import_module("rankdoctor.observe").install()


def observe_accelerate() -> None:
    """Observe accelerate too, which has just been imported."""
    importlib.import_module("rankdoctor.observe.collectives").observe_accelerate()


def answer_debugger() -> None:
    """Let pdb.set_trace() go on, as nobody could answer it; breakpoint() is left out by PYTHONBREAKPOINT."""
    sys.modules["pdb"].set_trace = lambda *_, **__: None  # type: ignore[attr-defined]


def run_preload(file: str, root: str) -> None:
    """Run the user's file of --preload, before the script; it can import what lies beside the script."""
    importlib.import_module("torch")  # and not later, when another package may be half imported
    sys.path.insert(0, root)
    try:
        with open(file) as code:
            exec(compile(code.read(), file, "exec"), {"__name__": "preload"})
    finally:
        sys.path.remove(root)


def run_other_sitecustomize() -> None:
    """Run the module of this name that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.machinery.PathFinder.find_spec(
        "sitecustomize", [p for p in sys.path if os.path.abspath(p) != here]
    )
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if not getattr(sys, "_rankdoctor_is_here", False):  # the other one may look for a module that it hides, too
    sys._rankdoctor_is_here = True  # type: ignore[attr-defined]
    run_other_sitecustomize()
    if os.environ.get("RANKDOCTOR_SETTINGS"):
        import_package()
        overlay = importlib.import_module("rankdoctor.overlay")
        overlay.install()
        callbacks: dict[str, Callable[[], object]]
        callbacks = {name: functools.partial(overlay.redirect_library, name) for name in overlay.LIBRARIES}
        callbacks |= {"torch": observe, "accelerate": observe_accelerate, "pdb": answer_debugger}
        sys.meta_path.insert(0, AfterImport(callbacks))  # type: ignore[arg-type]
        settings = importlib.import_module("rankdoctor.settings").load()
        if settings.preload:
            run_preload(settings.preload, settings.root)
