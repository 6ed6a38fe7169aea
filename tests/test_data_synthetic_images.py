"""The generated images: the same for the same seed, and no easier than they should be."""

import torch

from synthetic_images import generate_images
from workshop.datasets import cifar10


def test_only_the_seed_decides_what_is_generated() -> None:
    images, labels = generate_images(1100, seed=14)
    for threads in (1, 3, torch.get_num_threads()):  # ends with what it was
        torch.set_num_threads(threads)
        again, labels_again = generate_images(103, seed=14)
        assert torch.get_num_threads() == threads
        assert torch.equal(images[:103], again) and torch.equal(labels[:103], labels_again)
    assert not torch.equal(images[1000:], images[:100])
    assert not torch.equal(generate_images(103, seed=15)[0], again)


def test_images_are_balanced_and_a_linear_model_cannot_separate_them() -> None:
    images, labels = generate_images(8000, seed=0)
    assert labels.bincount().min() > 700
    pixels = images.float() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(cifar10.MEAN), atol=0.06, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(cifar10.STD), atol=0.04, rtol=0)
    features = torch.cat([pixels.flatten(1)[:, ::3], pixels.mean((2, 3)), torch.ones(8000, 1)], dim=1)
    train, val = slice(0, 6000), slice(6000, None)
    gram = features[train].T @ features[train] + 30 * torch.eye(features.shape[1])
    weights = torch.linalg.solve(gram, features[train].T @ torch.eye(10)[labels[train]])
    assert ((features[val] @ weights).argmax(1) == labels[val]).float().mean() < 0.3
