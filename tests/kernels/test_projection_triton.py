"""Tests of the Triton projections, in the interpreter of triton: entries equal `Key`. Skipped without triton."""

import pytest
import torch
from torch.func import grad, vmap

from tests.interpreted import interpreted
from thinwire.core.key import Key
from thinwire.kernels import projection


@pytest.fixture
def fused(monkeypatch):
    module = interpreted("thinwire.kernels.projection_triton")
    monkeypatch.setattr(module, "BLOCKS", {"sign": (16, 128, 4), "gaussian": (16, 64, 4)})
    monkeypatch.setattr(module, "PARTS", 3)
    return module


def drawn(key, p, e, entries):
    return key.signs(p, e) if entries == "sign" else key.normal(p, e)


@pytest.mark.parametrize("entries", ["sign", "gaussian"])
@pytest.mark.parametrize("e", [260, 261])
def test_unit_vectors_give_the_exact_entries(fused, entries, e):
    key, p = Key(7).fold("frame", e), 20
    words = projection.key_words(key, "cpu")
    a = drawn(key, p, e, entries)
    assert torch.equal(fused.expand(torch.eye(p), words, p, e, entries, 1.0), a)
    some = torch.eye(e)[::20]
    assert torch.equal(fused.project(some, words, p, e, entries, 1.0), a[:, ::20].T)


@pytest.mark.parametrize("entries", ["sign", "gaussian"])
def test_products_and_gradients_equal_the_reference(fused, entries, monkeypatch):
    key, p, e = Key(3), 20, 301
    words = projection.key_words(key, "cpu")
    torch.manual_seed(0)
    b, g = torch.randn(2, 2, p), torch.randn(2, 2, e)

    def loss(b, g):
        return (projection.multiply_generated(b, words, p, e, entries, 0.25) * g).sum()

    slow = vmap(grad(loss))(b, g), projection.multiply_generated(b, words, p, e, entries, 0.25)
    monkeypatch.setattr(projection, "_fused", lambda vectors, key: fused)
    fast = vmap(grad(loss))(b, g), projection.multiply_generated(b, words, p, e, entries, 0.25)
    for x, y in zip(fast, slow, strict=True):
        assert float((x - y).abs().max()) <= 1e-5 * float(y.abs().max())
