"""What training on volumes adds to the flags: how boxes are cut into samples, and how large the U-Net is."""

from dataclasses import dataclass
from typing import Literal

from workshop.ddp import DDPConfig
from workshop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class VolumeConfig(DDPConfig):
    """The flags of every lesson that trains on volumes, too."""

    dataset: Literal["mnist", "cifar10", "nbody"] = "mnist"
    """data set to train on"""
    crop_size: int = 64
    """with nbody: edge, in cells, of the cubes that are cut from the boxes at random"""
    train_crops: int = 512
    """with nbody: cubes that make up an epoch"""
    val_crops: int = 64
    """with nbody: cubes to validate on, the same ones every time"""
    width: int = 64
    """with unet3d: channels after the first layer; deeper layers have more"""
    depth: int = 6
    """with unet3d: how many times it halves the edge of the volume"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("crop_size", "train_crops", "val_crops", "width", "depth"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")
            if self.dataset != "nbody" and getattr(self, name) != VolumeConfig.__dataclass_fields__[name].default:
                raise UserError(
                    f"--{name} {getattr(self, name)} needs --dataset nbody, not {self.dataset}; "
                    "configs/unet3d.yaml says so, and is given before the other unet3d_*.yaml"
                )
