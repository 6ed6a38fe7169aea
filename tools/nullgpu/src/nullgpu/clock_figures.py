"""The figures of a GPU for the clock: gpus/*.yaml, and the environment variables that src/clock.cpp reads."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "gpus"
KEYS = ("name", "sm", "gb", "peak", "bandwidth", "pinned", "pageable", "inside", "between")
LAUNCH = 4e-6
"""seconds that the real driver keeps the host busy for each launch; it differs by host: 3 to 10 µs are reported"""


class Unknown(Exception):
    """There is no such GPU, or its file lacks something."""


def read(name: str) -> dict[str, Any]:
    """Return the figures of a GPU that gpus/ has, or of a YAML file. Raises Unknown."""
    file = FOLDER / f"{name}.yaml" if (FOLDER / f"{name}.yaml").exists() else Path(name)
    if not file.is_file():
        known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.yaml")))
        raise Unknown(f"--clock knows {known}, or takes a YAML file like those in {FOLDER}; there is no {name}")
    import yaml  # the rest of this package needs torch alone

    try:
        found = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise Unknown(f"{file} is no YAML: {error}") from None
    missing = [key for key in KEYS if key not in (found if isinstance(found, dict) else {})]
    if missing:
        raise Unknown(f"{file} lacks {', '.join(missing)}")
    return found


def environment(figures: dict[str, Any], host: float) -> dict[str, str]:
    """Return the environment variables of a run with this GPU."""
    numbers = {
        "NULLGPU_HOST_SPEED": host,
        "NULLGPU_LAUNCH": LAUNCH,
        "NULLGPU_PINNED": figures["pinned"],
        "NULLGPU_PAGEABLE": figures["pageable"],
        "NULLGPU_BANDWIDTH": figures["bandwidth"],
    }
    for where in ("inside", "between"):
        numbers[f"NULLGPU_LATENCY_{where.upper()}"] = figures[where]["latency"]
        numbers[f"NULLGPU_NETWORK_{where.upper()}"] = figures[where]["bandwidth"]
    return {name: str(float(value)) for name, value in numbers.items()} | {"NULLGPU_CLOCK": json.dumps(figures)}
