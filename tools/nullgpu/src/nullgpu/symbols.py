"""Which functions of NVIDIA's libraries PyTorch needs, and C++ for those that are not written by hand.

The list follows from the installed libraries: every function that they leave undefined and that belongs to CUDA's
runtime, its driver, cuBLAS, cuDNN, cuSPARSE, cuSOLVER, cuFFT, NCCL or CUPTI. Each gets its C++ in one of these ways:

- *written*: it is in ``src/*.cpp``, because PyTorch reads what it answers
- *work*: it only computes something on the GPU, so it counts as a launch, and does nothing
- *create*: it makes a handle or a descriptor, whose content is never read
- *accept*: it sets or frees something
- *size*: it answers how much workspace another function needs: none
- *missing*: it ends the process with its name
"""

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

REPLACED = re.compile(r"cuda[A-Z]|cu(?!File)[A-Z]|cublas|cudnn|cufft|cusparse|cusolver|nccl|cupti|__cuda")
"""functions of the libraries that the null GPU stands in for; nvrtc and cuFile work, or fail, as they are"""
NO_WORK = r"(?!\w+?(Create(?!Identity)|Destroy|Logger|[SG]et(?!Matrix|Vector)[A-Z]))"
WORK = re.compile(
    NO_WORK + r"(cublas([SDCZ][a-z]|I[sdcz]|Gemm|Dot|LtMatmul$)"
    r"|cudnn(Convolution|BatchNormalization|PoolingForward|RNN(Forward|Backward)|CTCLoss|SpatialTf)"
    r"|cusolverDn[SDCZX][a-z]+(?!.*(bufferSize|Set))"
    r"|cusparse([SDCZ][a-z]|X[a-z]|Sp[A-Z]|SDDMM|Csr|CreateIdentity)(?!.*(bufferSize|GetSize|Attribute|Descr|zeroPivot|Nnz))"
    r"|cusparseLt(Matmul$|SpMMA)|cufftXtExec|cublas(Get|Set)(Matrix|Vector)Async)"
)
CREATE = re.compile(r"(cublas|cudnn|cusparse|cusolver)\w*(create|Create|Init)")
ACCEPT = re.compile(r"(cublas|cudnn|cusparse|cusolver|cufft)\w*(Set|[dD]estroy|Restore)|cudaKernelSetAttribute")
SIZE = re.compile(r"\w*([bB]ufferSize|WorkspaceSize|GetWorkspace|ReserveSpaceSize)")

PREFIX = """\
#include <stdlib.h>
struct CUstream_st;
typedef unsigned long u64;
namespace nullgpu {
void launch_library(const char*, const void*, u64, double);
u64 mix_all(const u64*, int);
void set_stream(void*, CUstream_st*);
[[noreturn]] void missing(const char*);
}
extern "C" {
#pragma GCC visibility push(default)"""
"""without NVIDIA's headers, whose declarations have the arguments that are left out here"""

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def undefined(library: Path) -> set[str]:
    """Return the functions of the replaced libraries that a shared library needs from others."""
    printed = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True).stdout
    names = {line.split()[-1].partition("@")[0] for line in printed.splitlines() if line.strip()}
    return {name for name in names if REPLACED.match(name)}


def defined(objects: Iterable[Path]) -> set[str]:
    """Return the functions that compiled files define."""
    printed = subprocess.run(
        ["nm", "--defined-only", "--extern-only", *map(str, objects)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in printed.splitlines() if len(line.split()) == 3}


def driver_functions(cuda_h: str) -> set[str]:
    """Return the functions of the driver that ``cuda.h`` declares: PyTorch asks for them by name, at run time."""
    text = COMMENT.sub("", cuda_h)
    names = set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", text)) - set(re.findall(r"#define\s+(cu\w+)\s*\(", text))
    renamed = dict(re.findall(r"#define\s+(cu[A-Z]\w+)\s+(?:__CUDA_API_PT\w+\()?(cu[A-Z]\w+)", text))
    return {renamed.get(name, name) for name in names}


def parameters(name: str, headers: Mapping[Path, str]) -> tuple[str, str] | None:
    """Return the header that declares a function, and the text between its parentheses; None if no header does."""
    for header, text in headers.items():
        if found := re.search(rf"\b{name}\s*\(([^;{{]*?)\)\s*;", text):
            return header.name, found[1]
    return None


def kind(name: str) -> str:
    """Return how a function that is not written by hand gets its C++."""
    if SIZE.match(name):
        return "size"
    for way, pattern in (("work", WORK), ("create", CREATE), ("accept", ACCEPT)):
        if pattern.match(name):
            return way
    return "missing"


def split(declared: str) -> list[str]:
    """Return the arguments of a declaration, one by one."""
    return [" ".join(one.split()) for one in declared.split(",")]


def zero_info(name: str, declared: str) -> str | None:
    """Return the C++ of a function that also says on the GPU whether it has succeeded: with zeros; None for others."""
    arguments = split(declared)
    info = next(
        (n for n, it in enumerate(arguments) if re.match(r"int ?\* ?(info|infoArray|devInfo|d_info)$", it)), None
    )
    batch = next((n for n, it in enumerate(arguments) if it in ("int batchSize", "int batchCount")), None)
    if info is None or any(re.match(r"(float|double) \w+$", it) for it in arguments):
        return None
    numbers = {info: "int*"} | ({} if batch is None else {batch: "int"})
    plain = ", ".join(f"{numbers.get(n, 'void*')} a{n}" for n in range(len(arguments)))
    size = "1" if batch is None else f"a{batch}"
    return (
        f"int {name}({plain}) {{ for (int i = 0; i < {size}; ++i) a{info}[i] = 0; "
        f'nullgpu::launch_library("{name}", a0, 0, 0); return 0; }}'
    )


WITHOUT_HANDLE = re.compile(r"cublas(Get|Set)(Matrix|Vector)|cusparseLt")
"""functions whose first argument is no handle that `stub` has made"""
NUMBER = re.compile(
    r"(int|int64_t|long long int|size_t|cublas(Operation|Gemm|Compute)\w*_t|cuda ?DataType(_t)?)\s+\w+$"
)
SIZES = ("m", "n", "k", "batchCount")
"""arguments of a product of matrices to which its work is proportional"""


def product(name: str, declared: str) -> str:
    """Return the C++ of a function of cuBLAS, which tells the clock the numbers among its arguments."""
    plain, numbers, sizes = [], [], []
    for at, argument in enumerate(split(declared)):
        if re.match(r"(float|double)\s+\w+$", argument):
            plain.append(f"{argument.split()[0]} a{at}")
        elif NUMBER.match(argument):
            wide = re.match(r"(int64_t|long long int|size_t)\s", argument)
            plain.append(f"{'long' if wide else 'int'} a{at}")
            numbers.append(f"(u64)a{at}")
            sizes += [f"(double)a{at}"] if argument.split()[-1] in SIZES else []
        else:
            plain.append(f"void* a{at}")
    size = " * ".join(sizes) if len(sizes) > 2 else "0"  # fewer: no product
    return (
        f"int {name}({', '.join(plain)}) {{ u64 all[] = {{{', '.join([*numbers, '0'])}}}; nullgpu::launch_library("
        f'"{name}", a0, nullgpu::mix_all(all, {len(numbers)}), {size}); return 0; }}'
    )


def stub(name: str, headers: Mapping[Path, str]) -> str:
    """Return the C++ of a function that is not written by hand."""
    if re.match(r"(cusolverDn|cusparse)SetStream", name):
        return f"int {name}(void* handle, CUstream_st* stream) {{ nullgpu::set_stream(handle, stream); return 0; }}"
    way = kind(name)
    if way == "work" and (declared := parameters(name, headers)) and (typed := zero_info(name, declared[1])):
        return typed
    if way == "work" and WITHOUT_HANDLE.match(name):
        return f'int {name}(...) {{ nullgpu::launch_library("{name}", 0, 0, 0); return 0; }}'
    if way == "work" and name.startswith("cublas") and (declared := parameters(name, headers)):
        return product(name, declared[1])
    if way == "work":
        return f'int {name}(void* handle, ...) {{ nullgpu::launch_library("{name}", handle, 0, 0); return 0; }}'
    if way == "create":
        return f"int {name}(void** made, ...) {{ *made = calloc(1, 256); return 0; }}"
    if way == "accept":
        return f"int {name}(...) {{ return 0; }}"
    if way == "size" and (declared := parameters(name, headers)):
        arguments = split(declared[1])
        answers = []
        plain = []
        for number, argument in enumerate(arguments):
            if found := re.match(r"(int|size_t)\s*\*\s*\w+$", argument):
                answers.append(f"*a{number} = 0;")
                plain.append(f"{found[1]}* a{number}")
            else:  # a number or a pointer: the width of a register, or a floating-point number, which has its own
                floating = re.match(r"(float|double)\s+\w+$", argument)
                plain.append(f"{floating[1] if floating else 'void*'} a{number}")
        if answers:
            return f"int {name}({', '.join(plain)}) {{ {' '.join(answers)} return 0; }}"
    return f'void {name}() {{ nullgpu::missing("{name}"); }}'


def stubs(needed: Iterable[str], headers: Mapping[Path, str]) -> str:
    """Return a C++ file with all functions in ``needed``."""
    lines = [PREFIX]
    lines += [stub(name, headers) for name in sorted(needed)]
    return "\n".join([*lines, "#pragma GCC visibility pop", "}", ""])
