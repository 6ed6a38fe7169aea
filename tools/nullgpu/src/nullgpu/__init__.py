"""A GPU that computes nothing: PyTorch's own CUDA code runs on a machine without a GPU.

    python nullgpu/run.py [--gpus 2] [--gb 80] [--sm 90] [--values] [--report] COMMAND...

A library that is loaded before NVIDIA's (``LD_PRELOAD``) answers the functions of CUDA, cuBLAS, cuDNN, NCCL and NVML
that PyTorch calls. Everything above them is PyTorch's: allocator, streams, autocast, graphs, DDP, FSDP2. The modules:

- `command`: the command line, and the environment in which the command runs
- `build`: compiles ``src/*.cpp`` once for each version of PyTorch
- `symbols`: which functions PyTorch's libraries need, and the C++ of those that are not written by hand
- `library`: the counters and callbacks of the compiled library
- ``hook/sitecustomize.py``: in the processes of the command, starts what follows as soon as torch is imported
- `values`: the CPU computes the values, in the same memory
- `report`: what a step of the script costs the host, and what holds the memory
"""
