"""The environment variables of a process on null GPUs."""

import os
from collections.abc import Mapping
from pathlib import Path

from . import build, calibration
from .gpus import clock_of, of_sm, read, settings

HOOK = Path(__file__).resolve().parent / "hook"


def environment(
    base: Mapping[str, str] | None = None,
    *,
    gpus: int = 1,
    gb: float = 0,
    sm: int = 90,
    values: bool = False,
    world: int = 0,
    timeout: float = 600,
    clock: str = "",
    host: float = 1,
    calibrate: str = "",
) -> dict[str, str]:
    """Return the environment of a process on null GPUs, and of all that it starts. Compile the library if needed.

        subprocess.run(["python", "train.py"], env=nullgpu.environment(gpus=2, values=True))

    Args:
        base: the environment to start from (default: that of this process). CUDA_VISIBLE_DEVICES is removed from it
            if it hides all GPUs, because it would hide null GPUs too.
        gpus: number of GPUs of the machine, at most 64.
        gb: GiB of each GPU's memory; 0: 80, or with ``clock`` those of its GPU.
        sm: compute capability times 10: 75, 80, 86, 89, 90, 100 or 120.
        values: let the CPU compute the values; otherwise they are zeros, or what was there before.
        world: be rank 0 of so many ranks, of which the others do not exist; 0: no such emulation.
        timeout: seconds that a rank waits for the others in a collective.
        clock: let operations take the time of this GPU: a100, h100, t4, l4, or a TOML file; it also sets sm.
        host: how many times as fast as this host the simulated one is; with ``clock``.
        calibrate: a trace of torch.profiler whose durations come before those of the curves; with ``clock``.

    Raises:
        NotPossible: there can be no null GPU here (another system, no compiler, no PyTorch with CUDA).
        gpus.Unknown: there is no such GPU for the clock.
        calibration.Unusable: the trace has no kernels or no shapes.
    """
    env = dict(os.environ if base is None else base)
    gpu = read(clock) if clock else of_sm(sm)
    if clock:
        sm, gb = int(gpu["sm"]), gb or float(gpu["gb"])
    more = clock_of(gpu, host) if clock else {}
    if calibrate:
        calibration.read(Path(calibrate))
        more["calibration"] = os.path.abspath(calibrate)
    told = settings(gpu, gpus=gpus, gb=gb or 80, sm=sm, values=values, world=world, timeout=timeout, **more)
    library = build.library()
    env |= {"NULLGPU_LIBRARY": str(library), "NULLGPU_SETTINGS": told.dump()}
    for name, first, separator in (
        ("LD_PRELOAD", library, " "),
        ("LD_LIBRARY_PATH", library.parent, os.pathsep),
        ("PYTHONPATH", HOOK, os.pathsep),
    ):
        env[name] = separator.join(filter(None, (str(first), env.get(name))))
    if env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        del env["CUDA_VISIBLE_DEVICES"]
    if world:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(min(world, gpus))}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # required by init_process_group, but never used
        env["TORCH_NCCL_RANKS_PER_ROOT"] = "1000000"  # otherwise, from 128 ranks on, others send addresses too
    return env
