"""What if a parameter gets no gradient? A model with two heads, of which only one is used, on two ranks.

    torchrun --standalone --nproc-per-node 2 experiments/unused_parameters.py
    torchrun --standalone --nproc-per-node 2 experiments/unused_parameters.py --find

You should see that the first step ends without a message, although its gradients were not averaged, and that the second
step ends with an error. With --find, DDP looks for unused parameters in every step, and both steps are right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.flags import Parser
from lab.process_group import process_group
from workshop.errors import run_reporting_user_errors
from workshop.profiling.throughput import max_over_ranks


class TwoHeads(nn.Module):
    """A network with a head for each of two tasks; this script only trains the first task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.first_head = nn.Linear(8, 1)
        self.second_head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the first head, (N, 1), for ``inputs`` (N, 8)."""
        return self.first_head(self.body(inputs))


def main() -> None:
    """Make two steps; say after each whether the ranks have the same gradient, and what went wrong."""
    parser = Parser(__doc__)
    parser.add_argument("--find", action="store_true", help="give DDP find_unused_parameters=True")
    find = parser.parse_args().find
    with process_group() as (rank, _, device):
        torch.manual_seed(rank)  # other samples on each rank; DDP sends the weights of rank 0 to all
        model = TwoHeads().to(device)
        ddp_model = DistributedDataParallel(model, find_unused_parameters=find)
        for step in (1, 2):
            inputs = torch.randn(4, 8, device=device)
            try:
                ddp_model(inputs).mean().backward()
            except RuntimeError as error:
                if rank == 0:
                    print(f"step {step}: RuntimeError: {str(error).partition('. ')[0]}.")
                break
            gradient = model.body.weight.grad
            assert gradient is not None
            largest = max_over_ranks(gradient.sum().item(), device)
            smallest = -max_over_ranks(-gradient.sum().item(), device)
            if rank == 0:
                same = "the same on all ranks" if largest == smallest else "different on each rank"
                print(f"step {step}: the gradients of the body are {same}")
            ddp_model.zero_grad()
        dist.barrier()


if __name__ == "__main__":
    run_reporting_user_errors(main)
