"""The real files, in the folder of THINWIRE_DATA; skipped without them."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.data.examples import Source, image_values, mean_and_std
from thinwire.data.named_texts import ALPHABET, READERS, strip_message
from thinwire.data.partition import Natural
from thinwire.data.text import IDS, PAD


@cache
def load(name: str, folder: Path) -> Source:
    return lookup("dataset", name).make(folder)


def have(real: Path, folder: str) -> Path:
    if not (real / folder).is_dir():
        pytest.skip(f"no {folder} in the folder of real datasets")
    return real


def test_digits_are_1797_in_ten_classes_with_a_fifth_of_each_in_the_test_set() -> None:
    source = load("digits", Path())
    assert (len(source.train), len(source.test), source.classes) == (1438, 359, 10)
    x, y = source.train.gather(torch.arange(1438))
    assert x.shape == (1438, 1, 8, 8)
    assert x.dtype == torch.float32
    assert (x.min(), x.max()) == (0.0, 1.0)
    counts = torch.bincount(y) + torch.bincount(source.test.targets)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    share = torch.bincount(source.test.targets) / counts
    assert (share - 0.2).abs().max() < 0.003


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_datasets_have_60000_and_10000_images(real, name) -> None:
    source = load(name, have(real, name))
    assert (len(source.train), len(source.test)) == (60_000, 10_000)
    x, _ = source.train.gather(torch.arange(500))
    assert x.shape == (500, 1, 28, 28)
    assert (x.min(), x.max()) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["digits", "mnist", pytest.param("cifar10", marks=pytest.mark.slow)])
def test_constants_of_images_are_those_of_the_training_images(request, name) -> None:
    folder = Path() if name == "digits" else have(request.getfixturevalue("real"), name)
    source = load(name, folder)
    mean, std = mean_and_std(image_values(source.train))
    tolerance = 2e-4 if "lossy" in source.note else 1e-8  # JPEG changes pixels
    assert source.mean == pytest.approx(mean, abs=tolerance)
    assert source.std == pytest.approx(std, abs=tolerance)


def test_mnist_has_the_published_mean_and_class_counts(real) -> None:
    source = load("mnist", have(real, "mnist"))
    assert (source.mean[0], source.std[0]) == (pytest.approx(0.1307, abs=5e-5), pytest.approx(0.3081, abs=5e-5))
    counts = torch.bincount(source.train.targets).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_fashion_mnist_is_balanced(real) -> None:
    source = load("fashion-mnist", have(real, "fashion-mnist"))
    assert set(torch.bincount(source.train.targets).tolist()) == {6000}
    assert set(torch.bincount(source.test.targets).tolist()) == {1000}


def test_cifar10_is_balanced_and_has_the_published_means(real) -> None:
    source = load("cifar10", have(real, "cifar10"))
    assert (len(source.train), len(source.test)) == (50_000, 10_000)
    assert set(torch.bincount(source.train.targets).tolist()) == {5000}
    assert set(torch.bincount(source.test.targets).tolist()) == {1000}
    pixels = source.train.pixels
    assert pixels.shape == (50_000, 3, 32, 32)
    lossy = "lossy" in source.note
    mean = pixels.sum(dim=(0, 2, 3), dtype=torch.float64) / (50_000 * 1024 * 255)
    std = torch.stack([pixels[:, c].float().div_(255).std() for c in range(3)])
    shift = 0.03 / 255 if lossy else 1e-6
    assert mean.tolist() == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=shift)
    assert std.tolist() == pytest.approx([0.24703223, 0.24348513, 0.26158784], abs=2e-4 if lossy else 1e-5)
    assert source.train.targets[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile
    assert ("41.7 dB" in source.note) == lossy


def test_shakespeare_has_1074_roles_and_no_window_in_both_splits(real) -> None:
    source = load("shakespeare", have(real, "shakespeare"))
    assert source.users is not None
    assert source.test_users is not None
    assert int(source.users.max()) + 1 == 1074 == len(torch.unique(source.users))
    assert (len(source.train), len(source.test)) == (3_347_241, 763_212)
    assert source.classes == len(ALPHABET) == 80
    assert source.train.codes is source.test.codes
    x, y = source.train.gather(torch.tensor([[0, 1], [2, 3]]))
    assert x.shape == (2, 2, 80)
    assert x[0, 1, -1] == y[0, 0]
    train_end = torch.zeros(1074, dtype=torch.int64).scatter_reduce(0, source.users, source.train.starts + 80, "amax")
    first_test = torch.full((1074,), 2**62).scatter_reduce(0, source.test_users, source.test.starts, "amin")
    assert (first_test > train_end).all()
    assert int(source.train.codes.max()) < 80


def test_the_hundred_largest_roles_are_a_natural_partition(real) -> None:
    source = load("shakespeare", have(real, "shakespeare"))
    a = Natural().assign(source.train.targets.numpy(), 100, Key(0), source.users.numpy())
    assert len(a) == 100
    assert (np.diff(a.sizes()) <= 0).all()
    assert len(torch.unique(source.users[torch.from_numpy(a.client(0))])) == 1


@pytest.mark.slow
def test_newsgroups_are_11314_and_7532_messages_in_20_groups(real) -> None:
    source = load("20newsgroups", have(real, "20newsgroups"))
    assert (len(source.train), len(source.test), source.classes) == (11_314, 7_532, 20)
    assert torch.bincount(source.train.targets).tolist()[:3] == [480, 584, 591]
    x, _ = source.train.gather(torch.arange(11_314))
    assert x.shape == (11_314, 256)
    assert int(x.max()) < IDS
    assert (x[:, 0] != PAD).all()


@pytest.mark.slow
def test_messages_are_stripped_as_by_scikit_learn(real) -> None:
    import tarfile

    from sklearn.datasets import _twenty_newsgroups as reference

    have(real, "20newsgroups")
    with tarfile.open(real / "20newsgroups" / "20news-bydate.tar.xz") as archive:
        for member in archive:
            if member.isreg():
                text = archive.extractfile(member).read().decode("latin-1")
                stripped = reference.strip_newsgroup_footer(reference.strip_newsgroup_header(text))
                assert strip_message(text).split() == reference.strip_newsgroup_quoting(stripped).split()


@pytest.mark.parametrize(
    ("name", "train", "test", "ones"),
    [
        ("sst2", 67_349, 872, 37_569),
        ("cola", 8_551, 1_043, 6_023),
        ("rte", 2_490, 277, 1_241),
        ("mrpc", 3_668, 408, 2_474),
    ],
)
def test_glue_tasks_have_the_published_counts(real, name, train, test, ones) -> None:
    splits = READERS[name](have(real, "glue")).read()
    assert [len(split.texts) for split in splits] == [train, test]
    assert sum(splits[0].labels) == ones
