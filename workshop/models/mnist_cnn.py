"""The small CNN of the classic MNIST example: two 3x3 convolutions, max-pool, dropout, two linear layers."""

import torch
import torch.nn.functional as F
from torch import nn


class MnistCNN(nn.Module):
    """Classify 28x28 gray images into 10 classes; 1.2 million parameters."""

    MADE_FOR = (1, 28, 28), 10
    """shape of an image, and number of classes"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 1, 28, 28) to class scores (N, 10)."""
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(self.dropout2(x))
