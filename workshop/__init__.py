"""The small common package of the multi-GPU training workshop: what a train script needs and nobody copies.

explain      known errors of PyTorch and the operating system; the only place that leans on torch's private names
errors       a user's mistake, reported in one line
paths        where data sets and runs are
config       the flags that all lessons share, read from YAML files and the command line
hardware     the device, the CPUs, the memory, what machine and software this is
datasets     one file per data set: its files, how to check and open them
models       one file per model
checks       what a device does not have, or flags that do not fit together
loaders      one file per way to load samples, all with one interface
profiling    line profile, throughput, traces, the monitor
log          what a run leaves: log lines, TensorBoard curves, summary.json

A module imports only from modules above it in this list.
"""
