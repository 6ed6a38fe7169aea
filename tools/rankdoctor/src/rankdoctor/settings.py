"""The settings that the doctor passes to the processes of the script, in the variable RANKDOCTOR_SETTINGS."""

import json
import os
from dataclasses import asdict, dataclass, field

AFTER_A_SAVE = -1
PACKAGE = os.path.dirname(os.path.realpath(__file__))


def is_own(file: str) -> bool:
    """Return whether a file is part of this package, wherever that is installed."""
    return file.startswith(PACKAGE + os.sep)


@dataclass
class Settings:
    """Of one run. Paths are absolute."""

    scratch: str
    """folder of the doctor's own for this run: ``logs``, ``tmp``, and what the script wanted to write"""
    root: str
    """folder of the script: lines in files below it are named first"""
    gpus: int = 2
    """number of GPUs that a node seems to have"""
    started: int = 1
    """number of ranks that the doctor starts on a node"""
    port: int = 0
    standin: bool = True
    """let the script see a GPU for each rank"""
    null: bool = False
    """the GPUs are null GPUs: PyTorch's own CUDA code runs"""
    redirect: bool = True
    """let the script write into the scratch folder only"""
    batches: int = 8
    """batches of each pass of a loader; 0: all"""
    steps: int = 100
    """updates after which the run ends"""
    preload: str = ""
    """Python file that is run in each process before the script"""
    uneven: bool = False
    """cut data sets to sizes that cannot be shared evenly"""
    nan_rank: int = -1
    """rank of which one input becomes NaN"""
    outlier_rank: int = -1
    """rank whose loss in one update is far too large, and whose validation becomes worse"""
    outlier_step: int = -1
    """this update, from 0"""
    branch: str = ""
    """line of a condition that is taken as true once, on one rank"""
    branch_body: int = 0
    """first line of what is done then"""
    branch_rank: int = -1
    """this rank"""
    probe_gathers: bool = False
    """let gathered tensors need gradients, to see whether the loss depends on them"""
    stop_after: int = 0
    """updates after which all ranks are stopped as by a time limit; 0: never; AFTER_A_SAVE: one after the first save"""
    influence: bool = False
    """evaluate the first training batch again with one sample, or one token, changed"""
    causal: bool = False
    """the models predict the next token"""
    end_of_text: int = -1
    """token that ends each document of a packed sequence; -1: not known"""
    reference: bool = False
    """compare the first update with the same update of an unwrapped copy of the model"""
    parity: bool = False
    """log samples, loss, gradient and weights of each update, to compare with another number of ranks"""
    nudged: bool = False
    """the weights begin a rounding error away from what they are, to see how rounding grows"""
    frozen: bool = False
    """no weight moves, and what the script prints is noted"""
    weights: str = ""
    """file with the weights that do not move; "": those of the first evaluation"""
    whole: list[str] = field(default_factory=list)
    """loaders of which the passes are not cut, by their lines and numbers"""
    halved: list[str] = field(default_factory=list)
    """loaders that give batches of half the size"""
    workers: int = -1
    """number of workers of each loader; -1: the script's own, at most 2"""

    @property
    def logs(self) -> str:
        """The folder with the events, one file per process."""
        return f"{self.scratch}/logs"

    def dump(self) -> str:
        """Return this as text."""
        return json.dumps(asdict(self))


def load() -> Settings:
    """Return what the doctor passed to this process."""
    return Settings(**json.loads(os.environ["RANKDOCTOR_SETTINGS"]))
