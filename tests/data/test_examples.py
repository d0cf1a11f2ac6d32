"""Pictures: scaled by their own mean and deviation, moved and mirrored when trained on."""

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.data.examples import Arrays, Images, Shifted, Source
from thinwire.data.partitions.base import Assignment
from thinwire.data.task import Task
from thinwire.errors import ConfigError
from thinwire.experiments.build import prepared
from thinwire.experiments.config import resolve
from thinwire.runtime.job import Job
from thinwire.simulation.engine import LocalEngine


def pictures(n: int = 6, side: int = 8) -> Images:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, side, side), np.uint8))
    return Images(pixels, torch.arange(n) % 2)


def test_standard_scale_gives_mean_0_and_deviation_1() -> None:
    choice = resolve("fedavg", "cifar10", {"task.scale": "standard"}).task
    train, test = prepared(choice, Source(pictures(), pictures(3), 2))
    x, _ = train.gather(torch.arange(len(train)))
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    assert isinstance(train, Images)
    assert isinstance(test, Images)
    assert test.mean == train.mean  # measured on the training pictures alone


def test_a_variant_is_the_picture_cut_out_of_a_black_frame() -> None:
    pool = Shifted(pictures(), reach=2)
    basis = torch.nn.functional.pad(pool.pictures.gather(torch.arange(6))[0], (2, 2, 2, 2))
    seen = set()
    for variant in range(pool.variants):
        got, targets = pool.gather(torch.tensor([4 + 6 * variant]))
        where = [
            (top, left, turn)
            for top in range(5)
            for left in range(5)
            for turn in (False, True)
            if torch.equal(got[0], cut(basis[4], top, left, turn))
        ]
        assert len(where) == 1
        assert targets.tolist() == [0]
        seen.add(where[0])
    assert len(seen) == pool.variants == 50  # every place and both ways round, each once
    assert torch.equal(pool.gather(torch.arange(6))[0], pool.pictures.gather(torch.arange(6))[0])


def cut(basis: torch.Tensor, top: int, left: int, mirrored: bool) -> torch.Tensor:
    # mirrored first, then moved
    basis = basis.flip(-1) if mirrored else basis
    return basis[:, top : top + 8, left : left + 8]


def test_training_draws_forms_from_the_seed_and_evaluation_takes_pictures_as_they_are() -> None:
    class Watching(Shifted):
        def gather(self, index: torch.Tensor) -> tuple:
            seen.append(index.clone())
            return super().gather(index)

    def run(seed: int) -> list[torch.Tensor]:
        seen.clear()
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
        task = Task(model, Watching(pictures()), Assignment(np.arange(6), np.array([0, 3, 6])))
        list(LocalEngine(backend="loop").run(Job(task, tw.Method(), rounds=2, cohort=2, seed=seed)))
        return list(seen[1:])  # the first is the trial on one example

    seen: list[torch.Tensor] = []
    one, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len({int(i) // 6 for index in one for i in index.flatten()}) > 2  # several forms


def test_scale_and_augment_are_for_pictures() -> None:
    with pytest.raises(ConfigError, match=r"task\.scale must be one of unit, standard"):
        resolve("fedavg", "cifar10", {"task.scale": "big"})
    with pytest.raises(ConfigError, match=r"task\.augment must be one of none, shift-flip"):
        resolve("fedavg", "cifar10", {"task.augment": "mixup"})
    choice = resolve("fedavg", "digits", {"task.augment": "shift-flip"}).task
    rows = Arrays(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"write task\.scale = 'unit'"):
        prepared(choice, Source(rows, rows, 2))
