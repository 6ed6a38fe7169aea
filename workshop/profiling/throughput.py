"""What limits a run: the loader alone (IO), the training alone (SYNTHETIC), and both together (FULL).

The three quantities are those of the benchy tool (https://github.com/romerojosh/benchy). Here all are measured alike:
every trial starts a fresh iterator, lasts about as long, and rounds that warm up do not count. Only full batches are
measured: each epoch ends before a last batch that has fewer samples. Otherwise that batch could appear for the first
time in the middle of a trial, and the trial would include the compilation, or cuDNN's search for the fastest algorithm,
which every new shape of a batch starts. (SYNTHETIC, which repeats one batch, would not.)

With several ranks the time of the slowest one counts, and two more quantities are measured, so that differences of the
times per step have a meaning:

    COMPUTE     training on one batch, without sending gradients
    BARRIER     the same, but the ranks wait for each other in each step: BARRIER - COMPUTE is what the waiting costs
    SYNTHETIC   gradients are sent too: SYNTHETIC - BARRIER is what sending them costs beside the waiting
    FULL        batches are loaded too: FULL - SYNTHETIC is what loading costs
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from workshop.hardware import OtherWork, peak_memory_bytes
from workshop.jsonfile import read_json, write_json
from workshop.loaders.sampler import Loader
from workshop.log import Log
from workshop.profiling.calibration import repeats_for

TRIALS = 3
FEWEST_STEPS = 10
GOOD_OVERLAP = 0.9
TOO_NOISY = 0.25
"""standard deviation of trials, as a share of their mean; on a machine with nothing else to do it is some percent"""

Train = Callable[[Loader], object]
"""trains on all batches of the loader it is given, as an epoch does"""
Works = dict[str, tuple[Loader, Train]]
"""what is measured, by name: what is done, and with which loader"""

FASTER_STEP = "a larger --batch_size; the lesson on mixed precision makes the step itself faster"


@dataclass(frozen=True)
class Throughput:
    """Samples per second over all ranks in each of several trials."""

    trials: list[float]

    @property
    def mean(self) -> float:
        """Mean over the trials, in samples/s."""
        return statistics.mean(self.trials)

    @property
    def std(self) -> float:
        """Standard deviation over the trials, in samples/s."""
        return statistics.stdev(self.trials)

    @property
    def noisy(self) -> bool:
        """Whether the trials differ too much for their mean to say anything."""
        return self.std > TOO_NOISY * self.mean

    def to_dict(self) -> dict[str, Any]:
        """Return mean, standard deviation and trials in samples/s, for a JSON file."""
        return {"mean": self.mean, "std": self.std, "trials": self.trials}

    def __str__(self) -> str:
        return f"{self.mean:,.0f} +/- {self.std:,.0f}"


class _LoaderLike:
    """Has the data set, the sampler and the length of another loader."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.dataset, self.batch_sampler = loader, loader.dataset, loader.batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)


class SyntheticLoader(_LoaderLike):
    """A loader that repeats one batch, in the memory where the real loader put it: the fastest possible loader."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self.batch = next(iter(loader))

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, len(self))


class BarrierLoader(_LoaderLike):
    """A loader that synchronizes the ranks before each batch, so that none gets ahead of the slowest."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        super().__init__(loader)
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        nothing = torch.zeros((), device=self.device)
        for batch in self.loader:
            dist.all_reduce(nothing)  # waits on the device, as the sum of gradients does; a barrier would stop the host
            yield batch


def benchmark(
    log: Log, loader: Loader, train: Train, no_sync: Callable[[], AbstractContextManager] | None = None
) -> None:
    """Measure IO, SYNTHETIC and FULL, print them with a diagnosis, and write them to the run's ``throughput.json``.

    The file also says how much memory was used at most. With ``no_sync`` also COMPUTE and BARRIER. Trials of all are
    taken in turn, so that the first of one and the first of another may be compared as a pair. ``throughput.png`` shows
    the times per step, and those of the benchmark before in the same folder.

    Args:
        log: of the run; its config says how long a trial is.
        loader: the training loader.
        train: trains on all batches of the loader it is given, as an epoch does.
        no_sync: makes a context in which ``train`` does not communicate.
    """
    device = log.ranks.device
    synthetic = SyntheticLoader(loader)
    works: Works = {"IO": (loader, _read_all), "SYNTHETIC": (synthetic, train), "FULL": (loader, train)}
    if no_sync is not None:
        train_alone = partial(_train_within, no_sync, train)
        works |= {"BARRIER": (BarrierLoader(synthetic, device), train_alone), "COMPUTE": (synthetic, train_alone)}
    other_work = OtherWork()
    measured = _measure(works, device, log.config.benchmark_seconds)
    busy = other_work.note(getattr(loader, "num_workers", 0)) if log.ranks.world_size == 1 else None
    if log.ranks.rank != 0:
        return
    from workshop.profiling.bars import plot_runs  # here, because matplotlib takes half a second to import

    print(f"\n{'':10} {'samples/s':>20}")
    in_turn, overlapped = predictions(measured["IO"].mean, measured["SYNTHETIC"].mean)
    predicted = f"   predicted: {in_turn:,.0f} without overlap, {overlapped:,.0f} with full overlap"
    for name, throughput in measured.items():
        print(f"{name:10} {throughput!s:>20}{predicted if name == 'FULL' else ''}")
    figures: dict[str, Any] = {name: throughput.to_dict() for name, throughput in measured.items()}
    figures |= {"no_overlap": in_turn, "full_overlap": overlapped}
    figures |= {"samples_per_step": loader.batch_sampler.global_batch_size, "flags": sys.argv[1:]}
    shares = {name: log.mfu(measured[name].mean) for name in ("SYNTHETIC", "FULL")}
    if log.utilization is not None:
        figures["mfu"] = shares
        print("mfu: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share is not None))
    figures |= {"diagnosis": diagnosis(measured, loader), "peak_memory_bytes": peak_memory_bytes(device)}
    if busy:
        figures["busy"] = busy
        print(f"\nBusy machine: {busy}. Do not rely on the diagnosis:")
    print(f"\n{figures['diagnosis']}")
    file = log.folder.path / "throughput.json"
    before = read_json(file)
    write_json(file, figures)
    plot = file.with_suffix(".png")
    plot_runs([*([before] if "flags" in before else []), figures], plot)
    print(f"\nThe same as bars{', beside the run before' if 'flags' in before else ''}: {plot}")


def predictions(io: float, synthetic: float) -> tuple[float, float]:
    """Return what FULL would be without any overlap of loading and training, and if they overlapped fully."""
    return 1 / (1 / io + 1 / synthetic), min(io, synthetic)


def _measure(works: Works, device: torch.device, seconds: float) -> dict[str, Throughput]:
    def time_of(name: str, steps: int) -> float:
        return max_over_ranks(_seconds(*works[name], steps), device)  # the same on all ranks

    for name in works:
        time_of(name, FEWEST_STEPS)  # workers start, memory is allocated, kernels are chosen
    steps = {name: repeats_for(seconds, partial(time_of, name), FEWEST_STEPS) for name in works}
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(TRIALS):  # alternately, so that a machine whose speed drifts does not favor one
        for name, (loader, _) in works.items():
            samples = sum(_epochs(loader, steps[name])) * loader.batch_sampler.global_batch_size
            rates[name].append(samples / time_of(name, steps[name]))
    return {name: Throughput(trials) for name, trials in rates.items()}


def max_over_ranks(seconds: float, device: torch.device) -> float:
    """Return the longest of all ranks' times, on all ranks; without a process group, return ``seconds``."""
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def _epochs(loader: Loader, steps: int) -> list[int]:
    """Divide ``steps`` into epochs and return the steps in each; all ranks get the same result.

    That is a part of one epoch, or the closest number of epochs. An epoch ends with its last full batch.
    """
    full_steps = max(1, loader.batch_sampler.full_steps)  # 0: shards so small that some ranks can fill no batch
    return [steps] if steps < full_steps else [full_steps] * round(steps / full_steps)


def _seconds(loader: Loader, work: Train, steps: int) -> float:
    sampler = loader.batch_sampler
    started = time.perf_counter()
    for steps_of_epoch in _epochs(loader, steps):
        sampler.set_epoch(sampler.epoch + 1)
        sampler.max_steps = steps_of_epoch
        work(loader)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    sampler.max_steps = None
    return time.perf_counter() - started


def _read_all(loader: Loader) -> None:
    for _ in loader:
        pass


def _train_within(context: Callable[[], AbstractContextManager], train: Train, loader: Loader) -> None:
    with context():
        train(loader)


def diagnosis(measured: dict[str, Throughput], loader: Loader) -> str:
    """Say what limits a run, by how much, and what to try next, as the flow chart of lesson 01 does.

    Args:
        measured: the throughputs IO, SYNTHETIC and FULL.
        loader: that loaded. A loader of the workshop says by its attributes what can make it faster.
    """
    io, synthetic, full = (measured[name].mean for name in ("IO", "SYNTHETIC", "FULL"))
    slower, name_of_slower = min((io, "IO"), (synthetic, "SYNTHETIC"))
    for name in (name_of_slower, "FULL"):
        if measured[name].noisy:
            return (
                f"Too noisy: the trials of {name} gave {measured[name]} samples/s. Other work runs here: "
                "measure again when it is done, or longer, with --benchmark_seconds 10."
            )
    if full < GOOD_OVERLAP * slower:
        return (
            f"Poor overlap: together they give {full:,.0f} samples/s, {full / slower:.0%} of the slower part alone, "
            f"which is {'loading' if io < synthetic else 'training'}. "
            f"{_better_overlap(loader, io < synthetic)}."
        )
    if io < synthetic:
        faster = f"training could process {synthetic / io:.1f} times as many samples/s as the loader gives"
        more = "more --num_workers if there are CPUs left, else " if _can_have_workers(loader) else ""
        return f"Data-bound: {faster}. Try {more}{_less_work(loader)}."
    return (
        f"Compute-bound: the loader could give {io / synthetic:.1f} times as many samples/s as training processes. "
        f"Faster loading will not help; try {FASTER_STEP}."
    )


def _less_work(loader: Loader) -> str:
    """Return what to try when loading is too slow and no CPU is free for it."""
    return getattr(loader, "less_work", "--loader memory")  # the latter for PyTorch's own DataLoader


def _can_have_workers(loader: Loader) -> bool:
    return getattr(loader, "can_have_workers", True)  # as PyTorch's own DataLoader


def _better_overlap(loader: Loader, loading_is_slower: bool) -> str:
    if getattr(loader, "num_workers", 0) > 0 or getattr(loader, "always_threaded", False):
        return (
            "Loading and training share the CPUs, or something waits in each step: look for .item() and copies without "
            f"--pin_memory; give the workers CPUs of their own, or less work: {_less_work(loader)}"
        )
    one_worker = "--num_workers 1 if a CPU is free, else " if _can_have_workers(loader) else ""
    return (
        "The training process loads the data itself, so the times add up: try "
        f"{one_worker}{_less_work(loader) if loading_is_slower else FASTER_STEP}"
    )
