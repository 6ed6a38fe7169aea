"""The ranks: how they find each other, what they exchange besides gradients, and how a failed rank is noticed."""

from workshop.distributed.all_reduce_counter import AllReduceCounter
from workshop.distributed.failure_detector import failure_detector
from workshop.distributed.rendezvous import int_from_env, rendezvous, started_by_srun

__all__ = ["AllReduceCounter", "failure_detector", "int_from_env", "rendezvous", "started_by_srun"]
