"""Random numbers: different on each rank and in each worker."""

from collections import defaultdict
from collections.abc import Iterator

from ..runs import Run
from .base import Finding, check, hint, need, need_use, seen


@check("Each rank drops other activations.", ranks=True)
def same_dropout(run: Run) -> Iterator[Finding]:
    """With one seed on all ranks, dropout drops the same activations everywhere, which weakens its effect."""
    need_use(run.any("dropout"), "dropout")
    need(not run.model_parallel, "the model is split over several dimensions of ranks")
    calls = run.together("forward", train=True, grad=True)[:10]
    calls = [events for events in calls if all("rng" in e for e in events)]
    seen(len(calls), "training steps compared")
    same = [events for events in calls if len({e["rng"] for e in events}) == 1]
    if len(same) > 2 or len(same) == len(calls) > 1:
        drop = run.first.all("dropout")[0]
        text = (
            f"in {len(same)} of {len(calls)} steps all ranks drew the same random numbers{_seeded(run, 'torch')}: "
            "dropout is the same on each"
        )
        yield hint(drop["at"], text, "torch.manual_seed(seed + rank), after the weights are equal on all ranks")


@check("Each rank draws other noise.", ranks=True)
def same_noise(run: Run) -> Iterator[Finding]:
    """With one seed on all ranks, noise, masks or latent vectors of a batch are the same on each rank."""
    need_use(run.any("noise"), "noise for a batch")
    need(not run.model_parallel, "the model is split over several dimensions of ranks")
    batches = {e.get("samples") for rank in run.ranks for e in rank.all("forward", train=True, grad=True)}
    lines = {e["at"]: None for e in run.first.all("noise") if e["samples"] in batches}
    need_use(lines, "noise for a batch")
    compared = {line: run.together("noise", at=line)[:10] for line in lines}
    seen(sum(map(len, compared.values())), "draws of noise compared", 2)
    for line, draws in compared.items():
        if len(draws) > 1 and all(len({e["values"] for e in events}) == 1 for events in draws):
            text = f"all ranks drew the same noise in each of {len(draws)} steps{_seeded(run, 'torch')}"
            yield hint(line, text, "torch.manual_seed(seed + rank), after the weights are equal on all ranks")


def _seeded(run: Run, generator: str) -> str:
    """Return which line gives all ranks the same seed, as a part of a sentence; "" if none does."""
    seed = run.seeded_alike(generator)
    return f", because {seed['at'].rpartition('/')[2]} seeds all of them with {seed['value']}" if seed else ""


def _states(run: Run) -> dict[tuple[str, str], dict[int, set[tuple[int, int | None]]]]:
    """Return for each data set and generator: its states at the first batches, and the (rank, worker) that had them."""
    found: dict = defaultdict(lambda: defaultdict(set))
    for rank in run.ranks:
        for e in [*rank.workers, *rank.events]:
            if e["e"] == "fetch" and e["count"] == 1:
                for name, state in e["used"].items():
                    found[e["dataset"], name][state].add((rank.number, e["worker"]))
    need_use(found, "random numbers in samples")
    seen(sum(map(len, found.values())), "states of generators")
    return found


@check("Each worker makes its samples with other random numbers.", exercise="same_noise")
def same_workers(run: Run) -> Iterator[Finding]:
    """A generator in the data set is copied into each worker: all of them then make the same augmentations."""
    for (dataset, name), states in _states(run).items():
        for who in states.values():
            rank = min(who)[0]
            workers = sorted({worker for number, worker in who if number == rank and worker is not None})
            if len(workers) > 1:
                text = f"workers {', '.join(map(str, workers))} of {dataset} begin with the same state of {_name(name)}"
                yield hint(
                    _made(run, dataset),
                    text,
                    "seed it in worker_init_fn, or from the number of the sample and the epoch",
                )
                break


@check("Each rank makes its samples with other random numbers.", after=("same_workers",), ranks=True)
def same_augmentation(run: Run) -> Iterator[Finding]:
    """With one seed on all ranks, the samples of different ranks are augmented in the same way."""
    for (dataset, name), states in _states(run).items():
        shared = [who for who in states.values() if len({rank for rank, _ in who}) > 1]
        if shared:
            ranks = sorted({rank for rank, _ in shared[0]})
            text = f"the samples of {dataset} are made on ranks {ranks} from the same state of {_name(name)}"
            text += _seeded(run, name)
            yield hint(_made(run, dataset), text, "a seed that has the rank in it")


def _name(generator: str) -> str:
    return f"the generator {generator.lstrip('.')}" if generator.startswith(".") else f"{generator}'s random numbers"


def _made(run: Run, dataset: str) -> str:
    return next((e["at"] for rank in run.ranks for e in rank.all("loader") if e["dataset"] == dataset), "?")
