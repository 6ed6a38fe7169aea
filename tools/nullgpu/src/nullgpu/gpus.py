"""The figures of GPUs: a file for each in gpus/, or a file of the user's in the same form."""

import tomllib
from pathlib import Path
from typing import Any

from .curves import Curves, Gpu, measured_on
from .interface import Settings

FOLDER = Path(__file__).resolve().parent / "gpus"
OF_SM = {75: "t4", 80: "a100", 86: "a40", 89: "l4", 90: "h100", 100: "b200", 120: "rtx5090"}
"""for each compute capability (times 10) the GPU that stands for it"""
HARDWARE = (
    *("multiprocessors", "threads_per_multiprocessor", "blocks_per_multiprocessor", "shared_memory"),
    *("shared_memory_of_block", "l2_cache", "clock_rate", "memory_bus_width", "bandwidth"),
)
"""keys that are `Settings` of the same name"""
CLOCK = ("peak", "pinned", "pageable", "inside", "between")
FORMATS = ("fp32", "tf32", "bf16", "fp16")
LAUNCH = 4e-6
"""seconds that the real driver keeps the host busy for each launch; it differs by host: 3 to 10 µs are reported"""
SHORTEST = 3.9e-6
"""seconds from the start of the shortest kernel to the start of the next one, by CUDA's events on an H200"""
IN_GRAPH = 0.98e-6
"""the same in a CUDA graph"""


class Unknown(Exception):
    """There is no such GPU, or its file lacks something."""


def of_sm(sm: int) -> dict[str, Any]:
    """Return the figures of the GPU with this compute capability, or of the newest one that is older."""
    return read(OF_SM[max((known for known in OF_SM if known <= sm), default=min(OF_SM))])


def read(name: str) -> dict[str, Any]:
    """Return the figures of a GPU in gpus/, or of a TOML file, which may say what differs from a GPU: like = "a100".

    Raises:
        Unknown: there is none of this name, or something is missing.
    """
    file = FOLDER / f"{name}.toml" if (FOLDER / f"{name}.toml").exists() else Path(name)
    if not file.is_file():
        known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.toml") if "\n[clock]" in one.read_text()))
        raise Unknown(f"--clock knows {known}, or takes a TOML file like those in {FOLDER}; there is no {name}")
    try:
        found = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Unknown(f"{file} is no TOML: {error}") from None
    if like := found.pop("like", ""):
        found = merged(read(like), found)
    if missing := [key for key in ("name", "sm", "gb", *HARDWARE) if key not in found]:
        raise Unknown(f"{file} lacks {', '.join(missing)}")
    return found


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the figures with changes, also of some keys of a table."""
    both = dict(base)
    for key, value in changes.items():
        both[key] = merged(base.get(key, {}), value) if isinstance(value, dict) else value
    return both


def clock_of(gpu: dict[str, Any], host_speed: float) -> dict[str, Any]:
    """Return the `Settings` of the clock of a GPU.

    Raises:
        Unknown: it has no figures for a clock.
    """
    found = gpu.get("clock", {})
    missing = [key for key in CLOCK if key not in found]
    missing += [f"peak.{key}" for key in FORMATS if "peak" in found and key not in found["peak"]]
    if missing:
        raise Unknown(f"{gpu['name']} has no figures for --clock: its file lacks, in [clock], {', '.join(missing)}")
    made = {"clock": True, "name": gpu["name"], "host_speed": host_speed, "peak": found["peak"]}
    made["measured"] = measured(gpu)
    shortest = found.get("shortest", SHORTEST)
    made |= {"launch": found.get("launch", LAUNCH), "shortest": shortest, "in_graph": min(shortest, IN_GRAPH)}
    made |= {"copied": gpu["bandwidth"] * Curves(curves_of(gpu)).parameters["elements"]["share"]}
    made |= {name: found[name] for name in ("pinned", "pageable")}
    for where in ("inside", "between"):
        made |= {f"latency_{where}": found[where]["latency"], f"network_{where}": found[where]["bandwidth"]}
    return made


def curves_of(gpu: dict[str, Any]) -> Gpu:
    """Return the figures of a GPU that the curves need."""
    clock = gpu["clock"]
    shortest = clock.get("shortest", SHORTEST)
    figures = (clock["peak"], gpu["bandwidth"], gpu["multiprocessors"], gpu["clock_rate"], shortest)
    return Gpu(gpu["name"], *figures, measured(gpu))


def measured(gpu: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the curves that were fitted to kernels of this GPU.

    A file that is like another GPU's has its parameters, too; but an H200 has its own: all in curves.json.
    """
    return {} if gpu["name"] == measured_on() else gpu["clock"].get("measured", {}).get("curves", {})


def settings(gpu: dict[str, Any], **others: Any) -> Settings:  # noqa: ANN401
    """Return the settings of a process on this GPU."""
    return Settings(**{key: gpu[key] for key in HARDWARE}, **others)
