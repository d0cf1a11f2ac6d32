"""Tests of batch norm by plain operations: equal to torch under vmap."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vmap

from thinwire.kernels import conv


def loss(norm, x, mean, variance, *affine):
    mean, variance = mean.clone(), variance.clone()
    out = norm(x, mean, variance, *affine, training=True)
    return torch.sin(out).sum(), (mean, variance)


@pytest.mark.parametrize("shape", [(4, 8, 5, 3), (3, 6, 2, 2), (2, 4, 7)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_values_gradients_and_statistics_equal_those_of_torch(shape, affine):
    torch.manual_seed(0)
    x, channels = 3 + 2 * torch.randn(3, *shape), shape[1]
    more = (torch.randn(3, channels), torch.randn(3, channels)) if affine else ()
    given = (x, torch.zeros(3, channels), torch.ones(3, channels), *more)
    of = {"argnums": (0, *range(3, len(given))), "has_aux": True}
    wanted, found = (
        vmap(grad_and_value(lambda *args, norm=norm: loss(norm, *args), **of))(*given)
        for norm in (F.batch_norm, conv.batch_norm)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_sixteen_bits_stay_sixteen_bits():
    x = torch.randn(2, 4, 3, 3, dtype=torch.bfloat16)
    assert conv.batch_norm(x, None, None, torch.ones(4), torch.zeros(4)).dtype == torch.bfloat16
