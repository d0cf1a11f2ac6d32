"""Images: normalization, and augmentation by shift and flip in training."""

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.federation import records_of
from thinwire.data.examples import Arrays, AugmentedImages, Images, Source, TextWindows
from thinwire.data.partition import Assignment
from thinwire.data.task import Task
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.runs.build import prepared
from thinwire.runs.config import resolve


def images(n: int = 6, side: int = 8) -> Images:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, side, side), np.uint8))
    return Images(pixels, torch.arange(n) % 2)


def test_a_variant_is_a_crop_of_the_image_with_a_black_border() -> None:
    pool = AugmentedImages(images(), max_shift=2)
    padded = torch.nn.functional.pad(pool.images.gather(torch.arange(6))[0], (2, 2, 2, 2))
    seen = set()
    for variant in range(pool.variants):
        got, targets = pool.gather(torch.tensor([4 + 6 * variant]))
        where = [
            (top, left, flipped)
            for top in range(5)
            for left in range(5)
            for flipped in (False, True)
            if torch.equal(got[0], crop(padded[4], top, left, flipped))
        ]
        assert len(where) == 1
        assert targets.tolist() == [0]
        seen.add(where[0])
    assert len(seen) == pool.variants == 50  # every shift with and without a flip, each once
    assert torch.equal(pool.gather(torch.arange(6))[0], pool.images.gather(torch.arange(6))[0])


def crop(padded: torch.Tensor, top: int, left: int, flipped: bool) -> torch.Tensor:
    padded = padded.flip(-1) if flipped else padded  # flip first, then shift
    return padded[:, top : top + 8, left : left + 8]


def test_training_draws_variants_from_the_seed() -> None:
    class RecordIndices(AugmentedImages):
        def gather(self, index: torch.Tensor) -> tuple:
            seen.append(index.clone())
            return super().gather(index)

    def run(seed: int) -> list[torch.Tensor]:
        seen.clear()
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
        task = Task(model, RecordIndices(images()), Assignment(np.arange(6), np.array([0, 3, 6])))
        records_of(Engine(backend="loop"), Job(task, tw.Method(), rounds=2, cohort=2, seed=seed))
        return list(seen[1:])  # the first is the check with one example

    seen: list[torch.Tensor] = []
    one, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len({int(i) // 6 for index in one for i in index.flatten()}) > 2  # several variants


def test_scale_and_augment_need_images() -> None:
    with pytest.raises(ConfigError, match=r"unknown value of task\.scale .big.: Known: standard, unit"):
        resolve("fedavg", "cifar10", {"task.scale": "big"})
    with pytest.raises(ConfigError, match=r"unknown value of task\.augment .mixup.: Known: none, shift-flip"):
        resolve("fedavg", "cifar10", {"task.augment": "mixup"})
    rows = Arrays(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    words = Arrays(torch.zeros(4, 1, 2, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    choice = resolve("fedavg", "digits").task
    for examples in (rows, words):
        with pytest.raises(ConfigError, match=r"^digits has no images; write task\.scale = 'unit'$"):
            prepared(choice, Source(examples, examples, 2, mean=(0.0,), std=(1.0,)))
    choice = resolve("fedavg", "digits", {"task.augment": "shift-flip", "task.scale": "unit"}).task
    with pytest.raises(ConfigError, match=r"write task\.augment = 'none'$"):
        prepared(choice, Source(rows, rows, 2))


def test_examples_without_augmentation_have_one_variant() -> None:
    rows = Arrays(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    text = TextWindows(torch.zeros(9, dtype=torch.uint8), torch.tensor([0, 1]), length=4)
    assert [examples.variants for examples in (rows, images(), text)] == [1, 1, 1]
    assert AugmentedImages(images(), max_shift=1).variants == 18
