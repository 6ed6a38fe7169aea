"""How a script starts and ends: with one line and exit status 2 for a user's mistake."""

import errno
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from workshop.errors import UserError, exit_2_on_sigterm, first_on_node

RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # too few files, memory or processes
RESOURCE_ERRORS = ("DataLoader worker (pid", "Too many open files", "unable to mmap", "</torch_", "ancdata")  # of torch


def run_reporting_user_errors(main: Callable[[], None]) -> None:
    """Call ``main()``; report a `UserError`, or a lack of what loader workers need, in one line with exit status 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the process that started this one
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            check_clone(Path(inspect.unwrap(main).__code__.co_filename))
            main()
        finally:
            sys.stdout.flush()  # not at exit, where it is too late to see that nobody reads any more
    except BrokenPipeError:  # as with `| head`
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(1)
    except KeyboardInterrupt:  # before there was anything to save
        sys.exit(128 + signal.SIGINT)
    except UserError as error:
        if error.already_reported:
            exit_2_on_sigterm()
            time.sleep(3)  # otherwise the launcher could end the rank that reports the mistake before it has done so
        else:
            message = str(error).rpartition("UserError: ")[2]  # one from a loader worker begins with its traceback
            print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    except (OSError, RuntimeError) as error:
        known = getattr(error, "errno", None) in RESOURCE_ERRNOS or any(text in str(error) for text in RESOURCE_ERRORS)
        if not known:
            raise
        reason = str(error).strip(" .\n").splitlines()[-1]
        advice = "take fewer --num_workers, or give the job more memory, a larger /dev/shm or a higher ulimit -n"
        print(f"error: {reason}; {advice}", file=sys.stderr)
        sys.unraisablehook = lambda _: None  # torch raises errors while it deletes a loader whose workers did not start
        sys.exit(2)


def check_clone(script: Path) -> None:
    """Raise `UserError` if ``script`` is of one clone of the repository, but imports the package of another one."""
    package = Path(__file__).parent
    for clone in script.resolve().parents[:3]:
        if (clone / "workshop/errors.py").is_file() and not package.samefile(clone / "workshop"):
            remedies = f"`make setup` in {clone} and use its .venv, or `export PYTHONPATH={clone}`"
            mistake = f"{script} got the package of another clone, {package}"
            raise UserError(f"{mistake}: {remedies}", already_reported=not first_on_node())
