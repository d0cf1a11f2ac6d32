"""Sums of missed entries: the same bits for clients that replay every entry and for those that add one sum."""

from pathlib import Path

import pytest
import torch

from benchmarks.bytes import catchup
from tests.federation import Federation, digits_task, perceptron, same_public
from tests.protocol.messages import bodies_of
from thinwire.codecs import ErrorFeedback, Lattice, LatticeSum, Raw, TopK
from thinwire.core.key import Key
from thinwire.errors import WireError
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.protocol.download import adds_up
from thinwire.protocol.receive import receive
from thinwire.protocol.setup import on_grid
from thinwire.schedules import AllBlocks, FedLAMA
from thinwire.spaces import MAPO, LoRA
from thinwire.training import Local
from thinwire.wire import message as wire

DOWN = {
    "lattice": Lattice(0.5),
    "lattice, error feedback": ErrorFeedback(Lattice(2.0)),
    "top-k": ErrorFeedback(TopK(0.05, inner=Lattice(1.0))),
}
ROUNDS = 8


def federation(down, lr: float = 0.05, **parts) -> Federation:
    task = digits_task(perceptron(hidden=8), sizes=(5, 3, 4, 6))
    method = Method(down=down, client_opt=SGD(lr), **{"merge_codec": LatticeSum(), **parts})
    return Federation(method, task, Local(batch=0, steps=1))


def history(one: Federation, rounds: int = ROUNDS, cohort=(0,)) -> list:
    """The public state of every version."""
    states = [one.server.public]
    for _ in range(rounds):
        one.round(cohort)  # replays every entry
        states.append(one.server.public)
    return states


def kinds(one: Federation, data: bytes) -> list[int]:
    """The field of each body but the request."""
    return [field for body in bodies_of(one, data)[:-1] for field in body.fields]


@pytest.mark.parametrize("name", DOWN)
def test_everyone_has_the_same_bits(name):
    one = federation(DOWN[name])
    states = history(one)
    messages = one.opened.downloads.messages({v: v for v in range(ROUNDS + 1)})
    for version, message in messages.items():
        assert same_public(receive(one.contract, states[version], message).public, one.server.public)
    assert kinds(one, messages[1]) == [wire.SUM]
    entries = sum(map(len, one.server.ledger.entries[1:]))
    assert len(messages[1]) - len(messages[ROUNDS]) < entries
    assert same_public(one.public[0], states[-2])
    assert one.drifted == []


@pytest.mark.parametrize("parts", [{"space": LoRA(rank=2)}, {"space": MAPO(k=32, redraw_every=0)}], ids=str)
def test_sums_in_other_spaces_that_keep_their_basis(parts):
    one = federation(Lattice(0.5), **parts)
    states = history(one)
    for version, message in one.opened.downloads.messages({v: v for v in range(ROUNDS)}).items():
        assert same_public(receive(one.contract, states[version], message).public, one.server.public)
    assert one.server.ledger.adds_since == 0


def test_a_sum_has_the_blocks_that_were_synchronized():
    one = federation(Lattice(0.5), schedule=FedLAMA(phi=2))
    states = history(one)
    for version, message in one.opened.downloads.messages({v: v for v in range(ROUNDS)}).items():
        received = receive(one.contract, states[version], message)
        assert same_public(received.public, one.server.public)
        assert received.synced == one.server.ledger.synced_since(version)


def test_private_blocks_are_not_in_a_sum():
    one = federation(Lattice(0.5), schedule=AllBlocks(private=("2.*",)))
    history(one)
    message = one.opened.downloads.messages({1: 1})[1]
    (body,) = bodies_of(one, message)[:-1]
    assert set(body.fields) == {wire.SUM}
    assert body.plan == {"0.weight", "0.bias"}
    body = wire.pack_body(wire.Body(None, dict(body.fields)), one.contract.schema)
    request = wire.unpack(message, one.contract.schema).bodies[-1]
    forged = wire.pack(wire.STEPS, ROUNDS, [body, request], one.contract.schema, ROUNDS - 1)
    with pytest.raises(WireError, match="which is private and never sent"):
        receive(one.contract, one.first._replace(version=1), forged)


def test_steps_that_are_rounded_are_replayed_one_by_one():
    """With raw steps nothing adds up; with steps far below the last bit of the coordinates neither."""
    for down, lr in ((Raw(), 0.05), (TopK(0.05, inner=Lattice(0.5)), 1e-9)):
        one = federation(down, lr)
        states = history(one, cohort=(0, 1))
        assert one.server.ledger.adds_since == ROUNDS
        for version, message in one.opened.downloads.messages({v: v for v in range(ROUNDS)}).items():
            assert wire.SUM not in kinds(one, message)
            assert same_public(receive(one.contract, states[version], message).public, one.server.public)


def test_a_sum_starts_after_the_last_step_that_was_rounded():
    one = federation(Lattice(0.5))
    history(one, 3)
    one.server = one.server._replace(ledger=one.server.ledger.append(b"", frozenset(), limit=9**9, longest=9**9))
    assert one.server.ledger.adds_since == 4


def test_sums_are_refused_where_no_server_sends_them():
    one, other = federation(Lattice(0.5)), federation(Lattice(0.5), merge_codec=Raw())
    history(one)
    body, request = (
        bytes(part) for part in wire.unpack(one.opened.downloads.messages({1: 1})[1], one.contract.schema).bodies
    )
    forged = wire.pack(wire.STEPS, ROUNDS, [body, request], other.contract.schema, ROUNDS - 1)
    with pytest.raises(WireError, match="a sum of entries, which is not sent with this method"):
        receive(other.contract, other.first._replace(version=1), forged)
    twice = wire.pack(wire.STEPS, ROUNDS, [body, body, request], one.contract.schema, ROUNDS - 1)
    with pytest.raises(WireError, match=f"steps continue beyond version {ROUNDS}"):
        receive(one.contract, one.first._replace(version=1), twice)


def test_the_start_is_moved_by_less_than_a_millionth():
    start = {"w": Key(1).normal(300), "zero": torch.zeros(4), "half": Key(2).normal(4).half(), "none": torch.zeros(0)}
    moved = on_grid(start)
    assert float((moved["w"] - start["w"]).abs().max()) < 1e-6 * float(start["w"].abs().max())
    assert all(torch.equal(moved[name], start[name]) for name in ("zero", "half", "none"))
    step = {"w": torch.full((300,), 2.0**-12)}
    assert adds_up(moved, step, {"w": moved["w"] + step["w"]})


def test_a_negative_zero_does_not_add_up():
    zero, minus = {"w": torch.zeros(1)}, {"w": torch.tensor([-0.0])}
    assert adds_up(zero, minus, zero)
    assert not adds_up(minus, minus, minus)


def test_sums_halve_the_catch_up_of_top_k():
    """The measured rows, of one step and of whole epochs: at most 55 % of the catch-up of ef+topk+int4; their page."""
    root = Path(__file__).parents[2]
    rows = catchup.saved(root / "docs/results/catchup.jsonl")
    assert catchup.table(rows) in (root / "docs/methods/codecs.md").read_text()
    for steps in (1, 0):
        found = {r["row"]: r for r in rows if r["steps"] == steps}
        today, sums = found["top-k 5 %, int4"], found["lattice-topk"]
        assert (today["rounds"], today["seed"], today["task"]) == (sums["rounds"], sums["seed"], sums["task"])
        assert sums["catchup"] <= 0.55 * today["catchup"]
        assert sums["accuracy"] > today["accuracy"] - 0.01
    assert not any(row["rounded"] for row in rows if row["row"] != "top-k 5 %, int4")
