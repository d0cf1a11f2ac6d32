"""Selection of the largest values: long vectors, ties."""

import numpy as np
import pytest
import torch

from thinwire.core.selection import LONG, largest


@pytest.mark.parametrize("values", ["normal", "few levels", "sorted", "zeros"])
def test_long_vectors_give_the_first_of_a_stable_sort(values: str) -> None:
    rng, n = np.random.default_rng(0), LONG + 7
    x = rng.standard_normal(n).astype(np.float32)
    x = {"normal": x, "few levels": np.round(x), "sorted": np.sort(np.abs(x))[::-1].copy(), "zeros": 0 * x}[values]
    for k in (1, 100, n // 10, n // 4, n // 2):
        expected = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
        assert (largest(torch.from_numpy(x), k) == expected).all()
