"""A run of the script as the doctor reads it: how it was started and ended, and the events of all its ranks."""

import contextlib
import json
import re
from array import array
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from .events import Event


@dataclass
class Rank:
    """What one rank, and the workers of its loaders, wrote."""

    number: int
    events: list[Event]
    workers: list[Event] = field(default_factory=list)

    def all(self, kind: str, **wanted: object) -> list[Event]:
        """Return the events of a kind, with these values."""
        return [e for e in self.events if e["e"] == kind and all(e.get(key) == value for key, value in wanted.items())]


@dataclass
class Launch:
    """How a run was started, and how it ended."""

    script: str = ""
    root: str = ""
    """folder of the script"""
    name: str = ""
    """what is different from an ordinary run, in words, such as "as on two nodes" """
    provocation: str = ""
    """the condition of this run: uneven, two_nodes, resume, nan, outliers, skip, one_rank, workers or frozen"""
    compared: str = ""
    """for which comparison this is the second run: resumed, other_ranks, other_workers or frozen"""
    world_size: int = 2
    nodes: int = 1
    gpus: str = "standin"
    """standin, null, real, or none"""
    launcher: str = "torchrun"
    gpus_per_task: int = 0
    """GPUs that each rank sees; 0: all of its node"""
    seconds: float = 0.0
    statuses: list[int | None] = field(default_factory=list)
    """exit status of each process that was started; None: ended by the doctor"""
    ended: str = "end"
    """end, enough (updates), stopped, spawn (the script starts its ranks itself), time (limit), hang,
    lost (a rank ended, others did not)"""
    asked: list[str] = field(default_factory=list)
    """flags of checks that run only if they are asked for: influence, reference"""
    refuted: list[str] = field(default_factory=list)
    """names of checks that found a fault only because passes were cut: with whole ones there is none"""
    refuted_by: dict[str, str] = field(default_factory=dict)
    """by their names: what was seen with whole passes"""
    unconfirmed: list[str] = field(default_factory=list)
    """names of checks of which this could not be seen, because whole passes took too long"""
    instead: str = ""
    """the error with the stand-in for CUDA because of which the run is one on null GPUs"""
    used_gathers: list[str] = field(default_factory=list)
    """lines that gather tensors without a graph, on which the loss depends"""
    left_out: list[str] = field(default_factory=list)
    """provocations that could change nothing, with the reason"""
    moved: list[str] = field(default_factory=list)
    """files that a library in C or Rust wrote into folders of the script, and that were moved to the other files"""
    written: list[str] = field(default_factory=list)
    """files of the user's folders that were really written"""
    stuck: dict[int, str] = field(default_factory=dict)
    """by the ids of processes: where they stood when a hanging run was ended"""

    @property
    def standin(self) -> bool:
        """Whether CPUs stood in for GPUs."""
        return self.gpus in ("standin", "null")


@dataclass
class Run:
    """One run of the script: the events of all its ranks."""

    launch: Launch
    ranks: list[Rank]
    others: list[Event] = field(default_factory=list)
    """events of processes that are no ranks"""
    samples: dict[str, list[int]] = field(default_factory=dict)
    """the contents of the files with numbers of samples"""
    output: str = ""
    """the end of what rank 0 printed, or of what a process that failed printed"""
    ordinary: "Run | None" = None
    """of a run under a provocation: the ordinary run, which `judge` sets"""

    @property
    def world(self) -> int:
        """Number of ranks that joined."""
        return len(self.ranks)

    @property
    def first(self) -> Rank:
        """Rank 0."""
        return self.ranks[0]

    def any(self, kind: str, **wanted: object) -> bool:
        """Return whether there is such an event on any rank."""
        return any(rank.all(kind, **wanted) for rank in self.ranks)

    def together(self, kind: str, **wanted: object) -> list[tuple[Event, ...]]:
        """Return, for each k, the k-th event of this kind of all ranks."""
        return list(zip(*(rank.all(kind, **wanted) for rank in self.ranks), strict=False))

    def in_step(self, kind: str, **wanted: object) -> list[tuple[Event, ...]]:
        """Return, of each update, the k-th event of this kind before it of all ranks, where all have so many.

        If one rank validates a batch more than another, the calls of the next epoch still meet each other; and so they
        do if one rank has trained something by itself before the model was wrapped.
        """
        of_ranks: list[dict[int, list[Event]]] = []
        for rank in self.ranks:
            of_ranks.append({})
            wrapped = next((e["step"] for e in rank.all("ddp")), 0)
            for e in rank.all(kind, **wanted):
                of_ranks[-1].setdefault(e["step"] - wrapped, []).append(e)
        return [
            events
            for step in of_ranks[0]
            for events in zip(*(of_rank.get(step, []) for of_rank in of_ranks), strict=False)
        ]

    @cached_property
    def training_calls(self) -> list[tuple[Event, ...]]:
        """The calls of models in training, of all ranks, since a model is wrapped.

        Before, each rank may have trained one by itself, as if every process repeats a short pretraining.
        """
        wrapped = min((e["t"] for e in self.first.all("ddp")), default=0.0)
        calls = self.in_step("forward", train=True, grad=True)
        return [events for events in calls if events[0]["t"] >= wrapped]

    @cached_property
    def training(self) -> set[str]:
        """The loaders whose batches were trained on."""
        return {e["loader"] for r in self.ranks for e in r.all("forward", train=True, grad=True) if e["loader"]}

    @cached_property
    def validating(self) -> set[str]:
        """The loaders whose batches were only evaluated."""
        used = {e["loader"] for r in self.ranks for e in r.all("forward", grad=False) if e["loader"]}
        return used - self.training

    @cached_property
    def model_parallel(self) -> bool:
        """Whether ranks have different parts of a model's computation; some of them then rightly share inputs."""
        models = [e for rank in self.ranks for e in rank.all("model")]
        found = any(e["mesh_dims"] > 1 or e.get("tensor_parallel") for e in models)
        divides = self.divides_layers or self.divides_sequences
        return found or self.any("message") or self.any("inner", name="message") or divides

    @cached_property
    def divides_layers(self) -> bool:
        """Whether layers of the script's own have parts of the weights, and add up what they compute over the ranks."""
        return self.any("inner", sums=True) and not self.any("ddp")

    @cached_property
    def divides_sequences(self) -> bool:
        """Whether ranks have parts of the same samples, such as chunks of a sequence, and gather what these compute."""
        return self.any("gathered_back") and not self.any("ddp")

    @cached_property
    def divides_optimizer(self) -> bool:
        """Whether an optimizer has this rank's part of the weights, which the script gathers into the model.

        That is a sharded optimizer of the script's own (ZeRO, stage 1): no model has its tensors, they are other ones
        on each rank, and the script gathers after its updates.
        """
        firsts = [events for events in self.aligned("gradients") if events[0]["count"] == 0]
        of_no_model = [
            events for events in firsts if all(name.startswith("?") for e in events for name in e["weights"])
        ]
        gathers = [e for e in self.first.all("collective") if e["name"].startswith("all_gather")]
        return len(gathers) > 1 and any(
            len({str(e["weights"]) for e in events}) == len(self.ranks) > 1 for events in of_no_model
        )

    @cached_property
    def crashed(self) -> bool:
        """Whether an error of the script's own ended a rank, not one that only says that another rank is gone."""
        errors = [e for rank in self.ranks for e in rank.all("error")]
        return any(not says_peer_is_gone(e) for e in errors)

    @cached_property
    def whole(self) -> bool:
        """Whether all ranks came to the end of the script: what is not in the events was not done."""
        return self.launch.ended == "end" and not self.any("error") and not any(self.launch.statuses)

    @cached_property
    def cut(self) -> list[Rank]:
        """The ranks that ended by themselves, but whose events do not say so: the last of them were not written."""
        ended = self.launch.ended == "end" and not any(self.launch.statuses)
        return [rank for rank in self.ranks if ended and not rank.all("end")]

    def aligned(self, kind: str) -> list[tuple[Event, ...]]:
        """Return the events about the same update of the same optimizer on all ranks.

        An optimizer is known by the line where it was made: some ranks may have one that the others lack.
        """
        names = [optimizers_of(rank) for rank in self.ranks]
        of_ranks = [
            {(name[e["optimizer"]], e["count"]): e for e in rank.all(kind)}
            for rank, name in zip(self.ranks, names, strict=True)
        ]
        return [tuple(events[key] for events in of_ranks) for key in of_ranks[0] if all(key in e for e in of_ranks)]

    @cached_property
    def sharded(self) -> bool:
        """Whether ranks have parts of the weights only."""
        return any(e["sharded"] for rank in self.ranks for e in rank.all("model"))

    @cached_property
    def exchanges_gradients(self) -> bool:
        """Whether gradients were seen to go from rank to rank: by DDP, FSDP, or a collective of the script's own."""
        reduced = any(e.get("gradient") for rank in self.ranks for e in rank.all("collective"))
        return self.sharded or self.any("ddp") or reduced

    def made(self, loader: str) -> Event:
        """Return the event of the loader with this key."""
        return next(e for rank in self.ranks for e in rank.all("loader") if e["loader"] == loader)

    def epochs(self, loaders: set[str]) -> dict[tuple, list[dict[int, Event]]]:
        """Return the passes over each kind of data: for each pass, the event of each rank.

        Loaders of one line with the same data set and size are the same kind: some scripts make them anew in each
        epoch. A pass from which only one batch was taken, of many, was only a look at the shapes.
        """
        found: dict[tuple, list[dict[int, Event]]] = defaultdict(list)
        for rank in self.ranks:
            counts: Counter[tuple] = Counter()
            sizes = {e["dataset"]: e["size"] for e in rank.all("dataset")}
            for event, given in passes_with_batches(rank):
                if event["loader"] in loaders and (given > 1 or event.get("batches", 1) < 2):
                    made = self.made(event["loader"])
                    kind = made["at"], made["dataset"], sizes.get(event.get("dataset")), made["sampler"]
                    if counts[kind] == len(found[kind]):
                        found[kind].append({})
                    found[kind][counts[kind]][rank.number] = event
                    counts[kind] += 1
        return found

    def seeded_alike(self, generator: str, before: float) -> Event | None:
        """Return the last event that sets a generator before a time, if it is the same seed or state on all ranks."""
        last = [[e for e in rank.all("seed", generator=generator) if e["t"] <= before][-1:] for rank in self.ranks]
        events = [e for found in last for e in found]
        alike = len(events) == self.world and len({(e["at"], e["value"]) for e in events}) == 1
        return events[0] if alike else None

    @cached_property
    def samples_read(self) -> list[tuple[Event, ...]]:
        """What was read from the same data set on all ranks: of one class, in loaders of the same lines.

        One rank may have a data set more than another, such as for a training of its own.
        """
        of_ranks: list[dict[tuple, Event]] = []
        for rank in self.ranks:
            of_ranks.append({})
            counts: Counter[tuple] = Counter()
            loaders: dict[int | None, set[str]] = defaultdict(set)
            for e in rank.all("pass"):
                for number in {e.get("dataset"), e.get("base")}:
                    loaders[number].add(self.made(e["loader"])["at"])
            for e in rank.all("samples"):
                kind = e["cls"], e.get("collated"), frozenset(loaders[e["dataset"]])
                of_ranks[-1][(*kind, counts[kind])] = e
                counts[kind] += 1
        return [tuple(found[key] for found in of_ranks) for key in of_ranks[0] if all(key in e for e in of_ranks)]

    @cached_property
    def differing(self) -> set[str]:
        """The classes of data sets in which a number means another sample on another rank, as far as was looked."""
        found = set()
        for events in self.samples_read:
            numbers = [n for n in events[0]["contents"] if all(n in e["contents"] for e in events)]
            parts = range(min((len(e["steady"]) for e in events), default=0))
            steady = [part for part in parts if all(e["steady"][part] for e in events)]
            if any(
                len({e["contents"][n][part][0] for e in events if part < len(e["contents"][n])}) > 1
                for n in numbers
                for part in steady
            ):
                found.add(events[0]["cls"])
        return found

    def same_data(self, parts: dict[int, Event]) -> bool:
        """Return whether the numbers of the samples in these passes mean the same samples on all ranks."""
        made = {self.made(event["loader"])["dataset"] for event in parts.values()}
        if made & self.differing:
            return False
        contents = {
            e.get("content")
            for rank in self.ranks
            if rank.number in parts
            for e in rank.all("dataset", dataset=parts[rank.number].get("base"))
        }
        return len(contents) < 2

    def numbers(self, event: Event) -> list[int]:
        """Return the numbers of the samples of a pass or a data set."""
        return self.samples.get(event.get("file") or "", [])


def says_peer_is_gone(error: Event) -> bool:
    """Return whether an exception only says that another rank is gone."""
    return bool(re.search(r"gloo|nccl|connection|timed? ?out|peer", error["text"], re.IGNORECASE))


def optimizers_of(rank: Rank) -> dict[int, tuple[str, int]]:
    """Return for each number of an optimizer the line where it was made, and which one of this line it is."""
    names: dict[int, tuple[str, int]] = {}
    made_at: Counter[str] = Counter()
    for event in rank.all("gradients"):
        if event["optimizer"] not in names:
            line = event.get("made") or f"optimizer {event['optimizer']}"
            names[event["optimizer"]] = line, made_at[line]
            made_at[line] += 1
    return names


def passes_with_batches(rank: Rank) -> list[tuple[Event, int]]:
    """Return each pass of a rank, and how many batches were taken from it."""
    open_passes: dict[str, list] = {}
    found: list[list] = []
    for e in rank.events:
        if e["e"] == "pass":
            open_passes[e["loader"]] = [e, 0]
            found.append(open_passes[e["loader"]])
        elif e["e"] == "batch" and e["loader"] in open_passes:
            open_passes[e["loader"]][1] += 1
    return [(event, count) for event, count in found]


def read(scratch: Path) -> Run:
    """Return the run whose events are in a folder."""
    launch = Launch(**json.loads((scratch / "run.json").read_text()))
    launch.stuck = {int(number): where for number, where in launch.stuck.items()}
    processes = {}
    for file in sorted((scratch / "logs").glob("*.jsonl")):
        processes[int(file.stem)] = _events_in(file)
    samples = {file.name: _samples_in(file) for file in (scratch / "logs").glob("*.samples")}
    ranks: list[Rank] = []
    others: list[Event] = []
    parents: dict[int, Rank] = {}
    for pid, events in processes.items():
        if any(e["e"] in ("forward", "update", "init") for e in events):
            joined = next((e for e in events if e["e"] == "init"), None)
            number = joined["rank"] if joined else int(events[0].get("rank") or 0)
            parents[pid] = Rank(number, events)
            ranks.append(parents[pid])
    for pid, events in processes.items():
        if pid not in parents:
            rank = parents.get(events[0]["parent"]) if events else None
            (rank.workers if rank else others).extend(e | {"pid": pid} for e in events)
    ranks.sort(key=lambda rank: rank.number)
    for rank in ranks:
        mark_validation_with_gradients(rank)
    return Run(launch, _alone(ranks), others, samples, _output(scratch, launch))


def mark_validation_with_gradients(rank: Rank) -> None:
    """Let calls of a validation that forgets no_grad() count as calls without gradients, marked as ``for_nothing``.

    The batches of a loader were trained on if one of them was the last before an update, or if they came in more
    updates than it made passes (one of two loaders that are read in turns). If no loader was, nothing is changed:
    the script may update its weights without an optimizer.
    """
    since_update: list[str] = []
    updates, passes, trained = Counter[str](), Counter[str](), set[str]()
    for e in rank.events:
        if e["e"] == "forward" and e["grad"] and e["loader"]:
            since_update.append(e["loader"])
        elif e["e"] == "pass":
            passes[e["loader"]] += 1
        elif e["e"] == "update" and since_update:
            trained.add(since_update[-1])
            updates.update(set(since_update))
            since_update = []
    trained |= {loader for loader, count in updates.items() if count > passes[loader]}
    for e in rank.all("forward", grad=True) if trained else ():
        if e["loader"] and e["loader"] not in trained:
            e |= {"grad": False, "for_nothing": True}


def _output(scratch: Path, launch: Launch) -> str:
    failed = [number for number, status in enumerate(launch.statuses) if status]
    file = scratch / f"rank{failed[0] if failed else 0}.out"
    return file.read_text(errors="replace")[-3000:] if file.exists() else ""


def _alone(ranks: list[Rank]) -> list[Rank]:
    """Return one rank of each number, and rank 0 alone if it has joined no others: a script for one process."""
    joined = any(e["world_size"] > 1 for rank in ranks for e in rank.all("init"))
    numbers = {rank.number: rank for rank in reversed(ranks)}
    return [numbers[number] for number in sorted(numbers)] if joined else ranks[:1]


def _events_in(file: Path) -> list[Event]:
    events = []
    for line in file.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # the process was killed while it wrote this line
            events.append(json.loads(line))
    return events


def _samples_in(file: Path) -> list[int]:
    numbers = array("q")
    numbers.frombytes(file.read_bytes()[: file.stat().st_size // 8 * 8])
    return numbers.tolist()


def write_launch(launch: Launch, scratch: Path) -> None:
    """Store how a run was started and how it ended, for `read`."""
    (scratch / "run.json").write_text(json.dumps(asdict(launch)))
