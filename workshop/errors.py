"""How a user's mistake is told: one line saying what is wrong, where, and what to do; exit status 2."""

import difflib
import errno
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

WANT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # of open files, memory or processes
SIGNS_OF_WANT = ("DataLoader worker (pid", "Too many open files", "unable to mmap", "</torch_", "ancdata")  # of torch


class UserError(ValueError):
    """A mistake the user can mend; its message is the one line they are shown."""

    def __init__(self, message: str, *, told: bool = False) -> None:
        super().__init__(message)
        self.told = told  # by another rank, which has met the same mistake


def run_reporting_user_errors(main: Callable[[], None]) -> None:
    """Call ``main()``; turn a `UserError`, and want of what loader workers need, into one line and exit status 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            refuse_another_clones_package(Path(inspect.unwrap(main).__code__.co_filename))
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
        if error.told:
            leave_with_status_2_when_told_to_end()
            time.sleep(3)  # else the launcher, seeing this rank gone, could end the one that tells before it does
        else:
            message = str(error).rpartition("UserError: ")[2]  # one from a loader worker begins with its traceback
            print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    except (OSError, RuntimeError) as error:
        if getattr(error, "errno", None) not in WANT and not any(sign in str(error) for sign in SIGNS_OF_WANT):
            raise
        reason = str(error).strip(" .\n").splitlines()[-1]
        advice = "take fewer --num_workers, or give the job more memory, a larger /dev/shm or a higher ulimit -n"
        print(f"error: {reason}; {advice}", file=sys.stderr)
        sys.unraisablehook = lambda _: None  # torch trips over what is left of a loader whose workers could not start
        sys.exit(2)


def refuse_another_clones_package(script: Path) -> None:
    """Raise a `UserError` if ``script`` is of a clone with a package of its own, but runs with that of another one."""
    package = Path(__file__).parent
    for clone in script.resolve().parents[:3]:
        if (clone / "workshop/errors.py").is_file() and not package.samefile(clone / "workshop"):
            remedies = f"`make setup` in {clone} and use its .venv, or `export PYTHONPATH={clone}`"
            mistake = f"{script} got the package of another clone, {package}"
            raise UserError(f"{mistake}: {remedies}", told=not first_on_node())


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
