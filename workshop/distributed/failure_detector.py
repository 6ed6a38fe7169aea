"""Noticing that a rank has failed, whatever the others are waiting for, and reporting which one it was.

A collective waits for all ranks. If one of them has died, a collective over gloo fails without naming it; over NCCL it
may wait until its timeout, minutes later. torchrun and ``srun --kill-on-bad-exit`` end the others when a process exits,
but not when it is stopped, or when its node is lost. Therefore every rank counts up a heartbeat in the store of the
rendezvous. Rank 0 checks the heartbeats of all others; the others check that of rank 0, and what it has reported.

A rank's silence is measured in heartbeats of the rank that checks. So a process that was stopped for a while does not
report the others, whose heartbeats it has missed.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from workshop.distributed.rendezvous import HEARTBEAT_KEY, another_rank_reports
from workshop.errors import UserError

PERIOD = 1.0
"""seconds between two heartbeats"""
TIMEOUT = 40.0
"""seconds without a heartbeat after which a rank counts as lost"""
TIMEOUT_AFTER_FAILURE = 5.0
"""the same once a collective has failed, because that is a sign too"""
SIGNS = ("gloo", "NCCL", "Connection", "connection")
"""what the errors of failed collectives contain"""
NO_STORE = "rank 0 is lost, or its node: its store does not answer"


@contextmanager
def failure_detector(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """While this context lasts, end this process if another rank is lost, and inform the others if this one fails.

    Guarantees: a rank that died, whose process was stopped, or whose node was lost, is named in one line, and all
    processes end, within a minute; a user's mistake that several ranks find is reported once. A rank that waits in its
    main thread for ever, for example in a collective that the others do not call, still sends heartbeats: only the
    timeout of the process group ends it.

    Create the process group within the context; it is destroyed if an error leaves the context, unless that could wait
    for other ranks.

    Args:
        store: of `rendezvous`.
        rank: of this process.
        world_size: number of ranks; with one there is nothing to detect.

    Raises:
        UserError: the process group could not be created.
    """
    heartbeat = Heartbeat(store, rank, world_size) if world_size > 1 else None
    try:
        try:
            yield
        except RuntimeError as error:
            if dist.is_initialized():
                raise
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"rank {rank} of {world_size} joined, but cannot reach the others: {reason}") from None
    except BaseException as error:
        stopped = isinstance(error, SystemExit) and not error.code  # all ranks together, after a signal
        if heartbeat:
            if isinstance(error, UserError):
                heartbeat.stop()
                error.already_reported = another_rank_reports(str(error), world_size, store)
            elif stopped:
                heartbeat.close()
            else:
                if any(sign in str(error) for sign in SIGNS):
                    heartbeat.exit_if_rank_lost()
                heartbeat.report_failure(error)
        if dist.is_initialized():
            if stopped or dist.get_backend() != "nccl":  # over NCCL it could wait for ranks that wait for this one
                dist.destroy_process_group()
            elif isinstance(error, UserError):  # one line is enough: at exit, torch would warn about the process group
                atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)
        raise
    if heartbeat:
        heartbeat.close()


class Heartbeat:
    """Two threads that show the other ranks that this one is alive, and end the process when one of them is lost."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.timeout = TIMEOUT
        self._store = store.clone()  # a connection of its own: an operation waits for the one before
        self._beats = self._unanswered = 0
        self._last_seen = {other: (b"", 0) for other in (range(1, world_size) if rank == 0 else [0])}
        self._pause = ""
        self._resumed_at = 0
        self._ended, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch_ranks, daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, daemon=True).start()

    def stop(self) -> None:
        """Stop sending and checking heartbeats; the store is still watched, because it may still be used."""
        self._ended.set()
        self._thread.join()

    def close(self) -> None:
        """Stop because training has ended. Rank 0 hosts the store, so it waits up to 10 s for the others to close."""
        self.stop()
        with suppress(RuntimeError):  # the store may be gone already
            self._store.add("closed ranks", 1)
            end = time.monotonic() + 10
            while self.rank == 0 and self._store.add("closed ranks", 0) < self.world_size and time.monotonic() < end:
                time.sleep(0.02)
                self._unanswered = 0
        self._closed.set()

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this one ends because of ``error``."""
        self.stop()
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        with suppress(RuntimeError):
            self._store.set("lost", f"rank {self.rank} on {os.uname().nodename} failed: {reason}")
            self._wait_if_host()
        self._closed.set()

    def exit_if_rank_lost(self) -> None:
        """After a failed collective, end the process if a rank is lost; return if all are there."""
        with suppress(RuntimeError):  # then the other threads find the same
            self._store.set("a collective failed", "")
        time.sleep(TIMEOUT_AFTER_FAILURE + 5 * PERIOD)

    def _watch_ranks(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(PERIOD):
            if (seconds := time.monotonic() - began) > TIMEOUT_AFTER_FAILURE:
                self._pause = f"rank {self.rank} on {os.uname().nodename} itself was stopped for {seconds:.0f} s"
                self._resumed_at = self._beats
            self._beats += 1
            try:
                self._store.set(HEARTBEAT_KEY.format(self.rank), str(self._beats))
                lost = self._lost_rank()
                self._unanswered = 0
            except RuntimeError:
                lost = self._unless_paused(NO_STORE)
            if lost:
                self._end_process(lost)
            began = time.monotonic()

    def _watch_store(self) -> None:
        """End the process when the store has not answered for too long: operations on it wait without a timeout."""
        while not self._closed.wait(PERIOD):
            self._unanswered += 1
            if self._unanswered * PERIOD > self.timeout:
                print(f"error: {NO_STORE}; this ends all ranks", file=sys.stderr, flush=True)
                os._exit(1)

    def _end_process(self, lost: str) -> None:
        """End this process with status 1, whatever its main thread waits for; one of the ranks prints why."""
        first = True
        with suppress(RuntimeError):
            first = self._store.add(f"reported: {lost}", 1) == 1
        if first:
            print(f"error: {lost}; this ends all ranks", file=sys.stderr, flush=True)
        self._wait_if_host()
        os._exit(1)

    def _wait_if_host(self) -> None:
        if self.rank == 0:
            time.sleep(2 * PERIOD)  # the store ends with rank 0: leave the others time to read it

    def _unless_paused(self, lost: str) -> str:
        """Return ``lost``; but if this process was stopped until just now, that: the others count it as lost."""
        return self._pause if self._pause and self._beats - self._resumed_at < 15 else lost

    def _lost_rank(self) -> str:
        """Return which rank is lost and why; "" if none is."""
        if self._store.check(["lost"]):
            return self._store.get("lost").decode()
        if self._store.check(["a collective failed"]):
            self.timeout = TIMEOUT_AFTER_FAILURE
        keys = [HEARTBEAT_KEY.format(other) for other in self._last_seen]
        for other, beat in zip(self._last_seen, self._store.multi_get(keys), strict=True):
            before, since = self._last_seen[other]
            if beat != before:
                self._last_seen[other] = (beat, self._beats)
            elif (self._beats - since) * PERIOD > self.timeout:
                lost = self._unless_paused(f"rank {other} is lost: no heartbeat for {self.timeout:.0f} s")
                self._store.set("lost", lost)
                return lost
        return ""
