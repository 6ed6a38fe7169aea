"""Which samples the loaders give, in which order, with which workers; passes of a loader are cut short here."""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import itertools
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import data
from torch.utils._pytree import tree_leaves

from ..standin import mark_on_cpu
from ..trail import note, user_line
from . import uneven
from .common import CONFIG, bags, fingerprints, patch, quietly, state
from .datasets import as_integers, below_subsets, content_of, known, number_of, plain_values, samples_of, store, varying

MOST_SAMPLERS = 4
"""samplers inside each other that are looked at"""
LONGEST_PLAN = 200_000
"""batches of a pass that are looked at: a sampler can be endless"""
LONGEST_DRAIN = 3.0
"""seconds in which the rest of a stream is counted"""
BEGIN = 3
"""batches of a pass of a stream that are compared with those of the next one"""
MOST_GIVEN = 50_000
"""samples of a stream that are compared"""
LIGHTNING = re.compile(r"site-packages/(pytorch_)?lightning(_fabric)?/")
ITERABLE = data.dataloader._DatasetKind.Iterable


def install() -> None:
    """Observe `DataLoader`, its iterators, and the sizes of data sets."""
    own_sampler = data.DataLoader._index_sampler.fget

    def index_sampler(loader: data.DataLoader) -> Any:
        sampler = own_sampler(loader)
        return sampler if loader._dataset_kind == ITERABLE else ShortSampler(sampler, loader)

    data.DataLoader._index_sampler = property(index_sampler)
    patch(data.DataLoader, "__init__", _loader_init)
    patch(data.DataLoader, "__len__", _loader_length)
    patch(data.DistributedSampler, "__init__", _sampler_init)
    patch(data, "random_split", _split, data.dataset)
    iterators = data.dataloader._BaseDataLoaderIter
    patch(iterators, "__init__", _iterator_init)
    patch(iterators, "_reset", _iterator_reset)
    patch(iterators, "__next__", _following)
    if CONFIG.uneven:
        uneven.cut_datasets()


class ShortSampler:
    """Wraps the sampler of a loader: logs the samples of a pass, and passes on some of its batches.

    The last batch is always among them, because it may be smaller, and because epochs end with it.
    """

    def __init__(self, sampler: Any, loader: data.DataLoader) -> None:
        self.sampler, self.loader = sampler, loader

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[Any]:
        rest = iter(self.sampler)
        plan = list(itertools.islice(rest, LONGEST_PLAN))
        is_cut = 0 < CONFIG.batches < len(plan) and known.loaders[id(self.loader)][0] not in CONFIG.whole
        note_pass(self.loader, plan, is_cut and isinstance(sys.exc_info()[1], StopIteration))
        if is_cut:
            yield from plan[: CONFIG.batches - 1] + plan[-1:]
        else:
            yield from itertools.chain(plan, rest)


def _split(own: Callable[..., list]) -> Callable[..., list]:
    def split(dataset: Any, *args: Any, **kwargs: Any) -> list:
        parts = own(dataset, *args, **kwargs)
        note_split(dataset, parts, user_line())
        return parts

    return split


@quietly
def note_split(dataset: Any, parts: list, at: str) -> None:
    """Log a random split: the sizes of its parts, a number for which samples they have, and one for the data."""
    order = zlib.crc32(json.dumps([[int(index) for index in part.indices] for part in parts]).encode())
    note("split", at=at, sizes=[len(part) for part in parts], order=order, content=content_of(dataset, len(dataset)))


def _sampler_init(own: Callable[..., None]) -> Callable[..., None]:
    def init(sampler: data.DistributedSampler, *args: Any, **kwargs: Any) -> None:
        own(sampler, *args, **kwargs)
        sampler.__dict__["_rankdoctor_at"] = user_line()

    return init


def _made(loader: data.DataLoader) -> str | None:
    """Return the line where the DistributedSampler of a loader was made, if it has one."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    places = (getattr(sampler, "_rankdoctor_at", None) for sampler in samplers)
    return next((place for place in places if place and place != "?"), None)


def _loader_init(own: Callable[..., None]) -> Callable[..., None]:
    def init(loader: data.DataLoader, *args: Any, **kwargs: Any) -> None:
        own(loader, *args, **kwargs)
        at = user_line()
        key = f"{at}#{known.lines.get(at, 0)}"
        known.lines[at] = known.lines.get(at, 0) + 1
        known.loaders[id(loader)] = key, loader
        note(
            "loader",
            loader=key,
            at=at,
            workers=loader.num_workers,
            persistent=loader.persistent_workers,
            sampler=type(loader.sampler).__name__,
            sampler_at=_made(loader),
            batch_size=loader.batch_size,
            drop_last=bool(loader.drop_last),
            iterable=loader._dataset_kind == ITERABLE,
            dataset=type(loader.dataset).__name__,
            told_epochs=callable(getattr(loader.dataset, "set_epoch", None)),
        )
        if key in CONFIG.halved and isinstance(loader.batch_sampler, data.BatchSampler):
            loader.batch_sampler.batch_size = max(1, loader.batch_sampler.batch_size // 2)
        loader.pin_memory = False
        wanted = loader.num_workers if CONFIG.workers < 0 else CONFIG.workers
        loader.num_workers = min(wanted, 2)  # more only take longer to start
        if loader.num_workers and loader.prefetch_factor is None:
            loader.prefetch_factor = 2

    return init


def _loader_length(own: Callable[[data.DataLoader], int]) -> Callable[[data.DataLoader], int]:
    """Let Lightning, which validates after as many batches as a loader says, see as many as it will get."""

    def length(loader: data.DataLoader) -> int:
        size = own(loader)
        is_cut = CONFIG.batches and LIGHTNING.search(sys._getframe(1).f_code.co_filename)
        return min(size, CONFIG.batches) if is_cut else size

    return length


@quietly
def note_pass(loader: data.DataLoader, plan: list | None = None, again: bool = False) -> None:
    """Log that a pass over the data begins, with the numbers of its samples if there is a plan.

    With ``again`` it begins because the one before has ended (in ``except StopIteration``), perhaps only because the
    doctor has cut it.
    """
    key, _ = known.loaders[id(loader)]
    what: dict[str, object] = {"loader": key, "at": user_line(), "workers": loader.num_workers}
    if plan is not None:
        dataset, base, indices = below_subsets(loader.dataset)
        batches = plan if loader._auto_collation else [[item] for item in plan]
        samples = [sample for batch in batches for sample in samples_of(batch)]
        if samples and isinstance(samples[0], tuple):
            known.forms.setdefault(id(loader.dataset), (samples[0], varying(samples)))
            if sum(len(set(column)) > 1 for column in zip(*samples, strict=True)) > 1:
                known.mixed.add(id(loader.dataset))
        numbers = as_integers(samples)
        if indices is not None:
            numbers = [indices[number] for number in numbers]
        what |= {
            "file": store(numbers),
            "batches": len(plan),
            "again": again,
            "dataset": number_of(dataset),
            "base": number_of(base),
            "epochs": epochs_of(loader),
        }
    note("pass", **what)


def epochs_of(loader: data.DataLoader) -> dict[str, int]:
    """Return the epochs that shuffling samplers with `set_epoch` inside a batch sampler are in, by their classes."""
    found: dict[str, int] = {}
    inside = [loader.batch_sampler]
    for _ in range(MOST_SAMPLERS):
        sampler = inside.pop() if inside else None
        epoch = getattr(sampler, "epoch", None)
        if (
            callable(getattr(sampler, "set_epoch", None))
            and isinstance(epoch, int)
            and getattr(sampler, "shuffle", True)
        ):
            found[type(sampler).__name__] = epoch
        inside += [part for part in getattr(sampler, "__dict__", {}).values() if isinstance(part, data.Sampler)]
    return found


def _iterator_init(own: Callable[..., None]) -> Callable[..., None]:
    def init(iterator: Any, loader: data.DataLoader) -> None:
        iterator._rankdoctor_loader, iterator._rankdoctor_given = loader, 0
        if loader._dataset_kind == ITERABLE:
            known.given.pop(known.loaders[id(loader)][0], None)  # of a pass that the script has ended
            note_pass(loader)
        if loader.persistent_workers and loader.num_workers:
            known.plain[id(loader)] = plain_values(loader.dataset)
        own(iterator, loader)

    return init


def _iterator_reset(own: Callable[..., None]) -> Callable[..., None]:
    def reset(iterator: Any, loader: data.DataLoader, first_iter: bool = False) -> None:
        iterator._rankdoctor_given = 0
        if loader._dataset_kind == ITERABLE and not first_iter:
            known.given.pop(known.loaders[id(loader)][0], None)
            note_pass(loader)
        if not first_iter and id(loader) in known.plain:
            compare_copies(loader)
        own(iterator, loader, first_iter)

    return reset


@quietly
def compare_copies(loader: data.DataLoader) -> None:
    """Remember what the script has set in a data set since the workers, which stay, were given their copies of it."""
    before, now = known.plain[id(loader)], plain_values(loader.dataset)
    changed = {name: (value, now[name]) for name, value in before.items() if name in now and now[name] != value}
    if changed:
        known.moved[id(loader.dataset)] = known.loaders[id(loader)][0], changed


def _following(own: Callable[..., Any]) -> Callable[..., Any]:
    def following(iterator: Any) -> Any:
        loader = iterator._rankdoctor_loader
        is_stream = loader._dataset_kind == ITERABLE
        if is_stream and CONFIG.batches and iterator._rankdoctor_given >= CONFIG.batches:
            drain(own, iterator)
            raise StopIteration
        state.loading, began = True, time.perf_counter()
        try:
            batch = own(iterator)
        except StopIteration:
            if is_stream:
                key = known.loaders[id(loader)][0]
                note("pass_end", loader=key, batches=iterator._rankdoctor_given, complete=True, **given_by(key))
            raise
        finally:
            state.loading = False
        iterator._rankdoctor_given += 1
        state.loader = known.loaders[id(loader)][0]
        if is_stream:
            compare_passes(loader, batch, iterator._rankdoctor_given)
            if state.loader not in known.drained:
                remember(state.loader, batch)
        mark_on_cpu(batch)
        note("batch", loader=state.loader, wait=round(time.perf_counter() - began, 5))
        return batch

    return following


def drain(following: Callable[[Any], Any], iterator: Any) -> None:
    """Count the rest of the first pass of a stream, because ranks may have different numbers of batches."""
    key, _ = known.loaders[id(iterator._rankdoctor_loader)]
    if key in known.drained:
        return
    known.drained.add(key)
    ends, count, complete = time.perf_counter() + LONGEST_DRAIN, iterator._rankdoctor_given, False
    state.loading = True
    try:
        while time.perf_counter() < ends:
            batch = following(iterator)
            remember(key, batch)
            mark_on_cpu(batch)
            count += 1
    except StopIteration:
        complete = True
    finally:
        state.loading = False
    note("pass_end", loader=key, batches=count, complete=complete, **given_by(key))


@quietly
def compare_passes(loader: Any, batch: Any, number: int) -> None:
    """Log whether the first batches of a stream are the same in its second pass, although its epoch has changed.

    ``number`` of the batch in its pass, from 1. An epoch is an attribute of the data set with this word in its name.
    """
    key = known.loaders[id(loader)][0]
    passes = known.begins.setdefault(key, [])
    if number == 1:
        passes.append([])
    if len(passes) > 2 or number > BEGIN:
        return
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    epochs = {name: value for name, value in vars(loader.dataset).items() if "epoch" in name and type(value) is int}
    passes[-1].append((fingerprints(max(leaves, key=torch.Tensor.numel)) if leaves else [], epochs))
    if len(passes) == 2 and number == BEGIN and len(passes[0]) == BEGIN:
        (first, before), (_, now) = passes[0][0], passes[1][0]
        equal = bool(first) and [rows for rows, _ in passes[0]] == [rows for rows, _ in passes[1]]
        note("second_pass", loader=key, equal=equal, changed=sorted(k for k in now if now[k] != before.get(k)))


@quietly
def remember(key: str, batch: Any) -> None:
    """Remember what the samples of a batch of a stream hold, because they have no numbers."""
    rows, values = known.given.setdefault(key, ([], []))
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if leaves and len(rows) < MOST_GIVEN:
        largest = max(leaves, key=torch.Tensor.numel)
        rows += fingerprints(largest)
        values += bags(largest)


def given_by(key: str) -> dict[str, object]:
    """Return the fields of an event with what the first pass of a stream has given; nothing later."""
    rows, values = known.given.pop(key, ([], []))
    known.drained.add(key)
    return {"file": store(rows), "bags": store(values)} if rows else {}
