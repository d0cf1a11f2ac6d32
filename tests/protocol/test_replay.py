"""The public state is a function of the version: clients that replay downloads have the server's state."""

from dataclasses import replace

import pytest
import torch

from tests.federation import Federation, digits_task, perceptron, same_public
from tests.parts import Clip, Drift, Half, Pool, Product, Project, Remember, Turns
from tests.protocol.messages import with_norm
from thinwire.core.key import Key
from thinwire.core.tree import same
from thinwire.optimizers import SGD, FedDyn, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.receive import receive
from thinwire.protocol.round import Round
from thinwire.schedules import AllBlocks
from thinwire.training import Local
from thinwire.wire import message as wire

MOMENTUM = SGD(0.8, momentum=0.9)
REPLAYED = {
    "buffers": (Method(), with_norm),
    "private and buffers": (Method(schedule=AllBlocks(private=("1.*",))), with_norm),
    "weights": (Method(upload="weights"), digits_task),
    "a basis each round": (Method(space=Drift(), server_opt=MOMENTUM, client_opt=SGD(1.0)), with_norm),
    "a basis for three rounds": (Method(space=Drift(redraw_every=3), client_opt=SGD(1.0)), with_norm),
    "one basis": (Method(space=Drift(redraw_every=0), client_opt=SGD(1.0)), digits_task),
    "products": (Method(space=Product(), client_opt=SGD(0.05)), digits_task),
    "turns and private": (Method(schedule=Turns(3, private=("0.bias",))), with_norm),
    "lossy both, with state": (Method(down=Remember(), up=Remember(), schedule=Turns(2)), digits_task),
    "sketch, turns, lossy down with state": (
        Method(sketch=Project(), schedule=Turns(2), down=Remember()),
        digits_task,
    ),
    "sketch of all blocks, one private": (
        Method(
            sketch=Pool(),
            schedule=AllBlocks(private=("0.weight",)),
            server_opt=MOMENTUM,
            up=Remember(),
            down=Remember(),
        ),
        digits_task,
    ),
    "sketch of all blocks, turns": (Method(sketch=Pool(), schedule=Turns(4, private=("0.weight",))), digits_task),
    "sketch in a basis each round": (Method(space=Drift(), sketch=Project(), client_opt=SGD(1.0)), digits_task),
    "scaffold, private": (Method(correction=Scaffold(), schedule=AllBlocks(private=("2.weight",))), digits_task),
    "scaffold, turns": (Method(correction=Scaffold(), schedule=Turns(2)), digits_task),
    "feddyn, turns": (Method(correction=FedDyn(), schedule=Turns(2, private=("2.bias",))), digits_task),
    "everything": (
        Method(
            space=Product(),
            schedule=Turns(2, private=("2.bias/y",)),
            up=Remember(),
            down=Remember(),
            correction=Scaffold(),
            server_opt=MOMENTUM,
            client_opt=SGD(0.02, momentum=0.5),
            privacy=Clip(norm=5.0),
        ),
        with_norm,
    ),
}


def random_rounds(federation: Federation, rounds: int, key: Key) -> None:
    """Rounds with cohorts of one to three; after each, one client receives a download without training."""
    n = len(federation.task.clients)
    for r in range(rounds):
        federation.round(key.fold("cohort", r).choice(n, 1 + int(key.fold("size", r).integers(1, 3))))
        federation.download(int(key.fold("listener", r).integers(1, n)))


@pytest.mark.parametrize("case", REPLAYED)
def test_ledger_replay_equals_server(case):
    """Clients that join in random rounds and replay what `open_round` sends have the server's state, bit for bit."""
    method, make = REPLAYED[case]
    federation = Federation(method, make(), Local(epochs=1, batch=16))
    random_rounds(federation, 7, Key(0).fold(case))
    assert all(torch.isfinite(torch.tensor(federation.losses)))
    assert federation.server.public.version == 7
    for client in federation.public:
        federation.download(client)
        assert same_public(federation.public[client], federation.server.public)
        assert same(federation.weights(federation.public[client]), federation.weights())


@pytest.mark.parametrize(
    "case",
    ["buffers", "private and buffers", "weights", "turns and private", "scaffold, private", "products"],
)
def test_full_downloads_equal_server(case):
    method, make = REPLAYED[case]
    federation = Federation(replace(method, download="full"), make(), Local(epochs=1, batch=16))
    random_rounds(federation, 6, Key(3).fold(case))
    for client in federation.public:
        federation.download(client)
        assert same_public(federation.public[client], federation.server.public)


def test_clients_train_from_the_decoded_full_download():
    federation = Federation(Method(download="full", down=Half()))
    random_rounds(federation, 4, Key(1))
    federation.download(2)
    for name, block in federation.server.public.coords.items():
        assert torch.equal(federation.public[2].coords[name], block.half().float())
        assert not torch.equal(federation.public[2].coords[name], block)


def test_missed_rounds_are_sent_as_entries_or_as_a_snapshot_whichever_is_shorter():
    """With a new basis each round entries are short and the state is long; without a basis they are equally long."""
    few = Federation(Method(space=Drift(k=1), client_opt=SGD(0.5)))
    for _ in range(6):
        few.round((0, 1))
    message = wire.unpack(few.download(5), few.contract.schema)
    assert (message.kind, len(message.bodies)) == (wire.STEPS, 7)  # six entries and the request

    whole = Federation(Method())
    for _ in range(6):
        whole.round((0, 1))
    message = wire.unpack(whole.download(5), whole.contract.schema)
    assert (message.kind, message.version, message.behind, len(message.bodies)) == (wire.STEPS, 6, 6, 2)
    assert set(wire.unpack_body(message.bodies[0], whole.contract.schema).fields) == {wire.VALUES}
    assert same_public(whole.public[5], whole.server.public)


def test_a_state_replaces_entries_once_they_are_longer():
    federation = Federation(Method(space=Drift(k=20), client_opt=SGD(0.5)), digits_task(perceptron(hidden=4)))
    kinds = []
    for _ in range(8):
        federation.round((0,))
        data = federation.opened.downloads.messages({5: 0})[5]
        kinds.append(wire.unpack(data, federation.contract.schema).kind)
        assert same_public(receive(federation.contract, federation.first, data)[0], federation.server.public)
    assert kinds[:2] == [wire.STEPS, wire.STEPS]
    assert kinds[-1] == wire.STATE


@pytest.mark.parametrize(("drift_check", "size"), [(False, 9), (True, 13)])
def test_a_download_without_news_is_a_few_bytes(drift_check, size):
    federation = Federation(Method(drift_check=drift_check))
    federation.round((0, 1))
    federation.download(0)
    assert len(federation.download(0)) == size


def test_downloads_request_the_blocks_of_the_plan():
    federation = Federation(Method(schedule=Turns()))
    for version in range(4):
        federation.round((0, 1))
        federation.download(2)
        planned = Round.open(federation.contract, federation.server).plan
        assert federation.requested[2].names == planned.names != frozenset(federation.contract.coords.names), version


def test_bytes_of_missed_rounds_are_counted_separately():
    federation = Federation(Method(space=Drift(k=2), client_opt=SGD(0.5)))
    for _ in range(5):
        federation.round((0,))
    versions = {0: 4, 1: 0, 2: 3, 3: 5}
    down = federation.opened.downloads.messages(versions)
    sizes = {i: len(data) for i, data in down.items()}
    ordinary, catch_up = federation.opened.downloads.split(down)
    assert ordinary == 3 * sizes[0] + sizes[3]
    assert catch_up == (sizes[1] - sizes[0]) + (sizes[2] - sizes[0])
    assert sizes[3] < sizes[0] < sizes[2] < sizes[1]
