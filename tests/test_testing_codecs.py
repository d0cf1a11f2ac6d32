"""Conformance check of codecs: faulty codecs fail."""

from dataclasses import dataclass

import pytest
import torch

from tests.parts import Half, Remember
from thinwire.codecs import Quantize, RandomK, Raw
from thinwire.errors import ConfigError, WireError
from thinwire.testing import check_codec


@dataclass(frozen=True)
class WrongSize(Raw):
    def size(self, spec):
        return spec.nbytes + 1


@dataclass(frozen=True)
class IndexErrorOnDecode(Raw):
    def decode(self, data, spec, peer):
        if len(data) < spec.nbytes:
            raise IndexError("out of bytes")
        return super().decode(data, spec, peer)


@dataclass(frozen=True)
class NotANumber(Raw):
    def decode(self, data, spec, peer):
        back = super().decode(data, spec, peer)
        return {name: block * torch.nan if block.is_floating_point() else block for name, block in back.items()}


@dataclass(frozen=True)
class NoScalars(Raw):
    def encode(self, tree, state, peer):
        return super().encode({name: block.flatten(1) for name, block in tree.items()}, state, peer)


@dataclass(frozen=True)
class EmptyOnDamage(Raw):
    def decode(self, data, spec, peer):
        return Raw().decode(data, spec, peer) if len(data) == spec.nbytes else {}


@dataclass(frozen=True)
class DropsState(Remember):
    def encode(self, tree, state, peer):
        data, after = super().encode(tree, state, peer)
        return data, {f"rest/{name}": after[f"rest/{name}"] for name in tree}


@dataclass(frozen=True)
class ChangesCodecState(Remember):
    def encode(self, tree, state, peer):
        data, after = super().encode(tree, state, peer)
        for name in tree:
            state[f"rest/{name}"].copy_(after[f"rest/{name}"])
        return data, state


@dataclass(frozen=True)
class RefusesFloat32(Raw):
    def encode(self, tree, state, peer):
        if any(block.dtype is torch.float32 for block in tree.values()):
            raise ConfigError("no")
        return super().encode(tree, state, peer)


@dataclass(frozen=True)
class DoesNotAdd(RandomK):
    summable = True


@dataclass(frozen=True)
class LevelsDependOnSigns(Quantize):
    scheme: str = "uniform"
    codes_signs = True


@dataclass(frozen=True)
class RefusesEmpty(Raw):
    def decode(self, data, spec, peer):
        if not spec.blocks:
            raise WireError("no blocks")
        return super().decode(data, spec, peer)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (WrongSize(), "size returns"),
        (IndexErrorOnDecode(), "must raise WireError .* not IndexError"),
        (EmptyOnDamage(), "decode of damaged bytes"),
        (DropsState(), "state after a message of some blocks"),
        (ChangesCodecState(), "other bytes the second time|must not change"),
        (RefusesFloat32(), "must accept float32"),
        (DoesNotAdd(), "summable is true"),
        (LevelsDependOnSigns(), "codes_signs is true"),
    ],
)
def test_faulty_codecs_fail(codec, message):
    with pytest.raises(AssertionError, match=message):
        check_codec(codec)


def test_a_codec_must_accept_a_tree_without_blocks():
    with pytest.raises(AssertionError, match=r"RefusesEmpty\(\) on the tree {}: WireError: no blocks"):
        check_codec(RefusesEmpty())


def test_a_lossy_codec_is_not_lossless():
    with pytest.raises(AssertionError, match="bit for bit"):
        check_codec(Half(), lossless=True)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (NotANumber(), r"^NotANumber\(\) on the tree {fc.*torch.float.* not finite, where the input is finite$"),
        (NoScalars(), r"^NoScalars\(\) on the tree {fc.weight/a torch.*: IndexError: Dimension out of range"),
    ],
)
def test_the_error_names_codec_input_and_fault(codec, message):
    with pytest.raises(AssertionError, match=message) as caught:
        check_codec(codec)
    assert "\n" not in str(caught.value)
