"""Tests of specs and selectors."""

import pytest
import torch

from thinwire.core.names import select
from thinwire.core.tree import DTYPES, Block, Spec
from thinwire.errors import ConfigError

TREE = {"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3, dtype=torch.float16), "n": torch.tensor(1)}


def test_a_spec_counts_values_and_bytes():
    spec = Spec.of(TREE)
    assert spec.names == ("fc.weight", "fc.bias", "n")
    assert (len(spec), spec.size, spec.nbytes) == (3, 10, 24 + 6 + 8)
    assert [block.numel for block in spec] == [6, 3, 1]
    assert Spec(()).nbytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_dtypes_equal_those_of_torch(dtype):
    assert DTYPES[dtype][1] == torch.zeros(1, dtype=dtype).element_size()


def test_trees_made_from_a_spec_have_that_spec():
    spec = Spec.of(TREE)
    assert Spec.of(spec.zeros()) == spec
    assert Spec.of(spec.shapes()) == spec
    assert all(block.device.type == "meta" for block in spec.shapes().values())


def test_restrict_keeps_the_order_of_the_spec():
    assert Spec.of(TREE).restrict(["n", "fc.weight"]).names == ("fc.weight", "n")


@pytest.mark.parametrize(
    "other",
    [
        {"fc.weight": torch.zeros(2, 3), "fc.bias": TREE["fc.bias"], "n": TREE["n"]},
        {"fc.weight": TREE["fc.weight"], "fc.bias": torch.zeros(3, dtype=torch.bfloat16), "n": TREE["n"]},
        {"fc.weights": TREE["fc.weight"], "fc.bias": TREE["fc.bias"], "n": TREE["n"]},
        {"fc.bias": TREE["fc.bias"], "fc.weight": TREE["fc.weight"], "n": TREE["n"]},
        {"fc.weight": TREE["fc.weight"], "fc.bias": TREE["fc.bias"]},
        {},
    ],
)
def test_the_digest_depends_on_names_shapes_dtypes_and_order(other):
    assert Spec.of(other).digest() != Spec.of(TREE).digest()
    assert len(Spec.of(other).digest()) == 8


def test_the_digest_is_fixed():
    assert Spec.of(TREE).digest().hex() == "784ed3e754199e16"


def test_unsupported_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"block 'z' has type torch.complex64.*float32"):
        Block("z", (1,), torch.complex64)


NAMES = ("conv.weight", "conv.bias", "head.weight", "head.bias")


def test_selectors_match_names_and_keep_their_order():
    assert select(NAMES, ("head.*", "conv.bias")) == ("conv.bias", "head.weight", "head.bias")
    assert select(NAMES, ("*", "!*.bias")) == ("conv.weight", "head.weight")
    assert select(NAMES, ("*", "!*.bias", "head.bias")) == ("conv.weight", "head.weight", "head.bias")
    assert select(NAMES, ()) == ()


def test_selectors_are_case_sensitive():
    with pytest.raises(ConfigError, match="Head"):
        select(NAMES, ("Head.*",))


@pytest.mark.parametrize("pattern", ["hed.*", "!norm.*"])
def test_a_selector_that_matches_nothing_is_refused(pattern):
    with pytest.raises(ConfigError, match=r"private .* matches no block; the blocks are conv.weight"):
        select(NAMES, ("*", pattern), what="private")


def test_long_lists_of_blocks_are_shortened_in_the_error_message():
    with pytest.raises(ConfigError, match=r"b5, \.\.\.$"):
        select([f"b{i}" for i in range(100)], ("x",))
