"""The small common package of the multi-GPU training workshop. A module imports only from modules above it in this map.

errors        a user's mistake, reported in one line; warnings
entry         how a script starts and ends
paths         where data sets and runs are
signals       signals that ask a run to stop
hardware      the device, the CPUs, the memory, what machine and software this is
config        the flags that all lessons share
checks        what a device does not have, or flags that do not fit together
commandline   YAML files and flags -> one configuration
datasets      one file per data set: its files, how to check and open them
models        one file per model
loaders       one file per way to load samples, all with one interface
distributed   rendezvous, failure detection, counting what DistributedDataParallel sends
profiling     throughput, traces, the monitor
run           what a train script sees of a run: its position and the files that it leaves
"""
