"""Run a training script, unchanged, as several ranks on CPUs, and report its silent faults with their lines."""
