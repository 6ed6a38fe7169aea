"""What the compiled library and Python share, declared once: settings, counters, notices, kinds of work, spans, limits.

`header` writes it as C++, which `build` compiles into the library as interface.h.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum

MOST_GPUS = 64
"""GPUs of a machine"""
MOST_RANKS = 64
"""processes that a communicator of NCCL can join"""
MOST_SPANS = 400_000
"""spans that the clock notes in a process; later ones are lost"""
MOST_IN_QUEUE = 1000
"""launches that a stream takes before the host waits, about as many as the real driver"""

SKIPPED = 3
"""first updates that no report counts, because PyTorch chooses kernels and allocates memory in them"""
SKIPPED_OF_LONG_RUNS = 11
"""the same in runs of more than twice as many: DDP times its collectives in the first ten"""

COUNTERS = {
    "launches": "kernels, and calls of libraries that launch some",
    "waits": "calls in which the CPU waits for the GPU",
    "copies_to_gpu": "copies from the CPU's memory to the GPU's",
    "copies_from_gpu": "copies from the GPU's memory to the CPU's",
    "copies_on_gpu": "copies within the GPU's memory",
    "pageable_copies": "copies to and from the GPU whose memory on the CPU's side was not pinned",
    "bytes_to_gpu": "bytes of the copies to the GPU",
    "bytes_from_gpu": "bytes of the copies from the GPU",
    "graph_launches": "replays of CUDA graphs",
    "collectives": "collectives, sends and receives of NCCL",
    "collective_bytes": "their bytes",
    "errors": "calls that returned an error",
}
"""what is counted in each process, by name"""


class Notice(IntEnum):
    """What an observer in Python is told of, in the thread in which it happens."""

    WAIT = 0
    COPY = 1
    COLLECTIVE = 2
    MISSING = 3


class Work(IntEnum):
    """What a span is."""

    KERNEL = 0
    TRANSFER = 1
    NETWORK = 2
    HOST_WAITS = 3
    WAITS_FOR_RANK = 4
    GIVES_WAY = 5
    """kernels of another stream run in place of this one's"""


@dataclass
class Span:
    """A piece of work on a stream, or a time in which the host or a stream waited; times in seconds, simulated."""

    start: float
    end: float
    cause: int
    """index of the span of another stream that this one waited for; -1: none"""
    stream: int
    """number of the stream; the numbers have no other meaning"""
    kind: int
    """a `Work`"""
    name: str


@dataclass(frozen=True)
class Settings:
    """What a process on null GPUs is told, as JSON in the environment variable NULLGPU_SETTINGS."""

    gpus: int
    """number of GPUs of the machine"""
    gb: float
    """GiB of each GPU's memory"""
    sm: int
    """compute capability times 10"""
    values: bool
    """let the CPU compute the values"""
    world: int
    """number of ranks, of which this process is rank 0 and the others do not exist; 0: no such emulation"""
    timeout: float
    """seconds that a collective waits for the other ranks"""
    # of the GPU: see gpus/*.toml
    multiprocessors: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    shared_memory: int
    shared_memory_of_block: int
    l2_cache: int
    clock_rate: float
    memory_bus_width: int
    bandwidth: float
    # of the clock
    clock: bool = False
    """let operations take the time of the GPU"""
    name: str = ""
    """of the GPU; only Python reads it"""
    host_speed: float = 1.0
    """how many times as fast the simulated host is as this one"""
    launch: float = 0.0
    """seconds that the driver keeps the host busy for each launch"""
    shortest: float = 0.0
    """seconds of the shortest kernel"""
    in_graph: float = 0.0
    """the same in a CUDA graph, where a kernel follows the one before it sooner"""
    copied: float = 0.0
    """bytes/s that a copy within the GPU reads and writes"""
    pinned: float = 0.0
    pageable: float = 0.0
    latency_inside: float = 0.0
    latency_between: float = 0.0
    network_inside: float = 0.0
    network_between: float = 0.0
    peak: dict[str, float] = field(default_factory=dict)
    """FLOP/s by number format; only Python reads it"""
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    """parameters of curves that were fitted to kernels of this GPU; only Python reads them"""
    calibration: str = ""
    """file with a trace of torch.profiler; only Python reads it"""

    def dump(self) -> str:
        """Return this as text."""
        return json.dumps(asdict(self), separators=(",", ":"))  # C++ looks for "name":

    @classmethod
    def load(cls, text: str) -> "Settings":
        """Return the settings from their text."""
        return cls(**json.loads(text))


CPP = {int: ("int", "(int)"), float: ("double", ""), bool: ("bool", "0 != ")}
"""for each type of a setting, its type in C++, and how it is made of a double"""
IN_SPAN = {float: ("double", "%.9f"), int: ("int", "%d"), str: ("const char*", "%s")}
"""for each type of a span's field, its type in C++, and how it is printed"""


def header() -> str:
    """Return the declarations as C++."""
    settings = [it for it in fields(Settings) if it.type in CPP]
    spans = fields(Span)
    printed = "\\t".join(IN_SPAN[it.type][1] for it in spans)  # type: ignore[index]
    lines = [
        "// Made by interface.py: what the library and Python share.",
        "#pragma once",
        "#include <stdint.h>",
        "#include <stdio.h>",
        "namespace nullgpu {",
        *(f"constexpr int {name} = {value};" for name, value in limits()),
        "struct Counters {",
        *(f"  int64_t {name};  // {meaning}" for name, meaning in COUNTERS.items()),
        "};",
        f"enum Notice {{ {members(Notice)} }};",
        f"enum Work {{ {members(Work)} }};",
        "struct DeclaredSettings {",
        *(f"  {CPP[it.type][0]} {it.name};" for it in settings),  # type: ignore[index]
        "};",
        "template <class Number>  // a function that returns the number of a setting by its name",
        "inline void read(DeclaredSettings& it, Number number) {",
        *(f'  it.{it.name} = {CPP[it.type][1]}number("{it.name}");' for it in settings),  # type: ignore[index]
        "}",
        "struct Span {",
        *(f"  {IN_SPAN[it.type][0]} {it.name};" for it in spans),  # type: ignore[index]
        "};",
        "inline void print(FILE* out, const Span& it) {",
        f'  fprintf(out, "{printed}\\n", {", ".join(f"it.{it.name}" for it in spans)});',
        "}",
        "}  // namespace nullgpu",
    ]
    return "\n".join([*lines, ""])


def limits() -> Iterable[tuple[str, int]]:
    """Return the names and values of the limits in this module."""
    return [(name, value) for name, value in globals().items() if name.startswith("MOST_")]


def members(kinds: type[IntEnum]) -> str:
    """Return the members of an enumeration in C++."""
    return ", ".join(f"{kind.name} = {kind.value}" for kind in kinds)


def read_spans(text: str) -> list[Span]:
    """Return the spans that a process has printed, a line for each, in the order in which they were put."""
    types = [it.type for it in fields(Span)]
    rows = (line.split("\t") for line in text.splitlines())
    return [Span(*(kind(word) for kind, word in zip(types, row, strict=True))) for row in rows]  # type: ignore[operator]
