"""The small common package of the multi-GPU training workshop: what a train script needs and nobody copies.

explain      known errors of PyTorch and the operating system; the only place that leans on torch's private names
errors       a user's mistake, reported in one line
paths        where data sets and runs are
jsonfile     small JSON files
seeds        seeds that follow from other numbers
ranks        this process among those that train together
config       the flags that lessons share, read from YAML files and the command line
hardware     the device, the CPUs, the memory, what machine and software this is
datasets     one file per data set: its files, how to check and open them
models       one file per model
checks       what a device does not have, or flags that do not fit together
loaders      one file per way to load samples, all with one interface
run          the folder of a run, and summary.json
log          log lines and TensorBoard curves
profiling    line profile, throughput, traces, the monitor

A module imports only from modules above it in this list.
"""
