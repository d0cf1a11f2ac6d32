"""Tests of RankSlice."""

import pytest
import torch

from thinwire.codecs import ErrorFeedback, Peer, RankSlice, Raw, TopK
from thinwire.core.key import Key
from thinwire.core.tree import Spec, same
from thinwire.errors import ConfigError

PEER = Peer(Key(1))
TREE = {"fc/a": Key(1).normal(6, 9), "fc/b": Key(2).normal(5, 6), "bias": Key(3).normal(5)}


@pytest.mark.parametrize("rank", [1, 4, 6, 50])
def test_the_decoded_product_has_the_leading_ranks(rank):
    codec, spec = RankSlice(rank), Spec.of(TREE)
    data, _ = codec.encode(TREE, {}, PEER)
    back = codec.decode(data, spec, PEER)
    r = min(rank, 6)
    assert len(data) == codec.size(spec) == 4 * (r * 9 + r * 5 + 5)
    assert torch.allclose(back["fc/b"] @ back["fc/a"], TREE["fc/b"][:, :r] @ TREE["fc/a"][:r], atol=1e-5)
    assert torch.equal(back["bias"], TREE["bias"])
    assert same(back, TREE) == (rank >= 6)


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match="rank must be 1 or more"):
        RankSlice(0)
    with pytest.raises(ConfigError, match="the other way round"):
        RankSlice(1, inner=ErrorFeedback(TopK(0.1)))
    with pytest.raises(ConfigError, match="rows 'x' matches no block"):
        RankSlice(1, rows=("x",)).check(Spec.of(TREE))
    with pytest.raises(ConfigError, match="it must be a matrix"):
        RankSlice(1, rows=("bias",)).check(Spec.of(TREE))
    RankSlice(1, inner=Raw()).check(Spec.of(TREE))
