"""Choose the number of repeats of a measurement from the time that it should take."""

from collections.abc import Callable


def repeats_for(seconds: float, time_of: Callable[[int], float], first: int) -> int:
    """Return how many repeats take about ``seconds``; the trials that find this number also warm up.

    Args:
        seconds: how long a measurement should take.
        time_of: repeats it this many times and returns the seconds that took. If several ranks measure together, all
            must return the same time, so that they find the same number.
        first: the repeats to begin with, and the fewest to return.
    """
    repeats = first
    while (taken := time_of(repeats)) < seconds / 3:
        repeats *= 2
    return max(first, round(repeats * seconds / taken))
