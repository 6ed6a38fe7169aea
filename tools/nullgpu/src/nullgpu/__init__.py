"""A GPU that computes nothing: PyTorch's own CUDA code runs on a machine without a GPU.

    nullgpu [--gpus 2] [--gb 80] [--sm 90] [--values] [--report] [--clock a100] [--json FILE] COMMAND...

A library that is loaded before NVIDIA's (``LD_PRELOAD``) answers the functions of CUDA, cuBLAS, cuDNN, NCCL and NVML
that PyTorch calls. Everything above them is PyTorch's: allocator, streams, autocast, graphs, DDP, FSDP2.

What starts a command:

command      the command line
variables    the environment variables of a process on null GPUs: `nullgpu.environment`
gpus         the figures of GPUs
measure      measures a real GPU, and writes a file of its figures
fit          fits a curve to kernels that were timed
build        compiles native/*.cpp, once for each version of PyTorch
symbols      the functions that PyTorch's libraries need, and the C++ of those that are not written by hand
interface    what the compiled library and Python share: settings, counters, spans, limits

What runs in its processes, as soon as torch is imported (hook/sitecustomize.py):

start        the preparation of a process
library      the counters and the observer of the compiled library
graphs       captures and replays of CUDA graphs
updates      the ends of updates of weights, and waits for a loader
values       values, computed on the CPU in the same memory
draws        random numbers of the GPU, drawn on the CPU
kernels      operations that only CUDA has, on the CPU
norms        norms of CUDA, on the CPU
sparse       sparse tensors, on the CPU
zeros        without values: what is left uninitialized, and what needs values all the same
world        one process as rank 0 of a job of any size
record       data for the report
clock        the clock: it observes operations in the first updates, then launches have their durations
durations    what work an operation is, from its arguments
curves       how long that takes on a GPU
calibration  how long it took in a trace of the user's
compiled     the same for kernels that torch.compile makes

What shows, when the command has ended, what its processes have left:

timeline     how busy the GPU was, and what it waited for
clocked      the report of the clock
report       the report of launches, waits, copies and memory
"""

from .build import NotPossible
from .variables import environment

__all__ = ["NotPossible", "environment"]
