"""The parts of the benchmarks that others rely on: the fuzzer in its short form, pages, bars."""

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

from benchmarks import attackers, codecs, contestants, faults, fuzz_wire, page, peers, precision
from thinwire.codecs import Peer, Quantize, Threshold, TopK
from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.errors import Drifted, WireError
from thinwire.models import vgg


def test_forged_messages_are_decoded_or_refused():
    names = ("raw, buffers", "top-k by block", "private, snapshot", "mapo, 3 rounds a basis")
    sync_counts = fuzz_wire.fuzz(range(2000), seed=1, trace_every=8, names=names)
    assert sync_counts.failures == []
    refusals = {outcome for _, outcome in sync_counts.outcomes} - {"decoded"}
    decoded = sum(count for (_, outcome), count in sync_counts.outcomes.items() if outcome == "decoded")
    assert decoded > 200  # mutations that are still messages
    # from the outermost check to the innermost
    for deep in ("checksum", "fields [", "not finite", "positions", "compressed section", "level N does not exist"):
        assert any(deep in refusal for refusal in refusals), deep
    assert "2,000 messages" in fuzz_wire.report(sync_counts, by_door=True)


def test_the_fuzzer_sees_what_it_looks_for():
    big = fuzz_wire.Door("hungry", 1000, (b"x",), lambda data: len(bytearray(10_000_000)) > 0)
    odd = fuzz_wire.Door("odd", 1000, (b"x",), lambda data: data.no_such_thing)
    wrong = fuzz_wire.Door("wrong", 1000, (b"x",), lambda data: False)
    hungry = fuzz_wire.Door("torch", 1000, (b"x",), lambda data: bool((fuzz_wire.torch.zeros(1 << 20) + 1).all()))
    for door, says in ((big, "bytes of memory"), (odd, "AttributeError"), (wrong, "not a valid tree")):
        sync_counts = fuzz_wire.SyncCounts()
        fuzz_wire._send(1, 0, [door], {0: [b"x"]}, sync_counts, traced=True)
        assert says in sync_counts.failures[0]
    sync_counts = fuzz_wire.SyncCounts()
    fuzz_wire._send(64, 0, [hungry], {0: [b"x"]}, sync_counts, traced=True)
    assert "bytes of memory" in sync_counts.failures[0]


def test_measuring_memory_takes_none_that_stays():
    """A storage that outlives the measurement was noted for ever, and some message paid for the growing notes."""
    held = fuzz_wire.torch.zeros(100)
    measured = [fuzz_wire.most_memory(lambda: held + 1) for _ in range(3000)]
    assert max(measured[1:]) < min(measured) + 20_000


@pytest.mark.parametrize("codec", [Threshold(0.0), TopK(0.9), TopK(0.3)])
def test_codecs_that_keep_many_numbers_take_little_memory(codec):
    """Positions of eight bytes, the values and two copies of the result were alive at a time."""
    tree = {"w": Key(1).normal(300, 200)}
    spec, peer = Spec.of(tree), Peer(Key(5))
    data = memoryview(codec.encode(tree, codec.init(spec), peer)[0])
    # twice: torch imports what it needs when it is first used
    assert min(fuzz_wire.most_memory(lambda: codec.decode(data, spec, peer)) for _ in range(2)) < 3.1 * spec.nbytes


@pytest.mark.parametrize("level", ["repaired", "built"])
def test_messages_with_checksums_that_fit_reach_what_is_behind_them(level):
    through, kin = fuzz_wire.ready(("raw, buffers", "mapo, 3 rounds a basis"))
    reasons = Counter()
    for i in range(300):
        rng = random.Random(i)
        which = rng.choice([at for at, door in enumerate(through) if door.schema])
        data = fuzz_wire.forged(rng, through[which], through[which].seeds[0], kin[which], level)
        try:
            reasons[str(through[which].read(data))] += 1
        except (WireError, Drifted) as error:
            reasons[fuzz_wire.reason(error)] += 1
    assert not any("checksum" in reason or "announces" in reason or "shortest form" in reason for reason in reasons)
    assert reasons["True"] > 10
    assert any("fields [" in reason for reason in reasons)


def test_a_message_of_the_fuzzer_is_a_function_of_its_number():
    through, kin = fuzz_wire.ready(("raw, buffers",))
    assert all(fuzz_wire.message(i, 0, through, kin) == fuzz_wire.message(i, 0, through, kin) for i in range(50))


def test_attackers_send_valid_messages_that_turn_the_mean_around():
    assert [len(attackers.attackers_of(1, share)) for share in attackers.SHARES] == [0, 2, 4, 6]
    mean, found = {"kind": "weighted"}, {}
    for share in (0.0, 0.3):
        found[share] = attackers.accuracy(mean, share, seed=1, rounds=2)
    assert found[0.3] < 0.2 < found[0.0]
    row = {share: [0.5, 0.75] for share in attackers.SHARES}
    assert "| weighted | 62.5 (50 to 75) |" in attackers.table({"weighted": row})


def test_a_part_of_a_page_is_written_and_the_rest_left_alone(tmp_path):
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


def test_bars_can_be_missed():
    bars = codecs.Bars()
    bars.hold("near", [(1.0, "a"), (1.02, "b")], 1.03, most=True)
    assert bars.missed == 0
    bars.hold("near", [(1.0, "a"), (1.04, "b")], 1.03, most=True)
    bars.hold("fast", [(99.0, "a"), (200.0, "b")], 100.0, most=False)
    assert bars.missed == 2
    assert bars.table().count("FAIL") == 2


def test_flower_sends_positions_and_values_or_all_of_them():
    spec = Spec.of({"w": Key(0).normal(100, 10)})
    dense, pairs = codecs.flower_arrays(TopK(0.1, inner=Quantize(8)), spec)
    assert dense == [("f4", [100, 10])]
    assert pairs == [("i4", [100]), ("i1", [100]), ("f4", [1])]


def test_contestants_do_the_same_work(tmp_path, monkeypatch):
    steps = peers.lay_out("cnn2", 40, 2, tmp_path)
    answers = io.StringIO()
    monkeypatch.setattr(contestants, "ANSWERS", answers)
    for name in ("loop", "loop-channels-last", "ours"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("go\ngo\n"))
        contestants.PLAYERS[name.split("-")[0]](contestants.Work(name, tmp_path))
    played = [line for line in map(json.loads, answers.getvalue().splitlines()) if "round" in line]
    assert [line["round"] for line in played] == [0, 1] * 3
    assert {line["steps"] for line in played} == {steps} == {20}
    first, loop, last, ours = (
        dict(np.load(tmp_path / f"{name}.npz"))
        for name in ("first", "after-loop", "after-loop-channels-last", "after-ours")
    )
    for other in (last, ours):
        assert peers.distance(other, loop) < 1e-3 * peers.distance(loop, first)


def test_who_is_missing_is_said_in_one_line(tmp_path):
    peers.lay_out("cnn2", 8, 1, tmp_path)
    (tmp_path / "pfl.py").write_text("raise ImportError('no pfl here')")  # as if it were not installed
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    player = peers.Contestant("pfl", str(tmp_path / "python"), tmp_path)
    player.end()
    assert player.trouble == "not measured: no pfl here"


def test_the_script_of_faults_is_complete_and_always_the_same():
    drawn = Counter(faults.script(256, client, version) for client in range(8) for version in range(40))
    assert min(drawn[fault] for fault in faults.FAULTS) >= 3
    one, two = (faults.Havoc(256, 40, 8, Path()) for _ in range(2))
    assert (one.kills, one.leaves, one.second) == (two.kills, two.leaves, two.second)
    assert len(one.kills) == 3
    assert max(one.kills | one.leaves.keys()) < 40
    assert not one.kills & one.leaves.keys()


def test_books_strike_out_what_a_killed_server_did_not_save(tmp_path):
    first = faults.Books(tmp_path)
    for number in (1, 2, 3):
        first(number, "up", 0, b"first")
    again = faults.Books(tmp_path)
    again(3, "down", 0, b"asked")
    again(3, "up", 1, b"again")
    assert again.read() == {1: {0: b"first"}, 2: {0: b"first"}, 3: {1: b"again"}}


def test_no_spoilt_message_may_count():
    assert faults._sound({"cut", "sound"}) == "sound"
    assert faults._sound({"exploded"}) == "exploded"
    with pytest.raises(AssertionError, match="only ever sent as"):
        faults._sound({"not_finite"})


def test_layers_one_by_one_are_the_network(monkeypatch):
    """The passes that are compared layer by layer make the very gradient that training takes."""
    torch.manual_seed(0)
    monkeypatch.setattr(vgg, "STAGES", ((4,), (8,), (8,), (8,), (8,)))
    module = vgg.vgg16_gn(groups=4).double()
    x, targets = torch.randn(1, 2, 3, 32, 32, dtype=torch.float64), torch.tensor([[3, 5]])
    weights = {name: p.detach()[None] for name, p in module.named_parameters()}
    layers = precision.layers_of(module)
    torch.nn.functional.cross_entropy(module(x[0]), targets[0]).backward()
    for way in ("loop", "im2col"):
        made = precision.through(way, layers, weights, x, targets)
        for layer, passed in zip(layers, made, strict=True):
            for name, grad in zip(layer.weights, passed.by_weights, strict=True):
                assert torch.allclose(grad[0], module.get_parameter(name).grad, atol=1e-12), (way, name)
    values = precision.outputs("loop", layers, weights, x)
    still = precision.without_flips("loop", layers, weights, x, targets, values)
    assert all(
        torch.equal(a.by_input, b.by_input)
        for a, b in zip(precision.through("loop", layers, weights, x, targets), still, strict=True)
    )
    relu = next(i for i, layer in enumerate(layers) if layer.kind == "relu")
    turned = torch.where(values[relu] == values[relu].max(), -1.0, values[relu])
    assert precision.flips(layers[relu], turned, values[relu]) == (1, values[relu].numel())
