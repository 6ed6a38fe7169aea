"""Score runs by their summary.json: the lowest validation loss they reached, or how soon they reached a baseline's.

    python experiments/score.py ../runs/mine                                  # lowest validation loss
    python experiments/score.py ../runs/mine --baseline ../runs/baseline      # and how it compares with another run
    python experiments/score.py /class/*/contest --baseline ../runs/baseline  # a class: who is there first
    python experiments/score.py /class/*/contest --epochs 5                   # who gets lowest within five epochs

A run is named by its folder, or by the summary.json in it. Seconds are those of training, summed over all epochs up to
the one after which the loss was reached. You should see one line for each run and, with a baseline, a conclusion; of
several runs a table, the best first. Runs of other work, or validated on other samples, are listed under it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.flags import Parser, require_positive
from lab.tables import format_table
from workshop.entry import run_reporting_user_errors
from workshop.errors import UserError

OF_VOLUMES = ("crop_size", "val_crops", "unet_width", "unet_depth")
"""the flags that decide on which cubes a run is validated, and which U-Net it trains"""


@dataclass(frozen=True)
class Score:
    """What a run reached: its lowest validation loss, and training seconds and loss after each epoch."""

    name: str
    work: str
    """data set, model, and what else must be the same in runs that are compared"""
    seconds: list[float]
    losses: list[float]
    about: tuple[str, str, str]
    """how it was run: the number of ranks, the precision, the hardware"""

    @property
    def best(self) -> float:
        """The lowest validation loss; one that is not a number does not count."""
        return min(loss for loss in self.losses if not math.isnan(loss))

    def seconds_to(self, loss: float) -> float | None:
        """Return the training seconds until the validation loss was first at most ``loss``; None if it never was."""
        return next((t for t, found in zip(self.seconds, self.losses, strict=True) if found <= loss), None)

    def __str__(self) -> str:
        reached = self.seconds_to(self.best)
        return f"{self.name}: lowest validation loss {self.best:.4f} after {reached:.1f} s of training ({self.work})"


def read_score(path: Path, epochs: int | None = None) -> Score:
    """Read what a run left in its folder; of many ``epochs`` only the first ones count.

    Raises:
        UserError: it left no summary, or none of a run that finished an epoch.
    """
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        counted, config, hardware = summary["epochs"][:epochs], summary["config"], summary.get("hardware", {})
        seconds = [sum(epoch["seconds"] for epoch in counted[: i + 1]) for i in range(len(counted))]
        losses = [float(epoch["val_loss"]) for epoch in counted]
        decisive = ("limit_val", *(OF_VOLUMES if config["dataset"] == "nbody" else ()))
        same = [f"{name} {config[name]}" for name in decisive if config.get(name) is not None]
        work = ", ".join([f"{config['model']} on {config['dataset']}", *same])
        where = str(hardware.get("device_name") or f"{hardware.get('cpus_available', '?')} CPUs")
        about = (str(summary.get("world_size", "?")), str(config.get("precision", "fp32")), where)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; name the folder of a run that has finished") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not the summary of a run: {type(error).__name__} {error}") from None
    if not losses:
        raise UserError(f"{file} is of a run that has not finished an epoch: there is nothing to score")
    if all(map(math.isnan, losses)):
        raise UserError(f"{file} is of a run whose validation loss was never a number: there is nothing to score")
    return Score(file.parent.name or str(file), work, seconds, losses, about)


def conclusion(run: Score, baseline: Score) -> str:
    """Say how a run compares with a baseline, in one line."""
    lower = 1 - run.best / baseline.best
    difference = f"{abs(lower):.1%} {'lower' if lower >= 0 else 'higher'}"
    needed, theirs = run.seconds_to(baseline.best), baseline.seconds_to(baseline.best)
    if needed is None:
        return f"conclusion: the loss is {difference} than the baseline's, which this run never reached"
    pace = f"{theirs / needed:.2f} times as fast" if needed <= theirs else f"{needed / theirs:.2f} times as slow"
    return (
        f"conclusion: {pace} to the baseline's loss ({needed:.1f} s against {theirs:.1f} s); the lowest is {difference}"
    )


def leaderboard(paths: Sequence[Path], baseline: Path | None, epochs: int | None) -> str:
    """Rank runs: by the seconds to the baseline's loss, else by the lowest loss; the baseline has its place among them.

    Runs that cannot be read or compared do not stop the others.
    """
    scores, left_out = {}, []
    for path in [*([baseline] if baseline else []), *paths]:
        try:
            scores[path] = read_score(path, epochs)
        except UserError as error:
            if path == baseline:
                raise
            left_out.append(str(error))
    first = next(iter(scores.values()), None)
    for path in [path for path in scores if scores[path].work != first.work]:
        left_out.append(f"{path}: {scores.pop(path).work}, not {first.work}")
    target = scores[baseline].best if baseline else -1.0

    def place(path: Path) -> tuple[float, float]:
        reached = scores[path].seconds_to(target)
        return (float("inf") if reached is None else reached, scores[path].best)

    rows = []
    for number, path in enumerate(sorted(scores, key=place), 1):
        score, to_target = scores[path], scores[path].seconds_to(target)
        name = f"{shortest(path, list(scores))}{' (the baseline)' if path == baseline else ''}"
        there = [] if not baseline else ["never" if to_target is None else f"{to_target:.1f}"]
        figures = (f"{score.best:.4f}", f"{score.seconds_to(score.best):.1f}", f"{len(score.losses)}")
        rows.append((str(number), name, *there, *figures, *score.about))
    header = ["lowest loss", "after s", "epochs", "ranks", "precision", "on"]
    header = ["", "run", *([f"s to {target:.4f}"] if baseline else []), *header]
    table = format_table(header, rows, left=(1, len(header) - 1, len(header) - 2))
    lines = [f"{first.work}; seconds are comparable on the same hardware only", "", table] if rows else []
    return "\n".join([*lines, *(f"not ranked: {reason}" for reason in left_out)])


def shortest(path: Path, among: Sequence[Path]) -> str:
    """Return a run's folder without the parts that the paths of all runs begin or end with."""
    every = [list(other.resolve().parts) for other in among]
    parts = list(path.resolve().parts)
    for end in (0, -1):
        while len(parts) > 1 and all(len(other) > 1 and other[end] == every[0][end] for other in every):
            for other in (*every, parts):
                del other[end]
    return "/".join(parts)


def main() -> None:
    """Score one run, or two, or the runs of a class."""
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run; of several, a table is made")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="folder of the run to compare with, or to beat")
    parser.add_argument("--epochs", type=int, metavar="N", help="count the first N epochs of each run only")
    arguments = parser.parse_args()
    require_positive(arguments, "epochs")
    if len(arguments.run) > 1:
        print(leaderboard(arguments.run, arguments.baseline, arguments.epochs))
        return
    run = read_score(arguments.run[0], arguments.epochs)
    print(run)
    if arguments.baseline:
        baseline = read_score(arguments.baseline, arguments.epochs)
        print(baseline)
        if run.work != baseline.work:
            raise UserError(f"{run.work} cannot be compared with {baseline.work}")
        print(conclusion(run, baseline))


if __name__ == "__main__":
    run_reporting_user_errors(main)
