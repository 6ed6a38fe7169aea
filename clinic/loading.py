"""What a script's training loader gives, taken where ``--benchmark true`` measures it: nothing has to be trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from clinic.observe import Fault, Observed, Script
from workshop.loaders import Loader
from workshop.profiling import throughput


def read_by(
    work: Callable[[Loader], Any], script: Script, *flags: object, before: Callable[[], None] | None = None, **how: Any
) -> Any:
    """Run the script with ``--benchmark true`` and ``flags``, and return what ``work`` makes of its training loader.

    Args:
        work: is given the loader in the script's process.
        script: the learner's.
        flags: of the script.
        before: called in the script's process before the script.
        how: the other arguments of `Script.run`.

    Raises:
        Fault: the script failed, or measured nothing.
    """

    def watch(_: Path) -> Callable[[], Any]:
        made: list[Any] = []
        throughput.benchmark = lambda loader, *_, **__: made.append(work(loader))
        if before:
            before()
        return lambda: made

    run: Observed = script.run("--benchmark", "true", *flags, watch=watch, **how)
    if not run[0].extra:
        raise Fault("with --benchmark true, the script no longer measures how fast its training loader is")
    return run[0].extra[0]
