"""The small CNN of the classic CIFAR-10 example, after LeNet-5: two 5x5 convolutions, three linear layers."""

import torch
import torch.nn.functional as F
from torch import nn


class CifarCNN(nn.Module):
    """Classify 32x32 color images into 10 classes; 62 thousand parameters."""

    MADE_FOR = (3, 32, 32), 10
    """shape of an image, and number of classes"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, kernel_size=5)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, 32, 32) to class scores (N, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)
