"""What a script's training loader gives, taken where ``--benchmark true`` measures it: nothing has to be trained."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from clinic.observe import Fault, Script
from workshop.loaders import Loader
from workshop.profiling import throughput

Made = TypeVar("Made")


def read_by(
    work: Callable[[Loader], Made],
    script: Script,
    *flags: object,
    before: Callable[[], None] | None = None,
    train: int = 320,
    val: int = 64,
    data_dir: Path | None = None,
) -> Made:
    """Run the script with ``--benchmark true`` and ``flags``, and return what ``work`` makes of its training loader.

    Args:
        work: is given the loader in the script's process.
        script: the learner's.
        flags: of the script.
        before: called in the script's process before the script.
        train: see `Script.run`.
        val: see there.
        data_dir: see there.

    Raises:
        Fault: the script failed, or measured nothing.
    """

    def watch(_: Path) -> Callable[[], list[Made]]:
        made: list[Made] = []
        throughput.benchmark = lambda loader, *_, **__: made.append(work(loader))
        if before:
            before()
        return lambda: made

    run = script.run("--benchmark", "true", *flags, watch=watch, train=train, val=val, data_dir=data_dir)
    if not run[0].extra:
        raise Fault("with --benchmark true, the script no longer measures how fast its training loader is")
    return run[0].extra[0]
