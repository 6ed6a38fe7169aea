"""How often to repeat something so that it takes about as long as one wants to measure."""

from collections.abc import Callable


def repeats_for(seconds: float, time_of: Callable[[int], float], first: int) -> int:
    """Return how many repeats take about ``seconds``; the trials on the way there also warm up.

    Args:
        seconds: how long a measurement is to take.
        time_of: does it so many times and returns the seconds it took. Ranks that measure together must all return the
            same, so that all of them find the same number.
        first: the repeats to begin with, and the fewest to return.
    """
    repeats = first
    while (taken := time_of(repeats)) < seconds / 3:
        repeats *= 2
    return max(first, round(repeats * seconds / taken))
