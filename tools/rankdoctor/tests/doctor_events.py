"""Events of a correct run on two ranks, written by hand, for tests of the checks: each test changes some of them."""

from rankdoctor.events import Event
from rankdoctor.runs import Launch, Rank, Run

SCRIPT = "/home/me/train.py"
TRAIN, VAL = f"{SCRIPT}:10#0", f"{SCRIPT}:20#0"
SAMPLES, EPOCHS, STEPS = 16, 2, 4
NAMES = ("a.weight", "b.weight", "c.weight")


def at(line: int) -> str:
    """Return a line of the script."""
    return f"{SCRIPT}:{line}"


def correct_run(world: int = 2, **launch: object) -> Run:
    """Return a run of two epochs of four steps: DDP, Adam, dropout, a schedule, validation, a checkpoint."""
    samples: dict[str, list[int]] = {}
    ranks = [Rank(number, list(_events(number, world, samples))) for number in range(world)]
    options = {"script": SCRIPT, "root": "/home/me", "world_size": world, "statuses": [0] * world} | launch
    return Run(Launch(**options), ranks, [], samples)


def _events(rank: int, world: int, samples: dict[str, list[int]]) -> list[Event]:
    events: list[Event] = []
    step = 0

    def add(kind: str, line: int, **fields: object) -> None:
        events.append({"e": kind, "step": step, "t": len(events) / 100, "at": at(line), **fields})

    def one_pass(loader: str, line: int, name: str, numbers: list[int], number: int) -> None:
        samples[name] = numbers
        add("pass", line, loader=loader, workers=0, dataset=number, base=number, batches=STEPS, file=name)

    def call(line: int, loader: str, train: bool, rows: list[int]) -> None:
        add("batch", line, loader=loader, wait=0.001)
        add("forward", line, model=0, cls="Net", train=train, grad=train, loader=loader, random_layers=int(train),
            samples=len(rows), rows=rows, rng=100 * step + rank, ddp=True, sync=train)  # fmt: skip

    add("process", 1, pid=1000 + rank, parent=1, rank=str(rank), argv=["train.py"])
    add("init", 2, rank=rank, world_size=world, seed=rank)
    for number, (loader, sampler) in enumerate(((TRAIN, "DistributedSampler"), (VAL, "MySampler"))):
        add("loader", 10 * (number + 1), loader=loader, workers=0, persistent=False, sampler=sampler, batch_size=2,
            drop_last=False, iterable=False, dataset="Images")  # fmt: skip
        add("dataset", 10 * (number + 1), dataset=number, size=SAMPLES, cls="Images", file=None, objects=None)
    add("ddp", 30, cls="Net", frozen=0)
    add(
        "model",
        40,
        model=0,
        cls="Net",
        made=at(29),
        parameters=3,
        sharded=False,
        groups=0,
        blocks=4,
        mesh_dims=0,
        local_norms=0,
    )
    add("dropout", 41)
    for epoch in range(EPOCHS):
        order = [(5 * number + epoch) % SAMPLES for number in range(SAMPLES)]
        one_pass(TRAIN, 42, f"{rank}_{epoch}", order[rank::world], 0)
        for i in range(STEPS):
            call(43, TRAIN, True, [1000 * epoch + 10 * i + rank, 1000 * epoch + 10 * i + rank + 5])
            add("gradients", 45, optimizer=0, count=step, closure=False, lr=[0.1 - 0.01 * step], state=3 if step else 0,
                gradients={name: [0.5, 1.0 + step] for name in NAMES}, dtypes=["float32"], factor=1.0, others={},
                weights={name: [0.1 * step, 2.0 + step] for name in NAMES})  # fmt: skip
            add("update", 45, optimizer=0, parameters=3, foreign=0, backwards=[at(44)], added=False, graphs=1,
                graph_at=at(44), factors=[[at(44), 2, 0.5, 0]], waits={}, elements=[[at(44), 0, 6, 1 / 6]])  # fmt: skip
            step += 1
        one_pass(VAL, 50, f"v{rank}_{epoch}", list(range(rank, SAMPLES, world)), 1)
        for i in range(STEPS):
            call(51, VAL, False, [7000 + 10 * i + rank])
        add("collective", 53, name="all_reduce", size=1, everyone=True)
        if rank == 0:
            add("write", 55, file="/home/me/model.pt", how="save")
            add("save", 55, file="/home/me/model.pt", tensors=3, shards=0, wrapped=0, on_gpu=False)
    add("trainable", 60, model=0, parameters=3, orphans=[], orphans_with_gradient=0)
    add("schedule", 33, cls="OneCycleLR", steps=8, length=8)
    add("end", 60, how="end")
    return events


def change(run: Run, kind: str, ranks: tuple[int, ...] = (0, 1), wanted: dict | None = None, **fields: object) -> None:
    """Set fields in all events of a kind on some ranks."""
    for number in ranks:
        for event in run.ranks[number].all(kind, **(wanted or {})):
            event.update(fields)


def add(run: Run, kind: str, line: int, ranks: tuple[int, ...] = (0, 1), **fields: object) -> None:
    """Add an event after each update."""
    for number in ranks:
        events = []
        for event in run.ranks[number].events:
            events.append(event)
            if event["e"] == "update":
                events.append({"e": kind, "step": event["step"] + 1, "t": event["t"], "at": at(line), **fields})
        run.ranks[number].events = events
