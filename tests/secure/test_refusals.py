"""Secure aggregation with faults and with servers and clients that lie: what is refused, and how a round goes on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.federation import same_public
from tests.flower.test_server import play
from tests.secure.federation import Setup, plain_sum, record_words
from thinwire.errors import WireError
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.sites import Roster
from thinwire.protocol.round import Request, Round
from thinwire.secure import frames
from thinwire.secure.frames import Head
from thinwire.secure.keys import PRIME, SiteKeys, agree, make_key, read_public_key
from thinwire.wire import message as wire

pytest.importorskip("cryptography")

PATIENT = RoundPolicy(seconds=0.01, tries=3)


def kill(setup: Setup, phase: str, after: int, state=None):
    """Run until the server is killed in this phase, after so many of its requests."""
    left = [after]

    def stop(now: str) -> bool:
        left[0] -= now == phase
        return left[0] < 0

    setup.transport.stop = stop
    with pytest.raises(KeyboardInterrupt):
        play(setup.server, 1, state)
    setup.transport.stop = lambda phase: False
    return setup.restarted()


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["keys", "shares", "", "unmask"])
def test_a_server_that_was_killed_in_any_phase_ends_with_the_same_bits(phase):
    whole, killed = Setup(), Setup()
    expected, _, _ = play(whole.server, 1)
    state, _, _ = play(kill(killed, phase, 3), 1)
    assert same_public(state.server.public, expected.server.public)
    assert not killed.log


def test_a_version_is_skipped_if_its_session_cannot_be_finished(monkeypatch):
    """Three of eight are gone after their uploads, so masks remain, and no client answers version 0 twice."""
    words, sums = record_words(monkeypatch)
    script = {(0, "unmask", i): "request lost" for i in (1, 4, 6)}
    setup = Setup(script=script)
    state, (record,), _ = play(setup.server, 1)
    assert state.server.public.version == 2
    assert (state.round, record.clients) == (1, 8)
    assert (sums[0] == plain_sum(words, 1, range(8))).all()
    assert "5 clients helped to remove masks, 6 are needed; version 0 is skipped" in setup.log
    assert record.bytes_catchup > 8 * 4 * 4810  # the uploads of the skipped version


def test_a_killed_server_goes_on_if_other_clients_are_there_afterwards():
    setup = Setup(policy=PATIENT)
    server = kill(setup, "unmask", 2)
    setup.transport.script = {(0, phase, 0): "request lost" for phase in ("keys", "shares", "")}
    state, (record,), _ = play(server, 1)
    assert (state.server.public.version, record.clients) == (2, 8)
    assert "clients have answered version 0; version 0 is skipped" in setup.log


def test_a_restored_checkpoint_skips_the_versions_that_clients_have_answered():
    setup = Setup()
    start = setup.server.start()
    state, _, _ = play(setup.server, 2, start)
    setup.transport.run = "another run directory"
    again, _, _ = play(setup.restarted(), 1, start)
    assert (state.server.public.version, again.server.public.version) == (2, 3)


def test_too_few_clients_stop_the_run_with_one_line():
    setup = Setup(script={(0, "keys", i): "request lost" for i in range(3)})
    with pytest.raises(WireError, match=r"too few clients took part.*the same command continues") as error:
        play(setup.server, 1)
    assert "\n" not in str(error.value)
    assert "5 clients sent keys, 6 are needed" in setup.log
    assert not setup.transport.sent("shares")


def test_a_client_that_lost_its_disk_takes_part_from_the_next_version_on():
    setup = Setup()
    state, _, _ = play(setup.server, 2)
    del setup.transport.stored[3]
    state, (record, after), _ = play(setup.server, 2, state)
    assert (record.clients, record.refused) == (7, 1)
    assert (after.clients, after.drifted) == (8, 1)
    assert "refused client 3: it could not respond: AlreadyAnswered" in setup.log
    assert "its state was lost, so it may have answered version 2" in setup.log


# -- a server that lies ------------------------------------------------------------------------------------------------


def ask(setup: Setup, client: int, phase: str, data: bytes, accepted: int = -1):
    """The response of a client to a request of a server that does what it wants."""
    return setup.transport.respond(client, Request(data, accepted, phase))


request = partial(frames.pack, frames.REQUESTS)


def sent_adverts(setup: Setup) -> dict[int, frames.Advert]:
    """The public keys that clients have sent."""
    answers = {i: frames.read(frames.ANSWERS, "keys", data, 8) for i, data in setup.transport.sent("keys").items()}
    return {i: advert for i, (_, (advert,), _) in answers.items()}


def last(setup: Setup, phase: str, client: int) -> bytes:
    """The last request of the honest server in a phase."""
    return [request.data for who, request, _ in setup.transport.seen if (request.phase, who) == (phase, client)][-1]


def test_a_second_upload_for_a_version_never_leaves_a_client():
    setup = Setup()
    play(setup.server, 1)
    for session in (b"another session!", b"and another one!"):
        response = ask(setup, 2, "keys", frames.pack(frames.REQUESTS, "keys", Head(session, 0)))
        assert response.error == "AlreadyAnswered: it answered version 0, and answers each version once"
    first = setup.transport.sent("")[2]
    assert ask(setup, 2, "", last(setup, "", 2)).data == first  # the same bytes in the same session
    other = frames.Head(setup.transport.kept(2).session.head.session, 1)
    assert "has no keys in this session" in ask(setup, 2, "", other.pack("") + last(setup, "", 2)[22:]).error


def test_a_client_never_reveals_both_secrets_of_another():
    setup = Setup()
    play(setup.server, 1)
    head = setup.transport.kept(0).session.head
    for left in ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5)):
        response = ask(setup, 0, "unmask", request("unmask", head, dict.fromkeys(left, b""), {}))
        assert response.error == "WireError: this session has other survivors"
    _, (revealed,), _ = frames.read(frames.ANSWERS, "unmask", setup.transport.sent("unmask")[0], 8)
    assert {kind for kind, _ in revealed.values()} == {frames.SEED}


def halfway(setup: Setup, phase: str) -> None:
    """Stop an honest server before this phase."""
    kill(setup, phase, 0)


def test_lists_members_and_survivors_are_fixed_and_checked():
    setup = Setup()
    halfway(setup, "unmask")
    session = setup.transport.kept(0).session
    head, listed = session.head, last(setup, "shares", 0)
    _, (_, adverts), _ = frames.read(frames.REQUESTS, "shares", listed, 8)
    fewer = request("shares", head, 6, {i: adverts[i] for i in range(7)})
    assert "another list of keys" in ask(setup, 0, "shares", fewer).error
    _, (sealed,), download = frames.read(frames.REQUESTS, "", last(setup, "", 0), 8)
    fewer = request("", head, {i: sealed[i] for i in range(1, 7)}) + download
    assert "other members" in ask(setup, 0, "", fewer).error
    for left in ((0, 1, 2, 3, 4), (1, 2, 3, 4, 5, 6)):  # too few, or not with this client
        data = request("unmask", head, dict.fromkeys(left, b""), {})
        assert "survivors of 8 clients" in ask(setup, 0, "unmask", data).error
    everyone = request("confirm", head, dict.fromkeys(range(8), b""))
    assert "has no site key" in ask(setup, 0, "confirm", everyone).error


@pytest.mark.parametrize(
    ("threshold", "clients", "why"),
    [
        (5, range(8), "a threshold of 5 for 8 clients"),
        (9, range(8), "a threshold of 9 for 8 clients"),
        (2, (0, 1), "a threshold of 2 for 2 clients; with a cohort of 8 it must be 6"),
        (6, range(1, 8), "does not have the key of this client"),
    ],
)
def test_small_thresholds_and_cohorts_are_refused(threshold, clients, why):
    setup = Setup()
    halfway(setup, "shares")
    head = setup.transport.kept(0).session.head
    adverts = sent_adverts(setup)
    response = ask(setup, 0, "shares", request("shares", head, threshold, {i: adverts[i] for i in clients}))
    assert why in response.error
    assert not response.data


def test_clients_that_received_other_lists_cannot_open_each_others_shares():
    setup = Setup()
    halfway(setup, "shares")
    head = setup.transport.kept(0).session.head
    adverts, sealed = sent_adverts(setup), {}
    for i in range(8):
        listed = {j: adverts[j] for j in (range(7) if i == 0 else range(8))}
        answer = ask(setup, i, "shares", request("shares", head, 6, listed))
        _, (sealed[i],), _ = frames.read(frames.ANSWERS, "shares", answer.data, 8)
    state = setup.server.start()
    download = Round.open(setup.server.contract, state.server).downloads.messages({0: 0, 1: 0})
    for client, sender in ((0, 1), (1, 0)):
        shares = {i: sealed[i][client] for i in range(7) if i != client}
        response = ask(setup, client, "", request("", head, shares) + download[client])
        assert f"the shares of client {sender} cannot be read" in response.error
        assert not response.data


def test_points_of_small_order_are_refused():
    """Their secret would not depend on the private key."""
    for point in (bytes(32), b"\x01" + bytes(31)):
        with pytest.raises(WireError, match="a public key is not valid"):
            agree(bytes(range(32)), point, b"", b"")


def test_requests_of_another_kind_are_refused():
    setup, plain = Setup(), Setup(**{"method.secure_aggregation": False})
    halfway(setup, "keys")
    for phase, data in (("", b""), ("", b"\x01" * 40), ("what", b""), ("keys", b"\x01\x00"), ("unmask", b"\x01" * 21)):
        response = ask(setup, 0, phase, data)
        assert response.error.startswith("WireError: ")
        assert not response.data
    assert "no secure aggregation" in ask(plain, 0, "keys", Head(bytes(16), 0).pack("keys")).error


# -- clients that lie --------------------------------------------------------------------------------------------------


def test_wrong_shares_of_a_client_are_outvoted(monkeypatch):
    words, sums = record_words(monkeypatch)
    setup = Setup()

    def change(client, request, response):
        if request.phase != "unmask" or client != 1:
            return response
        head, (shares,), _ = frames.read(frames.ANSWERS, "unmask", response.data, 8)
        wrong = {i: (kind, (share + 1) % PRIME) for i, (kind, share) in shares.items()}
        return response._replace(data=frames.pack(frames.ANSWERS, "unmask", head, wrong))

    setup.transport.change = change
    play(setup.server, 1)
    assert (sums[0] == plain_sum(words, 0, range(8))).all()


def test_answers_that_are_not_valid_are_refused_by_name():
    def change(client, request, response):
        return response._replace(data=response.data[:-1]) if (request.phase, client) == (phase, 5) else response

    for phase in ("keys", "shares", "", "unmask"):
        setup = Setup()
        setup.transport.change = change
        _, (record,), _ = play(setup.server, 1)
        assert "round 1: refused client 5: " in setup.log
        assert f"(phase {phase or 'upload'!r})" in setup.log
        assert len(setup.lines) == 1
        assert record.clients == (8 if phase == "unmask" else 7)


def test_a_vector_that_does_not_belong_to_the_sum_is_found():
    """A client cannot be named that changed its masked words; the round is repeated without their effect."""
    setup = Setup(policy=PATIENT)
    contract = setup.server.contract

    def change(client, request, response):
        if request.phase or client != 4 or b"skipped" in setup.log.encode():
            return response
        schema = contract.schema.sent_by(4)
        body = wire.unpack(response.data, schema).first
        words = bytearray(body.fields[wire.COORDS])
        words[-20] ^= 1  # the word in which each client adds 1
        fields = {**body.fields, wire.COORDS: bytes(words)}
        data = wire.pack(wire.UP, 0, [wire.pack_body(replace(body, fields=fields), contract.schema)], schema)
        return response._replace(data=data)

    setup.transport.change = change
    state, _, _ = play(setup.server, 1)
    assert "the sum of the uploads is not valid" in setup.log
    assert state.server.public.version == 2


# -- site keys ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def signed(tmp_path) -> Setup:
    """Clients that sign, each with the key of its site, and know the roster."""
    files = [make_key(tmp_path / f"site-{i}") for i in range(8)]
    roster = Roster()
    for i, file in enumerate(files):
        roster = roster.add(f"site-{i}", read_public_key(file.with_suffix(".pub")))
    public = {client: site.key for client, site in roster.by_client.items()}
    return Setup(keys={i: SiteKeys(file, public) for i, file in enumerate(files)})


def test_a_round_with_site_keys_confirms_the_survivors(monkeypatch, signed):
    words, sums = record_words(monkeypatch)
    setup = signed
    setup.transport.script = {(0, "", 1): "request lost", (0, "confirm", 2): "request lost"}
    play(setup.server, 1)
    assert (sums[0] == plain_sum(words, 0, [0, 2, 3, 4, 5, 6, 7])).all()
    assert sorted(setup.transport.sent("confirm")) == [0, 3, 4, 5, 6, 7]
    silent = ("client 1 (phase 'upload')", "client 2 (phase 'confirm')")
    assert setup.lines[:2] == [f"round 1: no answer of {who}" for who in silent]
    assert setup.lines[2:] == ["round 1: without client 1 (no response in time)"]


def test_with_site_keys_a_server_cannot_put_itself_between_two_clients(signed):
    """It replaces the keys of client 1 by its own; every other client refuses the list."""
    setup = signed
    forged = Setup()
    play(forged.server, 1)

    def change(client, request, response):
        replaced = (request.phase, client) == ("keys", 1)
        return response._replace(data=forged.transport.sent("keys")[1]) if replaced else response

    setup.transport.change = change
    with pytest.raises(WireError, match="too few clients"):
        play(setup.server, 1)
    assert "refused client 0: it could not respond: WireError: the signature of client 1" in setup.log
    assert not setup.transport.sent("")


def test_with_site_keys_survivors_need_confirmation_by_the_threshold(signed):
    """A server that tells two groups of clients about different survivors gets shares from neither."""
    setup = signed
    halfway(setup, "confirm")
    head = setup.transport.kept(0).session.head
    seven, six = tuple(range(7)), (0, 1, 2, 3, 4, 7)
    signatures = {}
    for i in range(8):
        left = seven if i in (0, 1, 2, 5, 6) else six
        answer = ask(setup, i, "confirm", request("confirm", head, dict.fromkeys(left, b"")))
        _, (signatures[i],), _ = frames.read(frames.ANSWERS, "confirm", answer.data, 8)
    other = request("confirm", head, dict.fromkeys(six, b""))
    assert "other survivors" in ask(setup, 0, "confirm", other).error
    for client, left in ((0, seven), (3, six)):
        for names in (left, (0, 1, 2, 5, 6), (3, 4, 7), ()):
            proof = {i: signatures[i] for i in names}
            response = ask(setup, client, "unmask", request("unmask", head, dict.fromkeys(left, b""), proof))
            assert "confirmed the survivors" in response.error or "signature of client" in response.error
            assert not response.data


def test_clients_that_are_not_on_the_roster_are_refused(signed):
    keys = signed.transport.keys[0]
    fewer = {client: key for client, key in keys.public.items() if client != 5}
    with pytest.raises(WireError, match="the roster of this site has no key for client 5"):
        SiteKeys(keys.private, fewer).check(5, b"", b"")
    with pytest.raises(WireError, match="signature of client 0 is not valid"):
        keys.check(0, b"one", keys.sign(b"two"))
