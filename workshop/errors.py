"""How a user's mistake is told: one line saying what is wrong, where, and what to do; exit status 2."""

import difflib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """A mistake the user can mend; its message is the one line they are shown."""

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told  # by another rank, which has met the same mistake


def run_reporting_user_errors(main: Callable[[], None]) -> None:
    """Call ``main()``; turn a `UserError` into one line on stderr and exit status 2."""
    try:
        main()
    except UserError as error:
        if error.told:
            leave_with_status_2_when_told_to_end()
            time.sleep(3)  # else the launcher, seeing this rank gone, could end the one that tells before it does
        else:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def leave_with_status_2_when_told_to_end() -> None:
    """Make SIGTERM end this process with status 2: of ranks with the same mistake, srun ends those that leave last."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(2))


def warn(message: str) -> None:
    """Tell the user, in one line on stderr, of something that works but will disappoint."""
    print(f"warning: {message}", file=sys.stderr)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the known name most like ``name``, or all known names when none is alike."""
    known = sorted(known)
    alike = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {alike[0]}?" if alike else f"known are: {', '.join(known)}"


def first_on_node() -> bool:
    """Whether this process is the first of those on its node, as far as torchrun or srun tell."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"
