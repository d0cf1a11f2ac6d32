"""Products with random signs by table lookup equal matrix products."""

import pytest
import torch

from thinwire.core.key import Key
from thinwire.kernels import projection as generated, projection_cpu as packed


@pytest.mark.parametrize(("p", "e"), [(1, 1), (16, 8), (17, 9), (20, 101), (33, 1000), (64, 4097)])
def test_lookups_equal_products(p, e) -> None:
    key = Key(7)
    a, b, g = key.signs(p, e), Key(1).normal(3, p), Key(2).normal(3, e)
    assert torch.allclose(packed.expand(b, key, p, e, 0.25), 0.25 * b @ a, atol=1e-5 * p)
    assert torch.allclose(packed.project(g, key, p, e, 0.25), 0.25 * g @ a.T, atol=1e-5 * e)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    key, b, g, threads = Key(5), Key(1).normal(100), Key(2).normal(5000), torch.get_num_threads()
    made = []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            made.append((packed.expand(b, key, 100, 5000, 1.0), packed.project(g, key, 100, 5000, 1.0)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_products_with_large_sign_matrices_are_differentiable() -> None:
    p, e, key = 48, 1 << 17, Key(3)
    assert p * e >= generated.BLOCK
    b = Key(1).normal(p).requires_grad_()
    out = generated.multiply_generated(b, generated.key_words(key, None), p, e, "sign", 0.5)
    a = 0.5 * key.signs(p, e)
    assert torch.allclose(out, b.detach() @ a, atol=1e-4)
    weights = Key(2).normal(e)
    (out * weights).sum().backward()
    assert torch.allclose(b.grad, a @ weights, rtol=1e-4, atol=1e-2)
