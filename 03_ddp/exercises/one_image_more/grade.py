"""With equally many batches on each rank, and with one more on rank 0, all samples are validated, and nobody waits."""

from collections.abc import Iterator

from clinic.runs import Fault, Script


def grade(script: Script) -> Iterator[str]:
    """Yield a line for each thing that is still wrong."""
    for val in (33, 35, 32):
        where = f"with {val} validation samples, two ranks and batches of 16"
        try:
            run = script.run("--batch_size", 16, ranks=2, train=64, val=val, keep=True)
        except Fault as fault:
            yield f"{where}: {fault}"
            return
        if wrong := run.wrong_validation(val):
            yield f"{where}: {wrong}"
            return
