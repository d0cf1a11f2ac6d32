"""Tests of the capabilities that codecs declare."""

import pytest
import torch

from thinwire.codecs import ByBlock, Chain, Codec, ErrorFeedback, Masked, Peer, Quantize, RandomK, Raw, Threshold, TopK
from thinwire.core.key import Key
from thinwire.core.tree import Spec

PEER = Peer(Key(1))
TREE = {"w": Key(2).normal(40) * (Key(3).uniform(40) > 0.5), "b": torch.tensor([0.0, 1e-30, -3e38])}
SPEC = Spec.of(TREE)

# codec, and the capabilities that it declares
CODECS = [
    (Raw(), {"exact", "summable", "keeps_zeros"}),
    (Chain((Raw(),)), {"exact", "summable", "keeps_zeros"}),
    (Threshold(0.0), {"keeps_zeros"}),
    (Threshold(0.1), set()),
    (Threshold(0.0, inner=Quantize(8)), set()),
    (RandomK(0.5), {"unbiased"}),
    (RandomK(0.5, unbiased=False, shared=True), {"summable"}),
    (ErrorFeedback(RandomK(0.5, unbiased=False, shared=True)), {"summable"}),
    (TopK(0.5), set()),
    (Quantize(8), set()),
    (Masked(), set()),
    (ByBlock(), set()),
]


@pytest.mark.parametrize(
    ("codec", "capabilities"),
    CODECS,
    ids=lambda value: repr(value) if not isinstance(value, set) else "+".join(sorted(value)),
)
def test_codecs_declare_their_capabilities(codec, capabilities):
    declared = {name for name in ("exact", "summable", "keeps_zeros", "unbiased") if getattr(codec, name)}
    assert declared == capabilities
    back = codec.decode(codec.encode(TREE, codec.init(SPEC), PEER)[0], SPEC, PEER)
    if "exact" in declared or "keeps_zeros" in declared:
        assert all(torch.equal(back[name], block) for name, block in TREE.items())


def test_a_codec_of_two_methods_has_defaults_for_all_others():
    class Plain(Codec):
        def encode(self, tree, state, peer):
            return Raw().encode(tree, state, peer)

        def decode(self, data, spec, peer):
            return Raw().decode(data, spec, peer)

    codec = Plain()
    codec.check(SPEC)
    assert codec.init(SPEC) == {}
    assert codec.size(SPEC) is None
    assert not any((codec.exact, codec.summable, codec.keeps_zeros, codec.unbiased))
