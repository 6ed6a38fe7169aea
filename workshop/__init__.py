"""The small common package of the multi-GPU training workshop. A room imports only from rooms above it in this map.

errors        a user's mistake, told in one line; warnings
paths         where data sets and runs are
signals       being told to stop
hardware      the device, the CPUs, what machine and software this is
config        the flags, in groups that a lesson puts side by side
commandline   YAML files and flags -> one configuration
datasets      one file per data set: its files, how to check and open them
distributed   ranks, the process group, heartbeats, agreement, DistributedDataParallel
models        one file per model
loaders       one file per rung of the data ladder, all with one interface
profiling     names for parts of a step, throughput, traces, the monitor
step          optimizers, number formats, CUDA graphs
run           what train.py sees of a run: its record and its progress
measuring     what the experiments of several lessons share
"""
