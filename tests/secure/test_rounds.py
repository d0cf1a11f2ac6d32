"""Secure aggregation over a transport in memory: exact sums with drop-outs, and what each side learns."""

from __future__ import annotations

import numpy as np
import pytest

from tests.federation import same_public
from tests.flower.in_memory import FlowerServer, InMemory
from tests.flower.test_server import experiment, play
from tests.flower.timed import Timed
from tests.secure.federation import EIGHT, Setup, plain_sum, record_words
from thinwire.errors import WireError
from thinwire.federation.simulation import make_simulation
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.protocol.upload import decode_upload
from thinwire.runs.build import build_job
from thinwire.schedules.base import Plan
from thinwire.secure import frames
from thinwire.secure.client import mask_secrets
from thinwire.secure.keys import combine, commit
from thinwire.secure.masks import pair_masks, self_mask

pytest.importorskip("cryptography")


METHODS = {
    "fedavg": {},
    "mapo": {},
    "fedavg random-k": {"method.up": {"kind": "randomk", "density": 0.2, "shared": True}},
    "evofed": {},
    "fetchsgd": {"method.server_opt.momentum": 0.5},
    "ffa-lora": {},
    "ddg": {"method.privacy.sigma": 0.0},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_secure_deployment_equals_the_secure_simulation(method):
    quick = {"method.secure_aggregation": True, "local.steps": 1, **METHODS[method]}
    chosen = experiment(method.split()[0], seed=3, **quick)
    job = build_job(chosen)
    theirs, their_records, _ = play(make_simulation(chosen.engine, job), 2)
    server = FlowerServer(chosen.engine, job, InMemory(Client(chosen.engine, job)), RoundPolicy())
    ours, records, _ = play(server, 2)
    assert same_public(ours.server.public, theirs.server.public)
    assert records[-1].loss == pytest.approx(their_records[-1].loss, abs=1e-4)
    assert records[-1].bytes_up > their_records[-1].bytes_up


# dropped in these phases, of eight clients with threshold 6
DROPS = {
    "none": {},
    "before keys, before the upload": {(0, "keys", 1): "request lost", (0, "", 6): "request lost"},
    "before shares, after the upload": {(0, "shares", 0): "request lost", (0, "unmask", 7): "request lost"},
    "after shares, before the upload": {(0, "shares", 3): "response lost", (0, "", 4): "request lost"},
    "late uploads": {(0, "", 2): "response lost", (0, "", 5): "response lost"},
    "upload, unmask": {(0, "", 0): "request lost", (0, "unmask", 5): "response lost"},
}


@pytest.mark.parametrize("name", DROPS)
def test_two_of_eight_clients_drop_out_and_the_sum_is_exact(name, monkeypatch):
    words, sums = record_words(monkeypatch)
    setup = Setup(script=DROPS[name])
    state, (record, _), _ = play(setup.server, 2)
    gone = {client for (_, phase, client), _ in DROPS[name].items() if phase != "unmask"}
    left = [client for client in range(8) if client not in gone]
    assert np.array_equal(sums[0], plain_sum(words, 0, left))
    assert np.array_equal(sums[1], plain_sum(words, 1, range(8)))  # all are back
    assert (record.clients, record.absent) == (len(left), len(gone))
    assert sorted(state.clients) == list(range(8))
    assert state.server.public.version == 2
    silent = [line for line in setup.lines if line.startswith("round 1: no answer of client ")]
    assert len(silent) == len({phase for _, phase, _ in DROPS[name]})
    assert [line.startswith("round 1: without client ") for line in setup.lines if line not in silent] == [True] * bool(
        gone
    )


def test_a_silent_client_costs_the_time_of_grace_once_and_is_named():
    """Four clients, of which one is listed but silent; three are enough. Then one more goes, and too few are left."""
    quick = {**EIGHT, "task.clients": 4, "cohort.size": 4}
    chosen, gone = experiment("fedavg", **quick), {3}
    job = build_job(chosen)
    transport = Timed(Client(chosen.engine, job), offline=lambda: frozenset(gone), listed=lambda: frozenset(range(4)))
    lines: list[str] = []
    policy = RoundPolicy(seconds=60.0, grace=3.0, tries=1, wait=30.0)
    server = FlowerServer(chosen.engine, job, transport, policy, lines.append, clock=transport.clock)
    state, record = server.round(server.start())
    assert transport.clock.now < 3.0 + 4 * 4.0  # four phases with three answers, one after another
    assert lines == ["round 1: no answer of client 3 (phase 'keys')", "round 1: without client 3 (no response in time)"]
    assert record.absent == 1
    state, before = state, transport.clock.now
    state, _ = server.round(state)
    assert transport.clock.now - before < 4 * 4.0  # it is not waited for again
    gone.add(2)
    with pytest.raises(WireError, match="too few clients took part"):
        server.round(state)
    assert "round 3: no answer of client 2, client 3 (phase 'keys')" in lines
    transport.listed = lambda: frozenset(range(2))
    with pytest.raises(WireError):
        server.round(state)
    assert "waiting for client 2, client 3: 2 clients are there, 3 are wanted" in lines


def test_loss_and_examples_of_one_client_are_not_sent():
    setup = Setup()
    _, (record,), _ = play(setup.server, 1)
    assert all((one.loss, one.examples, one.evaluation) == (0.0, 0, None) for _, _, one in setup.transport.seen)
    plain = Setup(**{"method.secure_aggregation": False})
    assert play(plain.server, 1)[1][0].loss == pytest.approx(record.loss, abs=1e-4)


# -- what the server sees ----------------------------------------------------------------------------------------------


def fits_uniform(data: bytes) -> bool:
    """Chi-squared test of bytes at five standard deviations, and of bits."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    bits = np.unpackbits(np.frombuffer(data, np.uint8)).mean()
    return abs(statistic - 255) < 5 * (2 * 255) ** 0.5 and abs(bits - 0.5) < 5 * 0.5 / (8 * len(data)) ** 0.5


def masked_words(setup: Setup, client: int, version: int = 0) -> np.ndarray:
    """The masked words of a client's upload."""
    contract = setup.server.contract
    plan = Plan(contract.sendable.named)
    return np.frombuffer(decode_upload(contract, plan, version, client, setup.transport.sent("")[client]).masked, "<u4")


def test_the_messages_that_the_server_receives_are_uniform(monkeypatch):
    """Masked words, sealed shares and revealed seeds; plain values are not."""
    words, _ = record_words(monkeypatch)
    setup = Setup()
    play(setup.server, 1)
    hidden = [masked_words(setup, i) for i in range(8)]
    assert all(fits_uniform(one.tobytes()) for one in hidden)
    assert not fits_uniform(words[0, 0].astype("<u4").tobytes())
    sealed = b""
    for data in setup.transport.sent("shares").values():
        _, (shares,), _ = frames.read(frames.ANSWERS, "shares", data, 8)
        sealed += b"".join(shares.values())
    assert fits_uniform(sealed)
    for i in range(8):  # no word is that of the plain value, and neighbors are not correlated
        plain = words[0, i].astype(np.uint32)
        assert (hidden[i] == plain).mean() < 0.001
        assert abs(np.corrcoef(hidden[i].astype(float), words[0, i].astype(float))[0, 1]) < 0.08
    again = Setup()
    play(again.server, 1)
    assert (masked_words(again, 0) == hidden[0]).mean() < 0.001  # new keys in each session


# -- colluding clients -------------------------------------------------------------------------------------------------


def known_to_colluders(setup: Setup, colluders, others) -> dict[int, np.ndarray]:
    """The uploads of the others without all masks that the server and the colluding clients can compute."""
    kept = {i: setup.transport.kept(i).session for i in colluders}
    head, schema = kept[colluders[0]].head, setup.server.contract.schema.digest
    context = schema + head.pack("keys")
    _, (threshold, adverts), _ = frames.read(frames.REQUESTS, "shares", kept[colluders[0]].listed, 8)
    result = {}
    for i in others:
        words = masked_words(setup, i).astype(np.uint32)
        shares = {}
        for client, data in setup.transport.sent("unmask").items():
            _, (revealed,), _ = frames.read(frames.ANSWERS, "unmask", data, 8)
            shares[client + 1] = revealed[i][1]
        seed = combine(dict(list(shares.items())[:threshold]))
        assert commit(seed, context) == adverts[i].commitment

        def secret(a, b, i=i):
            colluder = a if b == i else b
            return mask_secrets(colluder, kept[colluder].mask_key, adverts, context)(a, b)

        words = words - self_mask(len(words), seed, 0) - pair_masks(len(words), i, colluders, 0, secret)
        result[i] = words
    return result


def test_six_colluding_clients_and_the_server_learn_only_the_sum_of_the_other_two(monkeypatch):
    """With a threshold of 7: what remains of each of the two is uniform, and only their sum is theirs."""
    words, _ = record_words(monkeypatch)
    setup = Setup(policy=RoundPolicy(seconds=0.01, quorum=0.875, tries=1))
    play(setup.server, 1)
    colluders, others = (0, 1, 2, 3, 4, 5), (6, 7)
    known = known_to_colluders(setup, colluders, others)
    assert np.array_equal(known[6] + known[7], (words[0, 6] + words[0, 7]).astype(np.uint32))
    for i in others:
        assert fits_uniform(known[i].tobytes())
        assert abs(np.corrcoef(known[i].astype(float), words[0, i].astype(float))[0, 1]) < 0.08
        # six shares of the mask key do not recover it
        shares = shares_held(setup, colluders, i)
        assert combine_or_none(shares) != setup.transport.kept(i).session.mask_key


def test_six_colluding_clients_and_the_server_learn_more_with_a_threshold_of_six():
    """The limit of the threshold: as many colluding clients as the threshold recover the secrets of others."""
    setup = Setup()
    play(setup.server, 1)
    shares = shares_held(setup, (0, 1, 2, 3, 4, 5), 6)
    assert combine_or_none(shares) == setup.transport.kept(6).session.mask_key


def test_six_colluding_clients_without_the_server_receive_nothing_of_the_uploads():
    """Requests to clients have no word of another client's upload; only the next version depends on it."""
    setup = Setup()
    play(setup.server, 1)
    uploads = {client: masked_words(setup, client).tobytes() for client in (6, 7)}
    received = b"".join(request.data for client, request, _ in setup.transport.seen if client < 6)
    assert all(data[at : at + 8] not in received for data in uploads.values() for at in range(0, 400, 8))


def shares_held(setup: Setup, holders, owner: int) -> dict[int, int]:
    """The shares of a client's mask key that others hold."""
    found = {}
    for i in holders:
        client, session = setup.transport.secure(i), setup.transport.kept(i).session
        found[i + 1] = client._members(i, session, client._listed(i, session))[owner].mask_key
    return found


def combine_or_none(shares: dict[int, int]) -> bytes | None:
    try:
        return combine(shares)
    except Exception:
        return None


# -- noise -------------------------------------------------------------------------------------------------------------


def test_clients_that_remain_have_the_requested_noise(monkeypatch):
    """Two of eight drop out: the noise of the other six is at least that of the method."""
    words, sums = record_words(monkeypatch)
    script = {(0, "", 1): "request lost", (0, "unmask", 2): "request lost"}
    quick = {"method.privacy.clip": 0.5, "method.privacy.sigma": 0.7}
    setup = Setup("ddg", script=script, **quick)
    play(setup.server, 1)
    left = [0, 2, 3, 4, 5, 6, 7]
    assert np.array_equal(sums[0], plain_sum(words, 0, left))
    part = setup.job.method.privacy
    lattice = part.masked_lattice(8, 6)
    assert 6 * lattice.variance >= (0.7 * lattice.most) ** 2
    assert 8 * lattice.most + 12 * (8 * lattice.variance) ** 0.5 <= 1 << 31
    noisy = np.std(sums[0].astype(np.int64).astype(float))
    assert noisy > 0.9 * (7 * lattice.variance) ** 0.5
