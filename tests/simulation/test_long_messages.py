"""Messages of more than a megabyte: encoded and decoded on several cores, with the bytes of short paths."""

import pytest

from tests.federation import decoded, digits_task, perceptron, same_public
from tests.simulation.test_engine import job
from thinwire.core import parallel
from thinwire.core.parallel import PARALLEL_BYTES
from thinwire.errors import WireError
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.protocol import Method
from thinwire.protocol.round import Round
from thinwire.schedules.base import Plan

ROUNDS = 3


def play(method):
    """The state after a few rounds, and all messages."""
    task = digits_task(perceptron(hidden=4000), sizes=(5, 3, 4, 6))
    simulation = make_simulation(Engine(backend="vmap"), job(method, task, rounds=ROUNDS, cohort=3))
    state, sent = simulation.start(), {}
    for _ in range(ROUNDS):
        state, _ = simulation.round(state, lambda number, way, i, data: sent.update({(number, way, i): data}))
    return simulation, state, sent


@pytest.mark.parametrize("upload", ["delta", "weights"])
def test_long_messages_have_the_same_bytes_on_every_path(upload, three_cores, monkeypatch):
    simulation, state, sent = play(Method(upload=upload))
    assert simulation.contract.code.nbytes > PARALLEL_BYTES
    monkeypatch.setattr(parallel, "FEW", 2)  # as if three threads were many
    _, _, many = play(Method(upload=upload))
    assert sent == many
    monkeypatch.setattr(parallel, "PARALLEL_BYTES", 1 << 40)  # no threads
    _, other, again = play(Method(upload=upload))
    assert sent == again
    assert same_public(state.server.public, other.server.public)
    assert state.server.ledger == other.server.ledger


def test_the_ordinary_part_of_a_download_is_the_length_of_that_message():
    simulation, state, _ = play(Method())
    opened = Round.open(simulation.contract, state.server)
    ordinary = opened.downloads.messages({0: ROUNDS - 1})[0]
    assert opened.downloads.split({0: ordinary, 1: ordinary * 2}) == (2 * len(ordinary), len(ordinary))


def test_damage_of_a_very_long_message_is_found():
    simulation, state, sent = play(Method())
    messages = {i: bytearray(data) for (number, way, i), data in sent.items() if (number, way) == (ROUNDS, "up")}
    before = state.server._replace(public=state.server.public._replace(version=ROUNDS - 1))
    plan = Plan(simulation.contract.coords.named)
    assert len(decoded(simulation.contract, before, plan, messages)) == 3
    messages[min(messages)][500_000] ^= 1
    with pytest.raises(WireError, match="checksum does not match"):
        decoded(simulation.contract, before, plan, messages)
