"""The small common package of the multi-GPU training workshop: what every train script imports.

explain      known errors of PyTorch and the operating system; the only module that uses private names of torch
errors       a user's mistake, reported in one line
paths        where data sets and runs are
jsonfile     small JSON files
seeds        seeds derived from seed, epoch, step and so on
ranks        rank, world size and device of this process
start        what takes how long until the first step has ended
config       the flags that lessons share, read from YAML files and the command line
hardware     device, CPUs, memory, and a description of machine and software
datasets     one file per data set: its files, how to check and open them
models       one file per model
checks       options that the device lacks, and flags that exclude each other
loaders      one file per way to load samples, all with one interface
run          the folder of a run, and summary.json
log          log lines and TensorBoard curves
profiling    line profile, throughput, traces, the monitor

A module imports only from modules above it in this list.
"""
