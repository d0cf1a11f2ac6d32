"""Standardized inputs: constants of datasets."""

import numpy as np
import pytest
import torch

from thinwire.core.key import Key
from thinwire.data.examples import Arrays, AugmentedImages, Images, Source, mean_and_std, standardized
from thinwire.errors import ConfigError
from thinwire.federation.settings import TaskSettings
from thinwire.runs.build import build_task, prepared
from thinwire.runs.config import resolve


def images(n: int = 60) -> Images:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, 8, 8), np.uint8))
    pixels[:, 1] //= 3  # channels differ
    return Images(pixels, torch.arange(n) % 2)


def floats(n: int = 60) -> Arrays:
    source = images(n)
    return Arrays(source.pixels.float() / 255, source.targets)


@pytest.mark.parametrize("make", [images, floats])
def test_inputs_have_mean_0_and_standard_deviation_1(make):
    choice = resolve("fedavg", "cifar10").task
    pixels = images().pixels.double() / 255
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), correction=0)
    constants = {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}
    train, test = prepared(choice, Source(make(), make(3), 2, **constants))
    x, _ = train.gather(torch.arange(60))
    assert x.dtype == torch.float32
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    y, _ = test.gather(torch.arange(3))
    expected = (images(3).pixels.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_mean_and_std_are_those_of_numpy():
    stored = images().pixels
    x = stored.double().numpy() / 255
    mean, std = mean_and_std(stored)
    np.testing.assert_allclose(mean, x.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, x.std((0, 2, 3)), rtol=1e-12)
    assert mean_and_std(torch.ones(5, 1, 1, 1)) == ((1.0,), (1e-6,))  # a constant channel


def test_an_augmented_image_is_scaled_after_its_border_is_added():
    choice = resolve("fedavg", "cifar10", {"task.augment": "shift-flip"}).task
    source = Source(images(), images(3), 2, mean=(0.5, 0.25, 0.5), std=(0.25, 0.125, 0.25))
    train, _ = prepared(choice, source)
    assert isinstance(train, AugmentedImages)
    plain = AugmentedImages(images())
    index = torch.arange(60) + 60 * torch.arange(60)
    mean, std = torch.tensor(source.mean).view(3, 1, 1), torch.tensor(source.std).view(3, 1, 1)
    assert torch.equal(train.gather(index)[0], (plain.gather(index)[0] - mean) / std)


def test_a_dataset_without_constants_is_refused_with_what_to_write():
    choice = resolve("fedavg", "cifar10").task
    assert choice.scale == "standard"
    wanted = r"needs 3 values of mean and std .* cifar10 states 0 and 0; write task\.scale = 'unit'$"
    with pytest.raises(ConfigError, match=wanted):
        prepared(choice, Source(images(), images(3), 2))
    with pytest.raises(ConfigError, match="states 1 and 3"):
        prepared(choice, Source(images(), images(3), 2, mean=(0.5,), std=(1.0, 1.0, 1.0)))


@pytest.mark.parametrize("task", ["mnist", "fashion-mnist", "cifar10", "cifar100", "femnist", "digits"])
def test_tasks_of_images_are_standardized_by_default_and_values_of_files_stay(task):
    assert resolve("fedavg", task).task.scale == "standard"
    assert TaskSettings.__dataclass_fields__["scale"].default == "unit"


def test_digits_are_standardized_by_their_constants():
    task = build_task(resolve("fedavg").task, Key(0))
    mean, std = mean_and_std(task.train.inputs)
    assert abs(mean[0]) < 1e-6
    assert std[0] == pytest.approx(1.0, abs=1e-6)
    unit = build_task(resolve("fedavg", overrides={"task.scale": "unit"}).task, Key(0))
    assert torch.equal(standardized(unit.train, (0.30538223,), (0.37601014,)).inputs, task.train.inputs)
