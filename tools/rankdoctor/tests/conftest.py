"""The tests are a user outside of any job, on a machine without GPUs, whatever they themselves run in."""

import os

for name in [name for name in os.environ if name.startswith("SLURM")]:
    del os.environ[name]
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # several processes share the cores
