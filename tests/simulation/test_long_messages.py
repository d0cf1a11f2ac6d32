"""Messages of more than a megabyte: written without copies and on several cores, with the bytes of short paths."""

import numpy as np
import pytest

from tests.federation import digits_task, perceptron, same_public
from tests.simulation.test_engine import job
from thinwire.core import rows
from thinwire.core.threads import LEAST
from thinwire.protocol import Method, client, entries
from thinwire.protocol.download import RoundOpening
from thinwire.simulation.engine import LocalEngine

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
    assert simulation.contract.code.nbytes > LEAST
    assert isinstance(state.server.ledger.entries[-1], memoryview)
    for module in (rows, client, entries):
        monkeypatch.setattr(module, "LEAST", 1 << 40)
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

    monkeypatch.setattr("thinwire.simulation.simulation.make_uploads", watched)
    play(Method())
    assert seen == [True] * 3 * ROUNDS


def test_the_ordinary_part_of_a_download_is_the_length_of_that_message():
    simulation, state, _ = play(Method())
    opening = RoundOpening(simulation.contract, state.server)
    ordinary = sum(map(len, opening.shortest(ROUNDS - 1)))
    assert opening.split([ordinary, 2 * ordinary]) == (2 * ordinary, ordinary)
