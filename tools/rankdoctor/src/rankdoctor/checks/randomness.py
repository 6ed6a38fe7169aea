"""Random numbers: different on each rank and in each worker."""

from collections import defaultdict
from collections.abc import Iterator

from ..runs import Run
from .base import Finding, check, fault, hint, need, need_use, seen


@check("Each rank drops other activations.", ranks=True)
def same_dropout(run: Run) -> Iterator[Finding]:
    """With one seed on all ranks, dropout drops the same activations everywhere, which weakens its effect."""
    need_use(run.any("dropout"), "dropout")
    need(not run.model_parallel, "the model is split over several dimensions of ranks")
    calls = run.training_calls[:10]
    calls = [events for events in calls if all("rng" in e for e in events)]
    seen(len(calls), "training steps compared")
    same = [events for events in calls if len({e["rng"] for e in events}) == 1]
    if len(same) > 2 or len(same) == len(calls) > 1:
        drop = run.first.all("dropout")[0]
        why, fix = _seeded(run, "torch", same[0][0]["t"])
        text = f"in {len(same)} of {len(calls)} steps all ranks drew the same random numbers{why}"
        yield hint(drop["at"], f"{text}: dropout is the same on each", fix)
    need(not same, f"in {len(same)} of {len(calls)} steps all ranks drew the same random numbers")


@check("Each rank draws other noise.", ranks=True)
def same_noise(run: Run) -> Iterator[Finding]:
    """With one seed on all ranks, noise, masks or latent vectors of a batch are the same on each rank."""
    need_use(run.any("noise"), "noise for a batch")
    need(not run.model_parallel, "the model is split over several dimensions of ranks")
    batches = {e.get("samples") for events in run.training_calls for e in events}
    since = run.training_calls[0][0]["step"] if run.training_calls else 0
    lines = {e["at"]: None for e in run.first.all("noise") if e["samples"] in batches}
    need_use(lines, "noise for a batch")
    of_lines = {line: run.in_step("noise", at=line) for line in lines}
    compared = {line: [draw for draw in draws if draw[0]["step"] >= since][:10] for line, draws in of_lines.items()}
    seen(sum(map(len, compared.values())), "draws of noise compared", 2)
    alike_in = {
        line: sum(len({e["values"] for e in events}) == 1 for events in draws) for line, draws in compared.items()
    }
    for line, draws in compared.items():
        if len(draws) > 1 and alike_in[line] == len(draws):
            why, fix = _seeded(run, "torch", draws[0][0]["t"])
            yield hint(line, f"all ranks drew the same noise in each of {len(draws)} steps{why}", fix)
    need(not any(alike_in.values()), f"all ranks drew the same noise in {sum(alike_in.values())} draws")


def _seeded(run: Run, generator: str, before: float) -> tuple[str, str]:
    """Return which line last gave all ranks the same random numbers, as a part of a sentence, and what to do.

    The text is "" if no line did: then what came before, such as the seed of the process, is not known.
    """
    event = run.seeded_alike(generator, before)
    where = event["at"].rpartition("/")[2] if event else ""
    if event and event.get("whole"):
        fix = "save the random state of every rank, in a file of each or gathered in one, and give each rank its own"
        return f", because {where} gives all of them the same random state", fix
    why = f", because {where} seeds all of them with {event['value']}" if event else ""
    return why, "torch.manual_seed(seed + rank), after the weights are equal on all ranks"


def _states(run: Run) -> dict[tuple[str, str], dict[int, set[tuple[int, int | None]]]]:
    """Return for each data set and generator: its states at the first batches, and the (rank, worker) that had them."""
    found: dict = defaultdict(lambda: defaultdict(set))
    for rank in run.ranks:
        for e in [*rank.workers, *rank.events]:
            if e["e"] == "fetch" and e["count"] == 1:
                for name, state in e["used"].items():
                    found[e["dataset"], name][state].add((rank.number, e["worker"]))
    need_use(found, "random numbers in samples")
    return found


@check("Each worker makes its samples with other random numbers.", exercise="same_noise")
def same_workers(run: Run) -> Iterator[Finding]:
    """A generator in the data set is copied into each worker: all of them then make the same augmentations."""
    compared = 0
    for (dataset, name), states in _states(run).items():
        all_workers = {
            worker for who in states.values() for number, worker in who if number == 0 and worker is not None
        }
        compared += len(all_workers) if len(all_workers) > 1 else 0
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
    need(compared, "no loader with random samples has two workers: try --workers")
    seen(compared, "states of generators in workers of a rank")


@check("Each rank makes its samples with other random numbers.", after=("same_workers",), ranks=True)
def same_augmentation(run: Run) -> Iterator[Finding]:
    """With one seed on all ranks, the samples of different ranks are augmented in the same way."""
    compared = 0
    for (dataset, name), states in _states(run).items():
        compared += len(states) if len({rank for who in states.values() for rank, _ in who}) == run.world else 0
        shared = [who for who in states.values() if len({rank for rank, _ in who}) > 1]
        if shared:
            ranks = sorted({rank for rank, _ in shared[0]})
            text = f"the samples of {dataset} are made on ranks {ranks} from the same state of {_name(name)}"
            first = next((e["t"] for e in run.first.all("pass")), 0.0)
            text += _seeded(run, name, first)[0]
            yield hint(_made(run, dataset), text, "a seed that has the rank in it")
    need(compared, "not every rank made random samples")
    seen(compared, "states of generators on all ranks")


@check("What is set in a data set reaches its workers.")
def worker_copies(run: Run) -> Iterator[Finding]:
    """Workers that stay have copies of the data set from the first epoch: an epoch that is set later changes nothing.

    A map-style data set only; what a stream gives in its second epoch is compared with the first.
    """
    stays = [e for rank in run.ranks for e in rank.all("loader") if e["persistent"] and e["workers"]]
    need_use(stays, "workers that stay between epochs")
    copies = [e for rank in run.ranks for e in rank.all("worker_copy")]
    need(copies, "the script has set nothing in a data set whose workers stay")
    need(not any(e["random"] for e in copies), "the samples are random")
    for e in copies:
        made = next(one["at"] for one in stays if one["loader"] == e["loader"])
        sets = ", ".join(f"{name} = {now}" for name, (_, now) in zip(e["names"], e["values_of"], strict=True))
        has = ", ".join(before for before, _ in e["values_of"])
        if e["differ"]:
            yield fault(
                made,
                f"the workers of this loader stay, with copies of the {e['cls']} from the first epoch: the script has "
                f"set {sets} since, and they still have {has}, so {e['differ']} of {e['count']} samples that were "
                "compared are not those that are meant",
                "persistent_workers=False; or keep the value where the workers see it, as in "
                "torch.tensor(0).share_memory_()",
            )
            return
    seen(sum(e["count"] for e in copies), "samples that do not depend on what was set")


def _name(generator: str) -> str:
    return f"the generator {generator.lstrip('.')}" if generator.startswith(".") else f"{generator}'s random numbers"


def _made(run: Run, dataset: str) -> str:
    return next((e["at"] for rank in run.ranks for e in rank.all("loader") if e["dataset"] == dataset), "?")
