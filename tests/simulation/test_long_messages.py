"""Messages of more than a megabyte: written without copies and on several cores, with the bytes of short paths."""

import numpy as np
import pytest

from tests.federation import digits_task, perceptron, same_public
from tests.simulation.test_engine import job
from thinwire.core import rows, threads
from thinwire.core.parallel import PARALLEL_BYTES
from thinwire.errors import WireError
from thinwire.federation.local_engine import LocalEngine
from thinwire.protocol import Method, client, entries
from thinwire.protocol.download import RoundOpening
from thinwire.protocol.upload import decode_uploads
from thinwire.schedules.base import Plan

ROUNDS = 3


def play(method):
    """The state after a few rounds, and all messages."""
    task = digits_task(perceptron(hidden=4000), sizes=(5, 3, 4, 6))
    simulation = LocalEngine(backend="vmap").prepare(job(method, task, rounds=ROUNDS, cohort=3))
    state, sent = simulation.start(), {}
    for _ in range(ROUNDS):
        state, _ = simulation.round(state, lambda number, way, i, data: sent.update({(number, way, i): data}))
    return simulation, state, sent


@pytest.mark.parametrize("upload", ["delta", "weights"])
def test_long_messages_have_the_same_bytes_on_every_path(upload, three_cores, monkeypatch):
    simulation, state, sent = play(Method(upload=upload))
    assert simulation.contract.code.nbytes > PARALLEL_BYTES
    assert isinstance(state.server.ledger.entries[-1], memoryview)
    monkeypatch.setattr(threads, "FEW", 2)  # as if three threads were many
    _, _, many = play(Method(upload=upload))
    assert sent == many
    for module in (rows, client, entries):
        monkeypatch.setattr(module, "PARALLEL_BYTES", 1 << 40)
    _, other, again = play(Method(upload=upload))
    assert isinstance(other.server.ledger.entries[-1], bytes)
    assert sent == again
    assert same_public(state.server.public, other.server.public)
    assert state.server.ledger == other.server.ledger


def test_long_uploads_are_not_copied(monkeypatch):
    seen = []
    made = client.make_uploads

    def watched(contract, group, updates, *rest):
        messages, states = made(contract, group, updates, *rest)
        whole = updates.rows.whole.numpy().view(np.uint8)
        seen.extend(np.shares_memory(np.frombuffer(one, np.uint8), whole) for one in messages)
        return messages, states

    monkeypatch.setattr("thinwire.federation.simulation.make_uploads", watched)
    play(Method())
    assert seen == [True] * 3 * ROUNDS


def test_the_ordinary_part_of_a_download_is_the_length_of_that_message():
    simulation, state, _ = play(Method())
    opening = RoundOpening(simulation.contract, state.server)
    ordinary = sum(map(len, opening.shortest(ROUNDS - 1)))
    assert opening.split([ordinary, 2 * ordinary]) == (2 * ordinary, ordinary)


def test_damage_of_a_very_long_message_is_found(three_cores, monkeypatch):
    simulation, state, sent = play(Method())
    messages = {i: bytearray(data) for (number, way, i), data in sent.items() if (number, way) == (ROUNDS, "up")}
    public = state.server.public._replace(version=ROUNDS - 1)
    plan = Plan(simulation.contract.coords.named)
    monkeypatch.setattr(threads, "FEW", 2)
    assert len(decode_uploads(simulation.contract, public, plan, messages)) == 3
    messages[min(messages)][500_000] ^= 1
    with pytest.raises(WireError, match="checksum does not match"):
        decode_uploads(simulation.contract, public, plan, messages)
