"""Score a run by its summary.json: the lowest validation loss it reached, or how soon it reached a baseline's.

    python experiments/score.py ../runs/mine                               # lowest validation loss
    python experiments/score.py ../runs/mine --baseline ../runs/plain      # and how it compares with another run

A run is named by its folder, or by the summary.json in it. Seconds are those of training, summed over all epochs up to
the one after which the loss was reached. You should see one line for each run and, with a baseline, a verdict.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError, run_reporting_user_errors
from workshop.measuring.flags import Parser


@dataclass(frozen=True)
class Score:
    """What a run reached: its lowest validation loss, and training seconds and loss after each epoch."""

    name: str
    work: str
    """data set and model: only runs of the same are comparable"""
    seconds: list[float]
    losses: list[float]

    @property
    def best(self) -> float:
        """The lowest validation loss."""
        return min(self.losses)

    def seconds_to(self, loss: float) -> float | None:
        """Return the training seconds until the validation loss was first at most ``loss``; None if it never was."""
        return next((t for t, found in zip(self.seconds, self.losses, strict=True) if found <= loss), None)

    def __str__(self) -> str:
        reached = self.seconds_to(self.best)
        return f"{self.name}: lowest validation loss {self.best:.4f} after {reached:.1f} s of training ({self.work})"


def read_score(path: Path) -> Score:
    """Read what a run left in its folder.

    Raises:
        UserError: it left no summary, or none of a run that finished an epoch.
    """
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        epochs, config = summary["epochs"], summary["config"]
        seconds = [sum(epoch["seconds"] for epoch in epochs[: i + 1]) for i in range(len(epochs))]
        losses = [float(epoch["val_loss"]) for epoch in epochs]
        work = f"{config['model']} on {config['dataset']}"
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; name the folder of a run that has finished") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not the summary of a run: {type(error).__name__} {error}") from None
    if not losses:
        raise UserError(f"{file} is of a run that has not finished an epoch: there is nothing to score")
    return Score(file.parent.name or str(file), work, seconds, losses)


def verdict(run: Score, baseline: Score) -> str:
    """Say how a run compares with a baseline, in one line."""
    lower = 1 - run.best / baseline.best
    difference = f"{abs(lower):.1%} {'lower' if lower >= 0 else 'higher'}"
    needed, theirs = run.seconds_to(baseline.best), baseline.seconds_to(baseline.best)
    if needed is None:
        return f"verdict: the loss is {difference} than the baseline's, which this run never reached"
    pace = f"{theirs / needed:.2f} times as fast" if needed <= theirs else f"{needed / theirs:.2f} times as slow"
    return f"verdict: {pace} to the baseline's loss ({needed:.1f} s against {theirs:.1f} s); the lowest is {difference}"


def main() -> None:
    """Score one run, or two."""
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="folder of the run to compare it with")
    arguments = parser.parse_args()
    run = read_score(arguments.run)
    print(run)
    if arguments.baseline:
        baseline = read_score(arguments.baseline)
        print(baseline)
        if run.work != baseline.work:
            raise UserError(f"{run.work} cannot be compared with {baseline.work}")
        print(verdict(run, baseline))


if __name__ == "__main__":
    run_reporting_user_errors(main)
