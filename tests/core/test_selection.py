"""Selection of the largest values: long vectors, ties, vectors in parts."""

import numpy as np
import pytest
import torch

from thinwire.core.selection import LONG, SAMPLE, largest, largest_of

VALUES = ["normal", "few levels", "sorted", "zeros", "denormal", "infinite", "mostly zero"]


def drawn(values: str, n: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    made = {
        "normal": x,
        "few levels": np.round(x),
        "sorted": np.sort(np.abs(x))[::-1].copy(),
        "zeros": 0 * x,  # of both signs
        "denormal": x * np.float32(1e-42),
        "infinite": np.where(np.abs(x) > 2, np.copysign(np.float32(np.inf), x), x),
        "mostly zero": np.where(np.abs(x) > 2, x, np.float32(0)),
    }
    return made[values]


def first_of_a_stable_sort(x: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


@pytest.mark.parametrize("values", VALUES)
def test_long_vectors_give_the_first_of_a_stable_sort(values: str) -> None:
    n = LONG + 7
    x = drawn(values, n)
    for k in (0, 1, 100, n // 10, n // 4, n // 3, n // 2, n // 2 + 1, n):
        assert (largest(torch.from_numpy(x), k) == first_of_a_stable_sort(x, k)).all()


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parts_give_the_positions_and_values_of_the_whole(values: str, dtype: torch.dtype) -> None:
    sizes = (3, LONG + 5, 0, 1, LONG // 2)
    whole = torch.from_numpy(drawn(values, sum(sizes))).to(dtype)
    for k in (0, 1, sum(sizes) // 10, sum(sizes)):
        at, found = largest_of(whole.split(sizes), k)
        assert (at == first_of_a_stable_sort(whole.double().numpy(), k)).all()
        assert found.dtype is dtype
        assert torch.equal(found, whole[torch.from_numpy(at)])


def test_a_misleading_sample_costs_time_only() -> None:
    n = 4 * LONG
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    for factor in (1e3, 1e-3):  # sampled values are much larger, or much smaller, than all others
        y = x.copy()
        y[:: n // SAMPLE] *= np.float32(factor)
        for k in (100, n // 100, n // 4):
            assert (largest(torch.from_numpy(y), k) == first_of_a_stable_sort(y, k)).all()
