"""A user's mistake: one line that says what is wrong, where, and what to do, and exit status 2."""

import difflib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

from workshop.explain import explain, follows_from_another_rank


class UserError(ValueError):
    """A mistake that the user can fix; its message is the one line that is shown."""


def warn(message: str) -> None:
    """Print one line on stderr about something that works, but not as the user expects."""
    print(f"warning: {whose()}{message}", file=sys.stderr)


def launched_rank() -> str:
    """Return the rank of this process according to torchrun or srun; "0" without them."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"


def whose() -> str:
    """Return the beginning of a line of another rank than rank 0, such as "rank 3: "."""
    return "" if launched_rank() == "0" else f"rank {launched_rank()}: "


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the known name most like ``name``, or all known names when none is alike."""
    known = sorted(known)
    alike = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {alike[0]}?" if alike else f"known are: {', '.join(known)}"


def first_on_node() -> bool:
    """Whether this process is the first of those on its node, according to torchrun or srun."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


def several_ranks() -> bool:
    """Whether torchrun or srun has started more processes than this one."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or "1") > 1


def run_reporting_user_errors(main: Callable[[], None]) -> None:
    """Call ``main()``; report a mistake of the user in one line, with exit status 2.

    All ranks of a job often find the same mistake. So the first rank of each node prints at once, and the others wait.
    Meanwhile the launcher sees that a rank has failed, and ends them. If it does not, only they have found the mistake,
    and they print it.
    """
    try:
        main()
    except BrokenPipeError:  # the reader of a pipe has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit:
        raise
    except BaseException as error:  # torch.distributed.checkpoint raises one that is no Exception
        # A mistake that a loader's worker has found arrives with the worker's traceback before it.
        reason = str(error).rpartition("UserError: ")[2] if isinstance(error, UserError) else explain(error)
        if follows_from_another_rank(error):
            wait_for_launcher(seconds=10)
        if reason is None:
            raise
        if not first_on_node():
            wait_for_launcher(seconds=3)
        print(f"error: {whose()}{' '.join(reason.split())}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if several_ranks():  # without Python's clean-up, in which torch could wait for ranks that are gone
            os._exit(2)
        sys.exit(2)


def wait_for_launcher(seconds: float) -> None:
    """Wait for torchrun or srun to end this process, with status 2; return after ``seconds`` if it does not."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
    time.sleep(seconds)
