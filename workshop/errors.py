"""How a user's mistake is told: one line saying what is wrong, where, and what to do; exit status 2."""

import sys
from collections.abc import Callable


class UserError(ValueError):
    """A mistake the user can mend; its message is the one line they are shown."""

    told = False
    """whether another rank, which has met the same mistake, shows it"""


def run_reporting_user_errors(main: Callable[[], None]) -> None:
    """Call ``main()``; turn a `UserError` into one line on stderr and exit status 2."""
    try:
        main()
    except UserError as error:
        if not error.told:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def warn(message: str) -> None:
    """Tell the user, in one line on stderr, of something that works but will disappoint."""
    print(f"warning: {message}", file=sys.stderr)
