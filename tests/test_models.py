"""Every model maps the samples of its data set to scores, and one that cannot is refused in one line."""

import pytest
import torch

from workshop.datasets import image_dataset
from workshop.errors import UserError
from workshop.models import build_model


@pytest.mark.parametrize(
    ("dataset", "model"),
    [("mnist", "mnist_cnn"), ("cifar10", "cifar_cnn"), ("cifar10", "resnet18"), ("cifar10", "densenet121")],
)
def test_scores_of_each_sample(dataset: str, model: str) -> None:
    built, images = build_model(model, dataset).eval(), image_dataset(dataset)
    samples = torch.randn(3, *images.SAMPLE_SHAPE)
    with torch.inference_mode():
        scores = built(samples)
        assert scores.shape == (3, images.NUM_CLASSES)
        torch.testing.assert_close(built(samples[1:2]), scores[1:2], atol=1e-4, rtol=1e-4)


def test_checking_the_fit_changes_neither_model_nor_random_numbers() -> None:
    torch.manual_seed(3)
    model = build_model("resnet18", "cifar10")
    after = torch.rand(1)
    assert model.bn1.num_batches_tracked == 0 and model.training
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    torch.manual_seed(3)
    build_model("resnet18", "cifar10")
    assert torch.rand(1) == after


def test_small_models_have_the_sizes_they_state() -> None:
    sizes = {("mnist", "mnist_cnn"): 1_199_882, ("cifar10", "cifar_cnn"): 62_006}
    for (dataset, model), size in sizes.items():
        built = build_model(model, dataset)
        assert sum(weights.numel() for weights in built.parameters()) == size


def test_without_dropout_a_model_in_training_uses_no_random_numbers() -> None:
    images = torch.randn(4, 1, 28, 28)
    with_dropout, without = (build_model("mnist_cnn", "mnist", dropout=dropout).train() for dropout in (True, False))
    state = torch.get_rng_state()
    assert torch.equal(without(images), without(images))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(with_dropout(images), with_dropout(images))
    without.load_state_dict(with_dropout.state_dict())
    assert torch.equal(without.eval()(images), with_dropout.eval()(images))


def test_the_largest_residual_network_is_known() -> None:
    with torch.device("meta"):
        model = build_model("resnet152", "cifar10")
    assert model.fc.out_features == 10
    assert sum(weights.numel() for weights in model.parameters()) == 58_164_298


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("dataset", "model", "message"),
    [
        ("cifar10", "mnist_cnn", "does not fit the 3x32x32 samples of --dataset cifar10 .*; --model cifar_cnn does"),
        ("mnist", "cifar_cnn", "does not fit the 1x28x28 samples of --dataset mnist .*; --model mnist_cnn does"),
        ("mnist", "resnet18", "does not fit the 1x28x28 samples .*; --model mnist_cnn does"),
        ("cifar10", "inception_v3", r"does not fit .*Kernel size can't be greater than actual input size"),
        ("cifar10", "vit_b_32", r"does not fit .*Expected 224 but got 32"),
        ("cifar10", "googlenet", r"does not fit .*it returns GoogLeNetOutputs, not one tensor of scores"),
        ("cifar10", "resnet81", "--model resnet81 is unknown; did you mean resnet18?"),
        ("cifar10", "cifar_cn", "--model cifar_cn is unknown; did you mean cifar_cnn?"),
    ],
)
def test_what_does_not_fit_is_refused(dataset: str, model: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(model, dataset)
