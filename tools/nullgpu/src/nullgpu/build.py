"""Compile the library of the null GPU: once for each version of PyTorch and of the sources."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from . import interface, symbols

SOURCES = Path(__file__).resolve().parent / "native"
TRIED = ((2, 11), (2, 15))
"""the oldest and the newest version of PyTorch with which the null GPU was tried"""
NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""the library is also what is loaded under the names of NVIDIA's driver"""
FLAGS = ("-O1", "-g1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-include", "without_formats.h")
WARNINGS = ("-Wall", "-Wextra", "-Wshadow")
"""of the sources; generated functions have other arguments than their declarations, so none of them is without one"""
SANITIZERS = {"": (), "address": ("-fsanitize=address",), "thread": ("-fsanitize=thread",)}
"""by name; tests compile the library with them"""


class NotPossible(Exception):
    """Why there can be no null GPU on this machine, and what to do."""


def library(sanitizer: str = "") -> Path:
    """Return the compiled library; compile it if this was not done yet.

    Args:
        sanitizer: "address" or "thread", for tests of the library itself.

    Raises:
        NotPossible: another system, no compiler, no PyTorch with CUDA, or the compiler fails.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise NotPossible(
            f"the null GPU needs Linux on x86-64 or aarch64, and this is {sys.platform} on {platform.machine()}"
        )
    torch = torch_folder()
    flags = (*FLAGS, *SANITIZERS[sanitizer])
    key = hashlib.sha256(f"{torch} {version()} {flags} {interface.header()}".encode())
    for source in (*sorted(SOURCES.iterdir()), Path(symbols.__file__)):
        key.update(source.read_bytes())
    folder = cache() / f"torch-{version()}-{key.hexdigest()[:12]}"
    if not (folder / NAMES[0]).exists():
        compile_into(folder, torch, flags)
    return folder / NAMES[0]


def version() -> str:
    """Return the version of the installed PyTorch."""
    try:
        return distribution("torch").version
    except PackageNotFoundError:
        raise NotPossible("PyTorch is not installed here: activate its environment") from None


def is_tried() -> bool:
    """Whether the null GPU was tried with the installed PyTorch, or one of the same minor version."""
    found = re.match(r"(\d+)\.(\d+)", version())
    return found is not None and TRIED[0] <= (int(found[1]), int(found[2])) <= TRIED[1]


def torch_folder() -> Path:
    """Return the folder of a PyTorch with CUDA, without importing it, which takes seconds."""
    version()
    spec = find_spec("torch")
    assert spec and spec.origin
    folder = Path(spec.origin).parent
    if not (folder / "lib/libtorch_cuda.so").exists():
        raise NotPossible(
            f"torch {version()} is built without CUDA, so it has no code for GPUs to run: install the other one, "
            "from PyPI (6 GB): pip install torch"
        )
    return folder


def cache() -> Path:
    """Return the folder for compiled libraries. LD_PRELOAD takes no path with a space or a colon."""
    own = os.environ.get("NULLGPU_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nullgpu"
    try:
        if re.search(r"[\s:]", str(folder)):
            raise OSError
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        folder = Path(f"/tmp/nullgpu-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def headers(torch: Path) -> list[Path]:
    """Return the folders with the headers of CUDA, cuDNN and NCCL, which come with the libraries that PyTorch uses."""
    names = ("cuda.h", "cublas_v2.h", "cusolverDn.h", "cusparse.h", "cufft.h", "cudnn.h", "nccl.h")
    found = sorted({file.parent for name in names for file in torch.parent.glob(f"nvidia/*/include/{name}")})
    found.append(torch.parent / "triton/backends/nvidia/include")  # has the folder crt, which NVIDIA's package lacks
    for folder in (os.environ.get("CUDA_HOME"), sys.prefix):  # sys.prefix: an environment of conda
        found += [Path(folder, "include"), *Path(folder).glob("targets/*/include")] if folder else []
    return [folder for folder in found if folder.is_dir()]


def compile_into(folder: Path, torch: Path, flags: tuple[str, ...]) -> None:
    """Compile the sources and the generated functions, and put the library under its name when it is complete."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or shutil.which("nm") is None:
        raise NotPossible(
            "the null GPU is compiled at its first use and needs a C++ compiler: install g++ (Debian: apt install g++)"
        )
    folders = headers(torch)
    missing = [
        name
        for name in ("cuda.h", "cuda_runtime_api.h", "cudnn.h", "nccl.h")
        if not any((one / name).exists() for one in folders)
    ]
    if missing:
        names = ", ".join(missing)
        raise NotPossible(f"CUDA's headers are not beside this PyTorch ({names}): install with pip, or set CUDA_HOME")
    print(f"nullgpu: compiling for torch {version()}, once", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        build = Path(scratch)
        (build / "interface.h").write_text(interface.header())
        include = [f"-I{one}" for one in (SOURCES, build)] + [f"-isystem{one}" for one in folders]
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [build / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, *WARNINGS, *include, "-c", str(one), "-o", str(to)]
            for one, to in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
        texts = {
            file: symbols.COMMENT.sub("", file.read_text(errors="replace"))
            for one in folders[:8]
            for file in one.glob("cu*.h")
        }
        generated = build / "generated.cpp"
        generated.write_text(symbols.stubs(needed(torch, texts) - symbols.defined(objects), texts))
        (build / "out").mkdir()
        run(
            [
                compiler,
                *flags,
                "-w",  # its functions have other arguments than their declarations
                *include,
                "-shared",
                str(generated),
                *map(str, objects),
                "-o",
                str(build / "out" / NAMES[0]),
                f"-Wl,-soname,{NAMES[0]}",
                "-ldl",
                "-lpthread",
            ]
        )
        for file in ("generated.cpp", "interface.h"):
            shutil.copy(build / file, build / "out")
        for name in NAMES[1:]:
            (build / "out" / name).symlink_to(NAMES[0])
        try:
            os.rename(build / "out", folder)
        except OSError:  # another process was faster
            if not (folder / NAMES[0]).exists():
                raise


def needed(torch: Path, texts: dict[Path, str]) -> set[str]:
    """Return all functions that PyTorch, torchvision and libraries that ask the driver may want."""
    libraries = [*torch.glob("lib/*.so"), *torch.parent.glob("torchvision/*.so")]
    from_libraries = set().union(*map(symbols.undefined, libraries))
    cuda_h = next(text for file, text in texts.items() if file.name == "cuda.h")
    return from_libraries | symbols.driver_functions(cuda_h)


def run(command: list[str]) -> None:
    """Run the compiler; show its warnings if that is asked for (NULLGPU_VERBOSE)."""
    done = subprocess.run(command, capture_output=True, text=True)
    if os.environ.get("NULLGPU_VERBOSE"):
        sys.stderr.write(done.stderr)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:])
        raise NotPossible(
            f"the null GPU cannot be compiled for torch {version()}: {first} (see the README: a new PyTorch)"
        )
