"""A user's mistake: one line that says what is wrong, where, and what to do; and warnings."""

import difflib
import os
import signal
import sys
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can fix; its message is the one line that is shown."""

    def __init__(self, message: str, *, already_reported: bool = False) -> None:
        super().__init__(message)
        self.already_reported = already_reported  # by another rank, which has found the same mistake


def exit_2_on_sigterm() -> None:
    """Make SIGTERM end this process with status 2, not 143: srun sends it to the ranks that are still exiting."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(2))


def warn(message: str) -> None:
    """Print one line on stderr about something that works, but not as the user expects."""
    print(f"warning: {message}", file=sys.stderr)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the known name most like ``name``, or all known names when none is alike."""
    known = sorted(known)
    alike = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {alike[0]}?" if alike else f"known are: {', '.join(known)}"


def first_on_node() -> bool:
    """Whether this process is the first of those on its node, according to torchrun or srun."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"
