"""Downloads: clients reach the server's state by the shortest message, and a drifted state is found and replaced."""

import pytest
import torch

from tests.federation import Federation, digits_task, perceptron, same_public
from tests.protocol.messages import bodies_of
from thinwire.codecs import Chain, ErrorFeedback, Lattice, LatticeSum, Quantize, Raw, TopK
from thinwire.core.key import Key
from thinwire.core.tree import tmap
from thinwire.errors import Drifted, IncompatibleParts, WireError
from thinwire.optimizers import SGD, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.drift_check import project, signs_of_version, tolerance
from thinwire.protocol.receive import receive, request_full_state
from thinwire.protocol.round import Round
from thinwire.protocol.upload import decode_upload
from thinwire.schedules import AllBlocks
from thinwire.spaces import MAPO, FedPara, Full, LoRA
from thinwire.training import Local
from thinwire.wire import message as wire

SPACES = {
    "full": Full(),
    "one basis": MAPO(k=8, redraw_every=0),
    "a basis each round": MAPO(k=8, redraw_every=1),
    "a basis for three rounds": MAPO(k=8, redraw_every=3),
    "fedpara": FedPara(),
    "lora": LoRA(rank=2),
    "lora, merged": LoRA(rank=1, redraw_every=3),
}
CODECS = {
    "raw": Raw(),
    "int8": Quantize(8),
    "int4, stochastic": Quantize(4, scheme="qsgd"),
    "top-k with error feedback": ErrorFeedback(Chain((TopK(0.1), Quantize(8)))),
}
CASES = [(name, "incremental", codec) for name in ("full", "a basis for three rounds") for codec in CODECS]
OTHERS = ("one basis", "a basis each round", "fedpara", "lora", "lora, merged")
CASES += [(name, "incremental", "top-k with error feedback") for name in OTHERS]
CASES += [(name, "full", "raw") for name, space in SPACES.items() if not space.redraw_every]


def federation(space=SPACES["full"], down=CODECS["raw"], norm: bool = False, **parts) -> Federation:
    """Small enough for many of them."""
    task = digits_task(perceptron(norm=norm, hidden=4), sizes=(5, 3, 4, 6))
    lr = 0.5 if isinstance(space, MAPO) else 0.05
    return Federation(Method(space=space, down=down, client_opt=SGD(lr), **parts), task, Local(batch=0, steps=1))


@pytest.mark.parametrize(("name", "download", "codec"), CASES)
def test_clients_that_join_or_return_in_any_round_have_the_servers_state(name, download, codec):
    one, key = federation(SPACES[name], CODECS[codec], norm=True, download=download), Key(7).fold(name, codec)
    for r in range(7):
        one.round(key.fold("cohort", r).choice(3, 1))  # client 3 never trains, and downloads at the end
        for client in range(3):
            if not int(key.fold("hears", r, client).integers(1, 3)):
                one.download(client)
                assert same_public(one.public[client], one.server.public)
    for client in range(4):
        one.download(client)
        assert same_public(one.public[client], one.server.public)
    assert one.drifted == []


@pytest.mark.parametrize("redraw_every", [1, 3])
@pytest.mark.parametrize("merge_codec", [Quantize(4), Quantize(4, scheme="qsgd"), TopK(0.5)])
def test_a_merged_window_is_the_same_for_clients_that_followed_it_and_that_missed_it(redraw_every, merge_codec):
    one = federation(MAPO(k=8, redraw_every=redraw_every), Quantize(8), merge_codec=merge_codec)
    for r in range(8):
        one.round((0,))  # replays every entry
        if r in (1, 4, 5):
            one.download(1)
        for client in (0, 1):
            one.download(client)
            assert same_public(one.public[client], one.server.public)
    one.download(2)
    assert same_public(one.public[2], one.server.public)
    assert one.drifted == []


def test_the_merge_codec_shortens_missed_windows():
    sizes = {}
    for merge_codec in (Raw(), Quantize(4)):
        one = federation(MAPO(k=64, redraw_every=5), Quantize(4), merge_codec=merge_codec)
        for _ in range(10):
            one.round((0,))
        sizes[merge_codec] = len(one.opened.downloads.messages({3: 0})[3])
    assert sizes[Quantize(4)] < 2 * (64 / 2 + 8) + 40  # two windows of 64 half-bytes, and headers
    assert sizes[Raw()] > 2 * 5 * 64 / 2  # all ten entries: shorter than raw snapshots, far longer than encoded ones


@pytest.mark.parametrize("redraw_every", [0, 4])
def test_sums_on_a_lattice_are_short_and_exact(redraw_every):
    """Clients that missed rounds receive one vector of integers for each basis, and reach the server's bits."""
    space = MAPO(k=64, redraw_every=redraw_every)
    one = federation(space, ErrorFeedback(Lattice(2.0)), up=Lattice(1.0, stochastic=True), merge_codec=LatticeSum())
    for r in range(11):
        one.round((0, 1) if r in (3, 6) else (0,))
    sizes = {v: len(m) for v, m in one.opened.downloads.messages({v: v for v in range(12)}).items()}
    for client in (0, 1, 2):
        one.download(client)
        assert same_public(one.public[client], one.server.public)
    assert one.drifted == []
    windows = 3 if redraw_every else 1
    assert sizes[0] - sizes[11] < windows * 64  # a byte a value in each window, where raw values take four
    entries = sum(map(len, one.server.ledger.entries)) if redraw_every == 0 else 0
    assert redraw_every or sizes[0] - sizes[11] < entries


def test_a_merge_codec_needs_a_basis_that_is_redrawn_and_has_no_state():
    with pytest.raises(IncompatibleParts, match="Write merge_codec = 'raw', or redraw_every = 10"):
        federation(MAPO(k=8, redraw_every=0), merge_codec=Quantize(4))
    with pytest.raises(IncompatibleParts, match="Use a codec without state"):
        federation(MAPO(k=8, redraw_every=2), merge_codec=ErrorFeedback(Quantize(4)))


def test_a_missed_window_is_sent_as_one_snapshot():
    one = federation(MAPO(k=8, redraw_every=4))
    for _ in range(11):
        one.round((0,))
    sizes = {v: len(m) for v, m in one.opened.downloads.messages({v: v for v in range(12)}).items()}
    vector = 4 * 8 + 2  # eight values, and the header of a body
    up_to_date = sizes[11]
    assert [(sizes[v] - up_to_date) // vector for v in range(12)] == [3] * 4 + [2] * 4 + [1] * 3 + [0]
    assert all((size - up_to_date) % vector == 0 for size in sizes.values())
    ordinary, catch_up = one.opened.downloads.split({0: b"." * sizes[10], 1: b"." * sizes[0]})
    assert (ordinary, catch_up) == (2 * sizes[10], sizes[0] - sizes[10])


def test_a_window_is_sent_as_entries_or_as_its_snapshot_whichever_is_shorter():
    """An entry is 5 bytes (eight levels of two bits, and a scale), a snapshot 32."""
    one = federation(MAPO(k=8, redraw_every=12), Quantize(2))
    for _ in range(13):
        one.round((0,))
    messages = one.opened.downloads.messages({v: v for v in range(14)})
    fields_of = {v: [body.fields for body in bodies_of(one, message)] for v, message in messages.items()}
    assert [set(fields) for fields in fields_of[0][:-1]] == [{wire.VALUES}, {wire.COORDS}]
    assert [set(fields) for fields in fields_of[11][:-1]] == [{wire.COORDS}, {wire.COORDS}]
    for version in range(13):  # no other message is shorter
        entries = [len(fields[wire.COORDS]) + 2 for fields in fields_of[version][:-1] if wire.COORDS in fields]
        assert sum(entries[:-1]) < 4 * 8 + 2
        assert len(messages[version]) <= len(messages[0])


def test_buffers_and_shared_state_are_sent_once_for_many_missed_rounds():
    one = federation(MAPO(k=8, redraw_every=1), norm=True)
    for _ in range(3):
        one.round((0,))
    bodies = wire.unpack(one.download(1), one.contract.schema).bodies
    fields = [set(wire.unpack_body(body, one.contract.schema).fields) for body in bodies]
    assert fields == [{wire.COORDS}] * 3 + [{wire.BUFFERS, wire.DRIFT_CHECK}]
    two = federation(correction=Scaffold())
    for _ in range(3):
        two.round((0,))
    body = wire.unpack_body(wire.unpack(two.download(1), two.contract.schema).bodies[-1], two.contract.schema)
    assert set(body.fields) == {wire.SHARED, wire.DRIFT_CHECK}
    assert same_public(two.public[1], two.server.public)


def test_clients_far_behind_are_sent_the_state():
    one = federation(MAPO(k=64, redraw_every=2))
    kinds = []
    for _ in range(16):
        one.round((0,))
        data = one.opened.downloads.messages({3: 0})[3]
        kinds.append(wire.unpack(data, one.contract.schema).kind)
        assert len(data) <= one.contract.weights.nbytes + one.contract.coords.nbytes + 64
        assert same_public(receive(one.contract, one.first, data).public, one.server.public)
    assert kinds[0] == wire.STEPS
    assert kinds[-1] == wire.STATE
    kept = sum(w.size for w in one.server.ledger.past) + sum(map(len, one.server.ledger.entries))
    assert kept <= one.contract.weights.nbytes + one.contract.coords.nbytes


@pytest.mark.parametrize(("space", "down", "kind"), [(MAPO(k=1), Raw(), wire.STATE), (Full(), TopK(0.001), wire.STEPS)])
def test_the_number_of_bodies_is_limited(space, down, kind, monkeypatch):
    """Each body may cost a client a merge of the whole model, even if it has few bytes."""
    monkeypatch.setattr(wire, "MAX_STEPS", 8)
    one = federation(space, down)
    kinds = []
    for _ in range(12):
        one.round((0,))
        message = wire.unpack(one.opened.downloads.messages({1: 0})[1], one.contract.schema)
        kinds.append((message.kind, len(message.bodies)))
        one.public[1] = one.first
        one.download(1)
        assert same_public(one.public[1], one.server.public)
    assert kinds[:7] == [(wire.STEPS, missed + 1) for missed in range(1, 8)]
    assert kinds[8:] == [(kind, 2)] * 4  # the state, or a snapshot of the open window


def test_empty_windows_are_not_replayed():
    """Each would merge the whole model: 50 kB of them took eight seconds."""
    one = federation(MAPO(k=8))
    schema = one.contract.schema
    request = bytes(wire.unpack(one.download(0), schema).bodies[-1])
    empty = wire.pack_body(wire.Body(frozenset(), {wire.COORDS: b""}), schema)
    for count, refusal in ((10_000, "has 2 to 513 bodies, this one has 514 or more"), (500, "without the coordin")):
        with pytest.raises(WireError, match=refusal):
            receive(one.contract, one.first, wire.pack(wire.STEPS, count, [*[empty] * count, request], schema, count))


def test_messages_above_the_largest_size_are_refused():
    one = federation()
    plan, contract = Round.open(one.contract, one.server).plan, one.contract
    one.download(0)
    up, down = one.upload(0), Round.open(contract, one.server).downloads.messages({1: 0})[1]
    with pytest.raises(WireError, match="bytes, expected at most"):
        decode_upload(contract, plan, 0, 0, up + bytes(contract.longest_up))
    with pytest.raises(WireError, match="bytes, expected at most"):
        receive(contract, one.first, down + bytes(contract.longest_down))
    with pytest.raises(WireError, match="bytes, expected at most"):
        Round.open(contract, one.server).downloads.full_state(
            request_full_state(contract, 0, 1) + bytes(contract.longest_up), 1
        )
    with pytest.raises(WireError, match="of kind 'steps' came from a client"):
        decode_upload(contract, plan, 0, 0, down)


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "most"), [(8, 148), (4, 84)])
@pytest.mark.parametrize("redraw_every", [1, 10])
def test_a_message_of_128_values_has_little_overhead(bits, most, redraw_every):
    codec = Quantize(bits)
    task = digits_task(perceptron(hidden=4), sizes=(5, 3))
    method = Method(space=MAPO(k=128, redraw_every=redraw_every), up=codec, down=codec, client_opt=SGD(0.5))
    one = Federation(method, task, Local(batch=0, steps=1))
    for _ in range(3):
        (up,) = one.round((0,)).values()
        down = one.download(0)
        for data in (up, down):
            assert len(data) + 1 <= most  # a version above 127 takes one byte more
    assert one.drifted == []


# -- drift ------------------------------------------------------------------------------------------------------------


def perturbed(tree, size: float):
    """The tree plus noise whose norm is `size` times its own."""
    norm = sum(float(block.square().sum()) for block in tree.values()) ** 0.5
    noise = {name: Key(5).fold(name).normal(*block.shape) for name, block in tree.items()}
    noise_norm = sum(float(block.square().sum()) for block in noise.values()) ** 0.5
    return tmap(lambda x, n: x + n * (size * norm / noise_norm), tree, noise)


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("missed", [0, 4])
def test_a_drifted_client_is_found_and_receives_the_state(name, missed):
    one = federation(SPACES[name], norm=True)
    for _ in range(4):
        one.round((0,))
    one.download(1)
    part = "base" if SPACES[name].redraw_every else "coords"
    one.public[1] = one.public[1]._replace(**{part: perturbed(getattr(one.public[1], part), 0.5)})
    if missed == 0:
        one.download(1)
    for _ in range(missed):
        one.round((0,))
    one.download(1)
    replaced = missed >= 2 and part == "coords"  # the snapshot replaced all coordinates
    assert one.drifted == ([] if replaced else [1])
    assert same_public(one.public[1], one.server.public)
    one.round((1,))
    one.download(1)
    assert len(one.drifted) <= 1


def test_a_nan_is_found():
    one = federation(MAPO(k=8))
    one.round((0,))
    one.download(1)
    base = tmap(torch.clone, one.public[1].base)
    base["0.weight"][0, 0] = float("nan")
    one.public[1] = one.public[1]._replace(base=base)
    one.download(1)
    assert one.drifted == [1]
    assert same_public(one.public[1], one.server.public)


def test_rounding_is_within_the_tolerance():
    one = federation(MAPO(k=8, redraw_every=3), norm=True)
    for r in range(12):
        one.round((0,))
        one.public[0] = one.public[0]._replace(base=perturbed(one.public[0].base, 3e-6))
        one.download(r % 4)
    assert one.drifted == []


def test_drift_is_not_found_without_the_drift_check():
    one = federation(MAPO(k=8), drift_check=False)
    one.round((0,))
    one.download(1)
    one.public[1] = one.public[1]._replace(base=perturbed(one.public[1].base, 0.5))
    one.download(1)
    assert one.drifted == []
    assert not same_public(one.public[1], one.server.public)


def test_a_drifted_client_keeps_its_private_blocks():
    one = federation(schedule=AllBlocks(private=("2.*",)))
    one.round((0, 1))
    before = one.states[1].unsent
    one.public[1] = one.public[1]._replace(coords=perturbed(one.public[1].coords, 0.5))
    one.download(1)
    assert one.drifted == [1]
    assert one.states[1].unsent == before != {}


def test_the_full_state_is_read_from_version_zero():
    one = federation(MAPO(k=8))
    one.round((0,))
    response = one.opened.downloads.full_state(request_full_state(one.contract, 1, 0), 0)
    assert len(request_full_state(one.contract, 1, 0)) == 7
    assert same_public(receive(one.contract, one.first._replace(version=1), response).public, one.server.public)
    wrong = one.opened.downloads.messages({0: 1})[0]
    with pytest.raises(Drifted, match=r"the public state of version 1 is not the server's: .* request the whole state"):
        receive(one.contract, one.first._replace(version=1, base=perturbed(one.first.base, 0.1)), wrong)


@pytest.mark.parametrize(("size", "found"), [(1e-6, 0), (1e-5, 0), (1e-3, 85), (1e-2, 97)])
def test_detection_rate_of_the_drift_check(size, found):
    x = {"a": Key(1).normal(50, 40), "b": Key(2).normal(7), "c": Key(3).normal(5000)}
    y, hits = perturbed(x, size), 0
    for i in range(100):
        key = Key(9).fold(i)
        hits += abs(project(x, key.signs) - project(y, key.signs)) > tolerance(x)
    assert hits >= found
    assert found or hits == 0


@pytest.mark.parametrize("n", [4099, 20_000])
def test_signs_of_versions_that_are_drawn_together_are_those_of_each(n):
    for version in (0, 1, 7, 8, 1003):
        assert signs_of_version(Key(3), version, n).tolist() == Key(3).fold("guard", version).signs(n).tolist()
