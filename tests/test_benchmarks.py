"""Tests of the benchmarks: a short run of the fuzzer, pages, checks, fault injection."""

import doctest
import io
import json
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import page
from benchmarks.bytes import codecs
from benchmarks.faults import faults, fuzz_wire
from benchmarks.speed import frameworks, peers, precision
from thinwire.codecs import Peer, Threshold, TopK
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.errors import Drifted, WireError
from thinwire.models import vgg


def test_forged_messages_are_decoded_or_refused():
    names = ("raw, buffers", "top-k by block", "private, full download", "mapo, 3 rounds per basis")
    # the limit of time is that of the command: a test is not timed; this one ends a hang
    outcomes = fuzz_wire.fuzz(range(6000), seed=2, trace_every=64, names=names, seconds=120.0)
    assert outcomes.failures == []
    refusals = {outcome for _, outcome in outcomes.counts} - {"decoded"}
    decoded = sum(count for (_, outcome), count in outcomes.counts.items() if outcome == "decoded")
    assert decoded > 200  # mutations that are still valid messages
    # from the outermost check to the innermost
    for deep in ("checksum", "fields [", "not finite", "positions", "compressed section", "level N does not exist"):
        assert any(deep in refusal for refusal in refusals), deep
    assert "6,000 messages" in fuzz_wire.report(outcomes, by_target=True)


def test_fuzzer_detects_memory_use_errors_and_invalid_results():
    big = fuzz_wire.Target("hungry", 1000, (b"x",), lambda data: len(bytearray(10_000_000)) > 0)
    odd = fuzz_wire.Target("odd", 1000, (b"x",), lambda data: data.no_such_thing)
    wrong = fuzz_wire.Target("wrong", 1000, (b"x",), lambda data: False)
    hungry = fuzz_wire.Target("torch", 1000, (b"x",), lambda data: bool((fuzz_wire.torch.zeros(1 << 20) + 1).all()))
    for target, expected in ((big, "bytes of memory"), (odd, "AttributeError"), (wrong, "not a valid tree")):
        outcomes = fuzz_wire.Outcomes()
        fuzz_wire._send(1, 0, [target], {0: [b"x"]}, outcomes, traced=True)
        assert expected in outcomes.failures[0]
    outcomes = fuzz_wire.Outcomes()
    fuzz_wire._send(64, 0, [hungry], {0: [b"x"]}, outcomes, traced=True)
    assert "bytes of memory" in outcomes.failures[0]


def test_memory_measurement_does_not_leak():
    """Storages that outlive a measurement must not be recorded, or the record would grow."""
    held = fuzz_wire.torch.zeros(100)
    measured = [fuzz_wire.most_memory(lambda: held + 1) for _ in range(3000)]
    assert max(measured[1:]) < min(measured) + 20_000


@pytest.mark.parametrize("codec", [Threshold(0.0), TopK(0.9), TopK(0.3)])
def test_dense_sparse_codecs_use_little_memory(codec):
    """Regression test: eight-byte positions, the values and two copies of the result were alive together."""
    tree = {"w": Key(1).normal(300, 200)}
    spec, peer = Spec.of(tree), Peer(Key(5))
    data = memoryview(codec.encode(tree, codec.init(spec), peer)[0])
    # twice: torch imports modules on first use
    assert min(fuzz_wire.most_memory(lambda: codec.decode(data, spec, peer)) for _ in range(2)) < 3.1 * spec.nbytes


@pytest.mark.parametrize("level", ["repaired", "built"])
def test_messages_with_valid_checksums_reach_inner_checks(level):
    through, kin = fuzz_wire.ready(("raw, buffers", "mapo, 3 rounds per basis"))
    reasons = Counter()
    for i in range(300):
        rng = random.Random(i)
        which = rng.choice([at for at, target in enumerate(through) if target.schema])
        data = fuzz_wire.forged(rng, through[which], through[which].seeds[0], kin[which], level)
        try:
            reasons[str(through[which].read(data))] += 1
        except (WireError, Drifted) as error:
            reasons[fuzz_wire.reason(error)] += 1
    assert not any("checksum" in reason or "announces" in reason or "shortest form" in reason for reason in reasons)
    assert reasons["True"] > 10
    assert any("fields [" in reason for reason in reasons)


def test_fuzzer_messages_are_a_function_of_their_index():
    through, kin = fuzz_wire.ready(("raw, buffers",))
    assert all(fuzz_wire.message(i, 0, through, kin) == fuzz_wire.message(i, 0, through, kin) for i in range(50))


def test_writing_a_section_leaves_the_rest_of_the_page_unchanged(tmp_path):
    assert doctest.testmod(page).failed == 0
    file = tmp_path / "page.md"
    file.write_text("# Page\n")
    page.write_part(file, "b", "one", "make b")
    page.write_part(file, "c", "two", "make c")
    page.write_part(file, "b", "three \\1", "make b")
    text = file.read_text()
    assert text.count("begin b") == text.count("end b") == 1
    assert text.index("three \\1") < text.index("two")
    assert text.startswith("# Page\n")
    file.write_text("<!-- begin b: make b -->")
    with pytest.raises(SystemExit, match="without an end"):
        page.write_part(file, "b", "four", "make b")


def test_checks_can_fail():
    bars = codecs.Checks()
    bars.hold("near", [(1.0, "a"), (1.02, "b")], 1.03, most=True)
    assert bars.missed == 0
    bars.hold("near", [(1.0, "a"), (1.04, "b")], 1.03, most=True)
    bars.hold("fast", [(99.0, "a"), (200.0, "b")], 100.0, most=False)
    assert bars.missed == 2
    assert bars.table().count("FAIL") == 2


def test_frameworks_do_the_same_work(tmp_path, monkeypatch):
    steps = peers.write_inputs("cnn2", 40, 2, tmp_path)
    responses = io.StringIO()
    monkeypatch.setattr(frameworks, "RESPONSES", responses)
    for name in ("loop", "loop-channels-last", "ours"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("go\ngo\n"))
        frameworks.FRAMEWORKS[name.split("-")[0]](frameworks.Work(name, tmp_path))
    rounds = [line for line in map(json.loads, responses.getvalue().splitlines()) if "round" in line]
    assert [line["round"] for line in rounds] == [0, 1] * 3
    assert {line["steps"] for line in rounds} == {steps} == {20}
    first, loop, last, ours = (
        dict(np.load(tmp_path / f"{name}.npz"))
        for name in ("first", "after-loop", "after-loop-channels-last", "after-ours")
    )
    for other in (last, ours):
        assert peers.distance(other, loop) < 1e-3 * peers.distance(loop, first)


def test_fault_script_is_complete_and_deterministic():
    drawn = Counter(faults.script(256, client, version) for client in range(8) for version in range(40))
    assert min(drawn[fault] for fault in faults.FAULTS) >= 3
    one, two = (faults.ProcessFaults(256, 40, 8, Path()) for _ in range(2))
    assert (one.kills, one.leaves, one.second) == (two.kills, two.leaves, two.second)
    assert len(one.kills) == 3
    assert max(one.kills | one.leaves.keys()) < 40
    assert not one.kills & one.leaves.keys()


def test_corrupted_messages_may_not_be_accepted():
    assert faults._accepted_kind({"truncated", "valid"}) == "valid"
    assert faults._accepted_kind({"scaled_update"}) == "scaled_update"
    with pytest.raises(AssertionError, match="only sent as"):
        faults._accepted_kind({"not_finite"})


def test_layer_by_layer_passes_equal_the_network(monkeypatch):
    """The layer-by-layer passes give the gradient of the network."""
    torch.manual_seed(0)
    monkeypatch.setattr(vgg, "STAGES", ((4,), (8,), (8,), (8,), (8,)))
    module = vgg.vgg16_gn(groups=4).double()
    x, targets = torch.randn(1, 2, 3, 32, 32, dtype=torch.float64), torch.tensor([[3, 5]])
    weights = {name: p.detach()[None] for name, p in module.named_parameters()}
    layers = precision.layers_of(module)
    torch.nn.functional.cross_entropy(module(x[0]), targets[0]).backward()
    for backend in ("loop", "grouped"):
        made = precision.through(backend, layers, weights, x, targets)
        for layer, passed in zip(layers, made, strict=True):
            for name, grad in zip(layer.weights, passed.by_weights, strict=True):
                assert torch.allclose(grad[0], module.get_parameter(name).grad, atol=1e-12), (backend, name)
    values = precision.outputs("loop", layers, weights, x)
    still = precision.without_flips("loop", layers, weights, x, targets, values)
    assert all(
        torch.equal(a.by_input, b.by_input)
        for a, b in zip(precision.through("loop", layers, weights, x, targets), still, strict=True)
    )
    relu = next(i for i, layer in enumerate(layers) if layer.kind == "relu")
    turned = torch.where(values[relu] == values[relu].max(), -1.0, values[relu])
    assert precision.flips(layers[relu], turned, values[relu]) == (1, values[relu].numel())
