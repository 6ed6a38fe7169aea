"""The libraries that compute the same thing: numpy and torch on the CPU, torch, CuPy and JAX on an accelerator.

numpy's way of writing is shared by all of them: with ``xp`` standing for the library, ``xp.linalg.solve(a, b)`` or
``xp.cumsum(x, 0)`` is the same line everywhere. What differs is how data get there and back, and how to wait.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

Array = Any
"""an array of any of the libraries"""


def _as_it_is(anything: Any) -> Any:  # noqa: ANN401
    return anything


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One library on one device."""

    name: str
    version: str
    device: str
    """"cpu", or the kind of accelerator: "cuda", "mps", ..."""
    xp: ModuleType
    """the library itself, as the computations call it"""
    put: Callable[[np.ndarray], Array] = _as_it_is
    """copy a numpy array to the device; on the CPU it may be shared instead"""
    wait: Callable[[Array], Array] = _as_it_is
    """return the array once it is really there: launching on an accelerator returns long before the work is done"""
    fetch: Callable[[Array], np.ndarray] = np.asarray
    """copy an array back into a numpy array"""
    compile: Callable[[Callable], Callable] = _as_it_is
    """make one program of a function that calls the library several times; as it is where there is no compiler"""

    @property
    def on_accelerator(self) -> bool:
        """Whether data must be copied to the device, and launches must be waited for."""
        return self.device != "cpu"


def numpy_backend() -> Backend:
    """numpy: the CPU, several threads in linear algebra only."""
    return Backend(name="numpy", version=np.__version__, device="cpu", xp=np)


def torch_backend(device: torch.device) -> Backend:
    """Return torch on the CPU or on an accelerator, each operation run at once ("eager")."""

    def wait(array: torch.Tensor) -> torch.Tensor:
        torch.accelerator.synchronize()
        return array

    return Backend(
        name="torch",
        version=torch.__version__,
        device=device.type,
        xp=torch,
        put=lambda array: torch.from_numpy(array).to(device),
        wait=_as_it_is if device.type == "cpu" else wait,
        fetch=lambda array: array.cpu().numpy(),
    )


def compiled_torch_backend(device: torch.device) -> Backend:
    """Return torch with torch.compile.

    Raises:
        NotImplementedError: it does not work here; mostly because there is no C++ compiler.
    """
    backend = torch_backend(device)
    compile_ = functools.cache(functools.partial(torch.compile, dynamic=True))  # one program for all sizes
    try:
        compile_(torch.square)(torch.ones(2, device=device))
    except Exception as error:  # torch raises many kinds, some of its own, and a missing compiler is not our failure
        raise NotImplementedError(f"torch.compile does not work here ({type(error).__name__})") from error
    return Backend(**{**vars(backend), "name": "torch.compile", "compile": compile_})


def cupy_backend() -> Backend:
    """CuPy on the current CUDA device.

    Raises:
        ImportError: not installed.
        NotImplementedError: no CUDA device.
    """
    import cupy

    if not cupy.cuda.is_available():
        raise NotImplementedError("no CUDA device")

    def wait(array: Array) -> Array:
        cupy.cuda.get_current_stream().synchronize()
        return array

    return Backend(
        name="cupy",
        version=cupy.__version__,
        device="cuda",
        xp=cupy,
        put=cupy.asarray,
        wait=wait,
        fetch=cupy.asnumpy,
    )


def jax_backend() -> Backend:
    """JAX on its default device: an accelerator if its installation knows one, else the CPU.

    Raises:
        ImportError: not installed.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the GPU's memory at once
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")  # float32 as in the others; on GPUs it would be TF32
    platform = jax.devices()[0].platform
    return Backend(
        name="jax",
        version=jax.__version__,
        device="cuda" if platform == "gpu" else platform,
        xp=jax.numpy,
        put=jax.device_put,
        wait=jax.block_until_ready,
        compile=functools.cache(jax.jit),
    )


def find_backends(device: torch.device, compiled: bool) -> tuple[list[Backend], dict[str, str]]:
    """Return the backends of this machine, and for each that is not here the reason.

    Args:
        device: torch's accelerator, or its CPU where there is none.
        compiled: also torch.compile, whose first compilation takes seconds.
    """
    devices = [torch.device("cpu")] + [device] * (device.type != "cpu")
    makers: list[tuple[str, Callable[[], Backend]]] = [("numpy", numpy_backend)]
    makers += [("torch", functools.partial(torch_backend, d)) for d in devices]
    if compiled:
        makers += [("torch.compile", functools.partial(compiled_torch_backend, d)) for d in devices]
    makers += [("cupy", cupy_backend), ("jax", jax_backend)]

    backends, missing = [], {}
    for name, make in makers:
        try:
            backends.append(make())
        except ImportError:
            missing[name] = "not installed"
        except (NotImplementedError, RuntimeError) as error:
            missing[name] = str(error).splitlines()[0]
    if device.type == "cpu":
        missing["torch on an accelerator"] = "this machine has none"
    return backends, missing
