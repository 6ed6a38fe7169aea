"""Run a training script, unchanged, as several ranks on CPUs, and report its silent faults with their lines.

The modules use relative imports only, because the package has two names: ``doctor`` for the user, and ``_doctor`` in
the processes of the script, which may have a module ``doctor`` of its own.
"""
