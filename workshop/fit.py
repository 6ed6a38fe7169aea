"""Whether a checkpoint fits the run that wants to go on from it."""

from collections.abc import Mapping
from typing import Any

from workshop.config import TrainConfig
from workshop.distributed import Ranks

ONLY_WITHIN_AN_EPOCH = {"world_size", "seed", "loader"}
"""what may change from one epoch to the next, but not within one: the rest of it would be other samples"""


def identity(config: TrainConfig, ranks: Ranks, parts: Mapping[str, object]) -> dict[str, Any]:
    """Return what two runs must have in common for one to go on where the other stopped.

    Number and sizes of the steps are among it, because a schedule may count steps.
    """
    shards = f" of {config.num_workers} worker(s)" if config.loader == "shards" else ""  # each reads shards of its own
    kinds = {name: type(part).__name__ for name, part in parts.items()}
    return kinds | {
        "model": config.model,
        "dataset": config.dataset,
        "limit_train": config.limit_train,
        "global_batch_size": config.batch_size * ranks.world_size,
        "world_size": ranks.world_size,
        "seed": config.seed,
        "loader": config.loader + shards,
    }


def misfit(theirs: dict[str, Any], mine: dict[str, Any], in_epoch: int | None) -> str | None:
    """Return in words in which fields the run of a checkpoint differs from this one, if any matters.

    Args:
        theirs: `identity` of the run that saved it.
        mine: `identity` of this run.
        in_epoch: the epoch that was under way, None if it was saved between two.
    """
    fields = [field for field in theirs | mine if theirs.get(field) != mine.get(field)]
    if in_epoch is None:
        fields = [field for field in fields if field not in ONLY_WITHIN_AN_EPOCH]
    if not fields:
        return None
    why = f", and it was saved in the middle of epoch {in_epoch}" if ONLY_WITHIN_AN_EPOCH & set(fields) else ""
    return "; ".join(f"{field} is {theirs.get(field)} there and {mine.get(field)} here" for field in fields) + why
