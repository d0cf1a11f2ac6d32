"""Tests of Chain and ByBlock, alone and in training."""

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits, perceptron
from thinwire.codecs import ByBlock, Chain, ErrorFeedback, Peer, Quantize, RandomK, Raw, Threshold, TopK
from thinwire.core.key import Key
from thinwire.core.tree import Spec, same
from thinwire.errors import ConfigError, WireError
from thinwire.runs.parts import build, describe
from thinwire.runs.toml import dumps, loads
from thinwire.testing import check_codec

PEER = Peer(Key(1))
TREE = {"fc.weight": Key(2).normal(30, 10), "fc.bias": Key(3).normal(30), "head.weight": Key(4).normal(7)}
MIXED = ByBlock((("fc.weight*", ErrorFeedback(Quantize(4))), ("head*", TopK(0.5)), ("*", Raw())))


def test_raw_through_chain_and_by_block_is_raw():
    check_codec(Raw(), lossless=True)
    check_codec(Chain((Raw(),)), lossless=True)
    check_codec(ByBlock(), lossless=True)
    check_codec(ByBlock((("fc*", Raw()), ("*", Raw()))), lossless=True)


def test_a_chain_equals_the_nested_codec():
    chain, nested = Chain((TopK(0.1), Quantize(4))), TopK(0.1, inner=Quantize(4))
    assert chain.encode(TREE, {}, PEER) == nested.encode(TREE, {}, PEER)
    assert Chain((RandomK(0.1), Raw())).size(Spec.of(TREE)) == RandomK(0.1).size(Spec.of(TREE))
    assert Chain([TopK(0.1)]) == Chain((TopK(0.1),))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Quantize(4), TopK(0.1)), r"write Chain\(\(TopK\(\.\.\.\), Quantize\(\.\.\.\)\)\)"),
        ((Quantize(4), Raw()), "keep either Quantize or Raw"),
        ((TopK(0.1, inner=Quantize(8)), Raw()), r"write it as the next part: Chain\(\(TopK"),
        ((TopK(0.1), ErrorFeedback(), Quantize(4)), r"other way round: ErrorFeedback\(TopK"),
        ((ErrorFeedback(), RandomK(0.1)), "unbiased = False"),
        ((), "tuple of codecs"),
        (TopK(0.1), "tuple of codecs"),
    ],
)
def test_invalid_chains_are_refused_with_a_suggestion(parts, message):
    with pytest.raises(ConfigError, match=message) as error:
        Chain(parts)
    assert "\n" not in str(error.value)


def test_each_block_is_encoded_by_its_first_matching_rule():
    state = MIXED.init(Spec.of(TREE))
    assert list(state) == ["0/rest/fc.weight"]
    data, _ = MIXED.encode(TREE, state, PEER)
    back = MIXED.decode(data, Spec.of(TREE), PEER)
    assert same({"fc.bias": back["fc.bias"]}, {"fc.bias": TREE["fc.bias"]})
    assert int((back["head.weight"] != 0).sum()) == 3
    assert 0 < float((back["fc.weight"] - TREE["fc.weight"]).abs().max()) < 0.5


def test_one_rule_equals_its_codec_and_rules_without_blocks_take_no_bytes():
    assert ByBlock((("*", RandomK(0.2)),)).encode(TREE, {}, PEER) == RandomK(0.2).encode(TREE, {}, PEER)
    bias = {"fc.bias": TREE["fc.bias"]}
    assert MIXED.encode(bias, {}, PEER)[0] == Raw().encode(bias, {}, PEER)[0]


def test_size_is_known_if_the_sizes_of_all_rules_are():
    codec = ByBlock((("fc*", RandomK(0.5)), ("*", Raw())))
    assert codec.size(Spec.of(TREE)) == len(codec.encode(TREE, {}, PEER)[0])
    assert MIXED.size(Spec.of(TREE)) is None


def test_lengths_beyond_the_message_are_refused():
    data, _ = MIXED.encode(TREE, MIXED.init(Spec.of(TREE)), PEER)
    for bad in (b"", b"\xff\x7f" + data[2:], data[:3]):
        with pytest.raises(WireError):
            MIXED.decode(bad, Spec.of(TREE), PEER)
    with pytest.raises(WireError, match="follow"):
        ByBlock().decode(b"\0", Spec(()), PEER)


def test_invalid_rules_are_refused():
    for rules, message in (
        ((), "end with"),
        ((("fc*", Raw()),), "end with"),
        (((), ("*", Raw())), "pairs of selectors"),
        ((((), Raw()), ("*", Raw())), "selects nothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            ByBlock(rules)
    with pytest.raises(ConfigError, match=r"rule 'fd\*' matches no block"):
        ByBlock((("fd*", Raw()), ("*", Raw()))).check(Spec.of(TREE))
    MIXED.check(Spec.of(TREE))


@pytest.mark.parametrize("codec", [MIXED, Chain((ErrorFeedback(), TopK(0.1), Quantize(4))), Threshold(0.5, Quantize())])
def test_nested_codecs_round_trip_through_toml(codec):
    text = dumps({"up": describe("codec", codec)})
    assert build("codec", loads(text, "test")["up"], "test") == codec


def test_client_and_server_states_agree_with_lossy_codecs_and_partial_plans():
    from tests.parts import Turns

    rules = ByBlock((("*.weight", ErrorFeedback(TopK(0.2))), ("*", Raw())))
    federation = Federation(tw.Method(up=rules, down=ErrorFeedback(Quantize(4)), schedule=Turns()))
    for cohort in ([0, 1, 2], [3, 4], [0, 5], [1, 2, 3, 4]):
        federation.round(cohort)
    assert all(map(torch.isfinite, map(torch.tensor, federation.losses)))


@pytest.mark.parametrize("density_one", [TopK(1.0), RandomK(1.0), ErrorFeedback(TopK(1.0)), ByBlock()])
def test_codecs_of_density_one_equal_raw_bit_for_bit_in_training(density_one):
    plain, through = Federation(tw.Method()), Federation(tw.Method(up=density_one, down=density_one))
    for cohort in ([0, 1, 2], [3, 4], [0, 5]):
        plain.round(cohort)
        through.round(cohort)
        assert same(plain.weights(), through.weights())


MISSPELLED = ByBlock((("fd*", Raw()), ("*", Raw())))


@pytest.mark.parametrize(
    "codec",
    [
        MISSPELLED,
        Chain((MISSPELLED,)),
        ErrorFeedback(MISSPELLED),
        ByBlock((("0.*", MISSPELLED), ("*", Raw()))),
        Chain((TopK(0.5), MISSPELLED)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("slot", ["up", "down"])
def test_a_misspelled_selector_is_refused_before_training(codec, slot):
    with pytest.raises(ConfigError, match=r"rule 'fd\*' matches no block; the blocks are "):
        Federation(tw.Method(**{slot: codec}))
    snapshot = tw.Method(
        download="full", up=Raw(), down=Raw(), budget=tw.Budget((tw.Tier(), tw.Tier(**{slot: MISSPELLED})))
    )
    with pytest.raises(ConfigError, match=r"rule 'fd\*' matches no block"):
        Federation(snapshot)


@pytest.mark.parametrize("name", ["sparse", "fedpaq", "signsgd", "ef+topk+int4"])
def test_presets_learn_digits_with_fewer_bytes(name):
    x, y = digits()
    clients = [(x[i : i + 60], y[i : i + 60]) for i in range(0, 480, 60)]
    run = tw.simulate(
        perceptron(hidden=32),
        clients,
        name,
        rounds=12 if name == "signsgd" else 6,
        test=(x[-300:], y[-300:]),
        local=tw.Local(epochs=4, batch=16),
        recipe="paper",  # six rounds are too few for a warm-up and a cosine
    )
    assert run.history[-1].loss < 0.8 * run.history[0].loss
    if name == "signsgd":  # better than chance, by five standard deviations of 300 coin flips
        assert run.accuracy > 0.5 + 5 * (0.25 / 300) ** 0.5
    ratio = {"sparse": 0.2, "fedpaq": 0.25, "signsgd": 0.05, "ef+topk+int4": 0.05}[name]
    assert run.history[0].bytes_up < ratio * 4 * 8 * (64 * 32 + 32 + 330) + 8 * 60
