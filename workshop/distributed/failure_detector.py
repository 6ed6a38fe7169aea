"""Noticing that a rank has died, whatever the others are waiting for, and saying which one it was.

A collective waits for all ranks: over gloo a dead one makes it fail without a name, over NCCL it may wait for minutes.
So every rank counts up a heartbeat in the store through which the ranks met. Rank 0 looks whether all of them go on,
the others look at that of rank 0 and at what it found. Silence is counted in beats of one's own: a process that was
stopped does not take what it missed for the silence of others.
"""

import os
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

PERIOD = 1.0
"""seconds between two heartbeats"""
SILENCE = 40.0
"""seconds without one after which a rank is taken for dead"""
SILENCE_AFTER_FAILURE = 5.0
"""the same once a collective has failed, which is evidence of its own"""
NO_STORE = "rank 0 is gone, or its node: the store that it keeps does not answer"


def key_of(rank: int) -> str:
    """Return the key under which ``rank`` counts its heartbeats; it must be set before all have met."""
    return f"heartbeat of rank {rank}"


class Heartbeats:
    """A thread that shows the other ranks that this one lives, and ends the process when one of them no longer does."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.silence = SILENCE
        self._store = store.clone()  # on one connection, an operation waits for the one before
        self._beats = self._unanswered = 0
        self._heard = {other: ("", 0) for other in (range(1, world_size) if rank == 0 else [0])}
        self._stopped = ""
        self._ended, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_the_store, daemon=True).start()

    def stop(self) -> None:
        """End the watch, except that of the store, which may still be asked; to the others this rank falls silent."""
        self._ended.set()
        self._thread.join()

    def close(self) -> None:
        """End the watch because training has ended; rank 0, with whom the store goes, waits for the others a little."""
        self.stop()
        with suppress(RuntimeError):  # the store may be gone already
            self._store.add("ranks that left", 1)
            end = time.monotonic() + 10
            while self.rank == 0 and self._store.add("ranks that left", 0) < self.world_size and time.monotonic() < end:
                time.sleep(0.02)
                self._unanswered = 0
        self._left.set()

    def blame(self, error: BaseException) -> None:
        """Let the others know that this rank ends because of ``error``."""
        self.stop()
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        with suppress(RuntimeError):
            self._store.set("gone", f"rank {self.rank} on {os.uname().nodename} failed: {reason}")
            if self.rank == 0:
                time.sleep(2 * PERIOD)  # the store goes with rank 0: leave the others time to look
        self._left.set()

    def find_the_dead(self) -> None:
        """After a collective has failed, end the process if a rank is gone; if all are there, return."""
        with suppress(RuntimeError):  # the watch will find the same
            self._store.set("a collective failed", "")
        time.sleep(SILENCE_AFTER_FAILURE + 5 * PERIOD)

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(PERIOD):
            if (seconds := time.monotonic() - began) > SILENCE_AFTER_FAILURE:
                self._stopped = f"rank {self.rank} on {os.uname().nodename} itself was stopped for {seconds:.0f} s"
                self._woken = self._beats
            self._beats += 1
            try:
                self._store.set(key_of(self.rank), str(self._beats))
                gone = self._look()
                self._unanswered = 0
            except RuntimeError:
                gone = self._unless_stopped(NO_STORE)
            if gone:
                self._end_process(gone)
            began = time.monotonic()

    def _watch_the_store(self) -> None:
        """End the process when the store, of which each question waits for good, has not answered for too long."""
        while not self._left.wait(PERIOD):
            self._unanswered += 1
            if self._unanswered * PERIOD > self.silence:
                print(f"error: {NO_STORE}; this ends all ranks", file=sys.stderr, flush=True)
                os._exit(1)

    def _end_process(self, gone: str) -> None:
        """End this process with status 1, whatever its main thread waits for; one of the ranks says why."""
        first = True
        with suppress(RuntimeError):
            first = self._store.add(f"told: {gone}", 1) == 1
        if first:
            print(f"error: {gone}; this ends all ranks", file=sys.stderr, flush=True)
        if self.rank == 0:
            time.sleep(2 * PERIOD)  # the store goes with rank 0: leave the others time to look
        os._exit(1)

    def _unless_stopped(self, gone: str) -> str:
        """Return ``gone``; but if this process has just woken, that: the others have given it up."""
        return self._stopped if self._stopped and self._beats - self._woken < 15 else gone

    def _look(self) -> str:
        if self._store.check(["gone"]):
            return self._store.get("gone").decode()
        if self._store.check(["a collective failed"]):
            self.silence = SILENCE_AFTER_FAILURE
        for other, beat in zip(self._heard, self._store.multi_get([key_of(r) for r in self._heard]), strict=True):
            before, since = self._heard[other]
            if beat != before:
                self._heard[other] = (beat, self._beats)
            elif (self._beats - since) * PERIOD > self.silence:
                gone = self._unless_stopped(f"rank {other} is gone: no sign of life for {self.silence:.0f} s")
                self._store.set("gone", gone)
                return gone
        return ""
