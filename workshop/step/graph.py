"""A training step as a CUDA graph: recorded once, then launched as a whole instead of kernel by kernel."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from workshop.errors import UserError
from workshop.loaders.sampler import EpochOrder

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""trains on a batch (inputs, targets) that is on the device already, and returns its loss ()"""

EAGER_STEPS = 11
"""how many steps DistributedDataParallel must have made before it can be recorded, says PyTorch's documentation"""


class StepGraph(AbstractContextManager):
    """Makes the first steps as they come, records the next one, and replays it from then on; disabled, it does nothing.

    A graph replays the same kernels on the same addresses. So each batch is copied to where the recorded one would have
    lain, and the loss always appears in the same tensor: read it, or add it up, before the next step. Whatever the step
    decides in Python is decided for good; the learning rate must be a tensor on the device.

    Nothing can be recorded on the default stream. DistributedDataParallel must have been built and have made its first
    steps on the stream that is recorded; these are ordinary training steps, so no batch is used twice.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

    Used as a context manager, it lets go of the recording at the end: as long as there is one, the ranks cannot part.

    Raises UserError: it is enabled, and the last batch of an epoch has fewer samples than the others.
    """

    def __init__(self, enabled: bool, sampler: EpochOrder) -> None:
        self.enabled = enabled
        self.steps = 0
        if enabled:
            require_one_shape(sampler)
            self.stream = torch.cuda.Stream()
            self.graph = torch.cuda.CUDAGraph()

    def __exit__(self, *exception: object) -> None:
        self.graph = None  # tracebacks keep this object, but nothing else keeps the graph

    def around(self, step: Step) -> Step:
        """Return what to call in place of ``step``: it does the same, and launches it as a graph once it can."""
        self.step = step
        return self._train if self.enabled else step

    def _train(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps <= EAGER_STEPS:
            with self.on_its_stream():
                return self.step(inputs, targets)
        if self.steps == EAGER_STEPS + 1:
            self.inputs, self.targets = torch.empty_like(inputs), torch.empty_like(targets)
            # thread_local: threads that pin batches or watch over NCCL may go on calling CUDA while this one records
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = self.step(self.inputs, self.targets)  # recorded only: nothing is computed here
        assert inputs.shape == self.inputs.shape, "batches of several shapes, in spite of require_one_shape"
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()
        return self.loss

    @contextmanager
    def on_its_stream(self) -> Iterator[None]:
        """Run what is inside on the stream to be recorded, after all before it and before all that comes after it."""
        if not self.enabled:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)


def require_one_shape(sampler: EpochOrder) -> None:
    """Raise `UserError` unless all batches of a training epoch have as many samples."""
    rest = sampler.samples % sampler.global_batch_size
    if rest >= sampler.ranks.world_size:  # fewer sit out
        raise UserError(
            f"--cuda_graph needs every batch of one shape: {sampler.samples} samples leave a last batch of {rest}; "
            f"use --limit_train {sampler.samples - rest}"
        )
