"""The round: what it computes, what travels, what stays at home, what is refused."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.federation import (
    SIZES,
    Federation,
    closed,
    digits,
    digits_task,
    perceptron,
    same_public,
    schema_of,
    workload,
)
from tests.parts import Clip, Drift, Half, Pool, Product, Project, Remember, Turns
from thinwire.aggregators import Uniform
from thinwire.codecs.base import Raw
from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import add, same
from thinwire.errors import ConfigError, Diverged, IncompatibleParts, WireError
from thinwire.optimizers import SGD, FedDyn, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.client import drop_stale
from thinwire.protocol.fields import raw
from thinwire.protocol.receive import receive, request_full_state
from thinwire.protocol.server import full_state_message, open_round, split_download
from thinwire.protocol.setup import initial_server_state, make_contract, plan_round
from thinwire.protocol.state import ClientState
from thinwire.schedules import AllBlocks, Plan
from thinwire.training import Local
from thinwire.wire import message as wire

EVERYBODY = range(len(SIZES))
D = Spec.of(dict(perceptron().named_parameters())).size


def assert_close(a, b, tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


# -- what a round computes ---------------------------------------------------------------------------------------------


def test_one_full_batch_step_everywhere_is_gradient_descent_on_the_pooled_loss():
    federation = Federation(Method(client_opt=SGD(0.3)), local=Local(batch=0, steps=1))
    model = perceptron()
    opt = torch.optim.SGD(model.parameters(), 0.3)
    x, y = (part[: sum(SIZES)] for part in digits())
    for _ in range(4):
        federation.round(EVERYBODY)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        assert_close(federation.weights(), {n: p.detach() for n, p in model.named_parameters()}, 1e-6)


def test_fedavg_equals_a_loop_written_by_hand():
    local = Local(epochs=2, batch=8)
    federation = Federation(Method(client_opt=SGD(0.1, momentum=0.9)), local=local)
    task = federation.task
    ours = perceptron()
    x, y = digits()
    for version, cohort in enumerate(((0, 3, 4), (1, 2, 3), (5, 0, 1))):
        federation.round(cohort)
        total = sum(SIZES[i] for i in cohort)
        mean = {name: torch.zeros_like(p) for name, p in ours.state_dict().items()}
        for i in cohort:
            model = perceptron()
            model.load_state_dict(ours.state_dict())
            opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            work = workload(task, [i], [federation.key.fold("batches", version, i)], local)
            for step in range(work.rows.shape[1]):
                rows = work.index[0, step, : work.rows[0, step]]
                opt.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                opt.step()
            for name, block in model.state_dict().items():
                mean[name] += block * (SIZES[i] / total)
        ours.load_state_dict(mean)
        assert_close(federation.weights(), dict(ours.state_dict()), 1e-5)


def test_uniform_weights_count_every_client_alike():
    federation = Federation(Method(client_weight=Uniform(), client_opt=SGD(0.3)), local=Local(batch=0, steps=1))
    federation.round((0, 3))
    model = perceptron()
    x, y = digits()
    start = 0
    total = 0.0
    for i, n in enumerate(SIZES[:4]):
        if i in (0, 3):
            total = total + F.cross_entropy(model(x[start : start + n]), y[start : start + n]) / 2
        start += n
    total.backward()
    by_hand = {n: (p - 0.3 * p.grad).detach() for n, p in model.named_parameters()}
    assert_close(federation.weights(), by_hand, 1e-6)


def test_saying_values_equals_saying_changes():
    runs = [Federation(Method(upload=say, server_opt=SGD(0.7, momentum=0.5))) for say in ("delta", "value")]
    for cohort in ((0, 1, 2), (3, 4), (5, 0)):
        for federation in runs:
            federation.round(cohort)
    assert_close(runs[0].weights(), runs[1].weights(), 1e-6)


def test_training_lowers_the_loss():
    federation = Federation(Method(client_opt=SGD(0.5)), local=Local(epochs=3, batch=8))
    for _ in range(6):
        federation.round(EVERYBODY)
    n = len(SIZES)
    assert sum(federation.losses[-n:]) < 0.7 * sum(federation.losses[:n])


# -- public is a function of the version -------------------------------------------------------------------------------

WITH_NORM = lambda: digits_task(perceptron(norm=True))  # noqa: E731
MOMENTUM = SGD(0.8, momentum=0.9)
REPLAYED = {
    "fedavg": (Method(), digits_task),
    "buffers": (Method(), WITH_NORM),
    "private": (Method(schedule=AllBlocks(private=("2.*",))), digits_task),
    "private and buffers": (Method(schedule=AllBlocks(private=("1.*",))), WITH_NORM),
    "momentum": (Method(server_opt=MOMENTUM), digits_task),
    "values": (Method(upload="weights"), digits_task),
    "fresh directions": (Method(space=Drift(), server_opt=MOMENTUM, client_opt=SGD(1.0)), WITH_NORM),
    "directions kept for three rounds": (Method(space=Drift(redraw_every=3), client_opt=SGD(1.0)), WITH_NORM),
    "fixed directions": (Method(space=Drift(redraw_every=0), client_opt=SGD(1.0)), digits_task),
    "products": (Method(space=Product(), client_opt=SGD(0.05)), digits_task),
    "turns": (Method(schedule=Turns(2), server_opt=MOMENTUM), digits_task),
    "turns and private": (Method(schedule=Turns(3, private=("0.bias",))), WITH_NORM),
    "lossy down": (Method(down=Half(), server_opt=MOMENTUM), WITH_NORM),
    "lossy both, with memory": (Method(down=Remember(), up=Remember(), schedule=Turns(2)), digits_task),
    "sketch": (Method(sketch=Project(), server_opt=MOMENTUM), digits_task),
    "sketch, turns, lossy down with memory": (
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
    "sketch in fresh directions": (Method(space=Drift(), sketch=Project(), client_opt=SGD(1.0)), digits_task),
    "controls": (Method(correction=Scaffold(), client_opt=SGD(0.05)), WITH_NORM),
    "controls, private": (Method(correction=Scaffold(), schedule=AllBlocks(private=("2.weight",))), digits_task),
    "controls, turns": (Method(correction=Scaffold(), schedule=Turns(2)), digits_task),
    "pull": (Method(correction=FedDyn()), digits_task),
    "pull, turns": (Method(correction=FedDyn(), schedule=Turns(2, private=("2.bias",))), digits_task),
    "clipped": (Method(privacy=Clip()), digits_task),
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
        WITH_NORM,
    ),
}


def random_rounds(federation: Federation, rounds: int, key: Key) -> None:
    """Cohorts of one to three; now and then somebody listens without training."""
    n = len(federation.task.clients)
    for r in range(rounds):
        federation.round(key.fold("cohort", r).choice(n, 1 + int(key.fold("size", r).integers(1, 3))))
        federation.download(int(key.fold("listener", r).integers(1, n)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", REPLAYED)
def test_ledger_replay_equals_server(case, seed):
    """Clients that join at random rounds and hear what open_round gives hold the server's public state, bit for bit."""
    method, make = REPLAYED[case]
    federation = Federation(method, make(), Local(epochs=1, batch=16), seed)
    random_rounds(federation, 7, Key(seed).fold(case))
    assert all(torch.isfinite(torch.tensor(federation.losses)))
    assert federation.server.public.version == 7
    for client in federation.public:
        federation.download(client)
        assert same_public(federation.public[client], federation.server.public)
        assert same(federation.weights(federation.public[client]), federation.weights())


@pytest.mark.parametrize(
    "case",
    ["fedavg", "buffers", "private and buffers", "momentum", "turns and private", "controls", "products", "sketch"],
)
def test_snapshots_equal_server(case):
    method, make = REPLAYED[case]
    federation = Federation(replace(method, download="full"), make(), Local(epochs=1, batch=16))
    random_rounds(federation, 6, Key(3).fold(case))
    for client in federation.public:
        federation.download(client)
        assert same_public(federation.public[client], federation.server.public)


def test_a_lossy_snapshot_is_what_clients_train_from():
    federation = Federation(Method(download="full", down=Half()))
    random_rounds(federation, 4, Key(1))
    federation.download(2)
    for name, block in federation.server.public.coords.items():
        assert torch.equal(federation.public[2].coords[name], block.half().float())
        assert not torch.equal(federation.public[2].coords[name], block)


def test_the_cheapest_way_is_entries_or_where_they_lead():
    """In fresh directions an entry is short and the state long; in the whole model one is as long as the other."""
    few = Federation(Method(space=Drift(k=1), client_opt=SGD(0.5)))
    for _ in range(6):
        few.round((0, 1))
    message = wire.unpack(few.download(5), few.contract.schema)
    assert (message.kind, len(message.bodies)) == (wire.STEPS, 7)  # six entries and the ask

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
        data = open_round(federation.contract, federation.server, {5: 0})[5]
        kinds.append(wire.unpack(data, federation.contract.schema).kind)
        assert same_public(receive(federation.contract, federation.first, data)[0], federation.server.public)
    assert kinds[:2] == [wire.STEPS, wire.STEPS]
    assert kinds[-1] == wire.STATE


@pytest.mark.parametrize(("drift_check", "size"), [(False, 16), (True, 22)])
def test_who_is_up_to_date_hears_a_few_bytes(guard, size):
    federation = Federation(Method(drift_check=guard))
    federation.round((0, 1))
    federation.download(0)
    assert len(federation.download(0)) == size


def test_clients_hear_which_blocks_the_round_wants():
    federation = Federation(Method(schedule=Turns()))
    for version in range(4):
        federation.round((0, 1))
        federation.download(2)
        wanted = plan_round(federation.contract, federation.server)
        assert federation.requested[2].names == wanted.names != frozenset(federation.contract.coords.names), version


def test_bytes_of_missed_rounds_are_counted_apart():
    federation = Federation(Method(space=Drift(k=2), client_opt=SGD(0.5)))
    for _ in range(5):
        federation.round((0,))
    versions = {0: 4, 1: 0, 2: 3, 3: 5}
    down = open_round(federation.contract, federation.server, versions)
    sizes = {i: len(data) for i, data in down.items()}
    ordinary, catch_up = split_download(federation.contract, federation.server, down)
    assert ordinary == 3 * sizes[0] + sizes[3]
    assert catch_up == (sizes[1] - sizes[0]) + (sizes[2] - sizes[0])
    assert sizes[3] < sizes[0] < sizes[2] < sizes[1]


# -- what travels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_weight", [None, Uniform()])
def test_fedavg_sends_four_bytes_a_weight_and_little_else(weigh):
    federation = Federation(Method(client_weight=weigh) if weigh else Method())
    up = federation.round(EVERYBODY)
    assert {len(data) for data in up.values()} == {4 * D + (18 if weigh else 24)}
    federation.round((0,))
    assert 4 * D < len(federation.download(1)) <= 4 * D + 64


def test_uniform_weights_are_not_sent():
    federation = Federation(Method(client_weight=Uniform()))
    data = federation.round((0,))[0]
    body = lanes_of(federation, data)[0]
    assert set(body.fields) == {wire.COORDS}


def test_lanes_are_those_that_the_method_needs():
    method = Method(correction=Scaffold(), schedule=Turns(2))
    federation = Federation(method, WITH_NORM())
    data = federation.round((0,))[0]
    body = lanes_of(federation, data)[0]
    assert {field: len(payload) for field, payload in body.fields.items()} == {
        wire.COORDS: federation.contract.coords.restrict(body.plan).nbytes,
        wire.WEIGHT: 4,
        wire.BUFFERS: 4 * 2 * 12,
        wire.SHARED: federation.contract.coords.nbytes,
        wire.REPORT: 4 * len(body.plan),
    }


def test_half_precision_halves_the_bytes():
    up = Federation(Method(up=Half(), client_weight=Uniform())).round((0,))[0]
    assert len(up) == 2 * D + 18


# -- what stays at home ------------------------------------------------------------------------------------------------


def lanes_of(federation: Federation, data: bytes, client: int = 0) -> list[wire.Body]:
    schema = federation.contract.schema
    return [
        wire.unpack_body(body, schema)
        for body in wire.unpack(data, schema_of(federation.contract, data, client)).bodies
    ]


@pytest.mark.parametrize("link", ["ledger", "snapshot"])
@pytest.mark.parametrize("correction", [None, Scaffold()])
def test_private_blocks_drift_at_home_and_never_travel(link, correction):
    private = ("2.weight", "2.bias")
    method = Method(schedule=AllBlocks(private=("2.*",)), download=link)
    federation = Federation(replace(method, correction=correction) if correction else method)
    public_numbers = D - (12 * 10 + 10)
    lengths = set()
    for cohort in ((0, 1), (0, 2), (3,), (4,), (3,), (1,)):
        held = dict(federation.states[cohort[0]].unsent)
        for client, data in federation.round(cohort).items():
            (body,) = lanes_of(federation, data, client)
            assert body.plan == {"0.weight", "0.bias"}
            lengths |= {len(body.fields[field]) for field in (wire.COORDS, wire.SHARED) if field in body.fields}
        assert set(federation.states[cohort[0]].unsent) == set(private)
        if held:
            assert not same(held, federation.states[cohort[0]].unsent), "training goes on from what was held"
        for client in (0, 5):
            for body in lanes_of(federation, open_round(federation.contract, federation.server, {client: 0})[client]):
                assert not (body.plan or set(federation.contract.coords.names)) & set(private)
                lengths |= {len(body.fields[field]) for field in (wire.COORDS, wire.SHARED) if field in body.fields}
    assert lengths == {4 * public_numbers}
    for name in private:
        assert torch.equal(federation.server.public.coords[name], federation.first.coords[name])


def test_private_blocks_survive_missed_rounds():
    federation = Federation(Method(schedule=AllBlocks(private=("2.*",))))
    federation.round((0, 1))
    held = federation.states[0].unsent
    for _ in range(4):
        federation.round((1, 2))
    federation.download(0)
    assert same(federation.states[0].unsent, held)


def test_a_client_starts_from_what_it_held_back():
    """Two clients with a private head, each alone in its round: by hand, each keeps its own head."""
    local = Local(batch=0, steps=1)
    federation = Federation(Method(schedule=AllBlocks(private=("2.*",)), client_opt=SGD(0.2)), local=local)
    bodies = {n: p.detach().clone() for n, p in perceptron().named_parameters() if n.startswith("0.")}
    heads = {i: {n: p.detach().clone() for n, p in perceptron().named_parameters() if n[0] == "2"} for i in (0, 1)}
    x, y = digits()
    rows = {0: slice(0, SIZES[0]), 1: slice(SIZES[0], SIZES[0] + SIZES[1])}
    for i in (0, 1, 0, 0, 1):
        federation.round((i,))
        model = perceptron()
        model.load_state_dict({**bodies, **heads[i]})
        F.cross_entropy(model(x[rows[i]]), y[rows[i]]).backward()
        after = {n: (p - 0.2 * p.grad).detach() for n, p in model.named_parameters()}
        bodies = {n: after[n] for n in bodies}
        heads[i] = {n: after[n] for n in heads[i]}
    for i in (0, 1):
        federation.download(i)
        mine = add(federation.states[i].unsent, federation.public[i].coords)
        assert_close(mine, heads[i], 1e-5)
        assert_close({n: federation.public[i].coords[n] for n in bodies}, bodies, 1e-5)


def test_a_silent_block_is_held_until_its_turn_and_then_spoken():
    federation = Federation(Method(schedule=Turns(2), client_opt=SGD(0.2)), local=Local(batch=0, steps=1))
    federation.round((0,))
    first, second = (plan_round(federation.contract, federation.server).names for _ in range(2))
    assert first == second
    assert set(federation.states[0].unsent) == first, "what did not speak in round one speaks in round two"
    drift = federation.states[0].unsent
    federation.round((0,))
    assert not set(federation.states[0].unsent) & first
    for name in first:  # the second step starts where the first one ended
        moved = federation.server.public.coords[name] - federation.first.coords[name]
        assert (moved - drift[name]).abs().max() > 0
        assert torch.nn.functional.cosine_similarity(moved.flatten(), drift[name].flatten(), dim=0) > 0.5


def test_a_block_that_was_synchronised_elsewhere_is_dropped():
    federation = Federation(Method(schedule=Turns(2)))
    federation.round((0, 1))
    assert federation.states[0].unsent
    federation.round((2,))
    federation.download(0)
    assert federation.states[0].unsent == {}


def test_forget_drops_only_what_was_touched():
    state = ClientState(3, {"a": torch.ones(1), "b": torch.ones(1)}, {"c": torch.ones(1)}, {"d": torch.ones(1)})
    assert drop_stale(state, frozenset({"x"})) is state
    after = drop_stale(state, frozenset({"a", "x"}))
    assert list(after.unsent) == ["b"]
    assert (after.version, after.correction, after.codec) == (3, state.correction, state.codec)


def test_methods_without_memory_leave_clients_blank():
    federation = Federation(Method())
    federation.round((0, 1))
    assert federation.states[0].is_empty
    assert federation.states[0].version == 0


def test_memories_of_silent_blocks_stay_as_they_were():
    federation = Federation(Method(schedule=Turns(2), server_opt=SGD(1.0, momentum=0.9), correction=FedDyn()))
    for _ in range(4):
        plan = plan_round(federation.contract, federation.server)
        before = federation.server
        federation.round((0, 1))
        for name in federation.contract.coords.names:
            moved = not torch.equal(federation.server.opt[f"momentum/{name}"], before.opt[f"momentum/{name}"])
            assert moved == (name in plan.names)
            assert (name in plan.names) != torch.equal(federation.server.correction[name], before.correction[name])


def test_corrections_leave_private_blocks_alone():
    """With one client, SCAFFOLD's memories cancel; a private head must learn as it does without any correction."""
    local = Local(batch=0, steps=2)
    runs = [
        Federation(Method(schedule=AllBlocks(private=("2.*",)), **extra), local=local)
        for extra in ({}, {"correction": Scaffold()})
    ]
    for federation in runs:
        federation.round((0,))
        federation.round((1,))
        assert set(federation.contract.shared.names) <= {"0.weight", "0.bias"}
    assert_close(runs[1].states[0].unsent, runs[0].states[0].unsent, 1e-6)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def opened():
    """A round that waits for the answer of client 0."""
    federation = Federation(Method(), WITH_NORM())
    federation.round((0, 1))
    plan = plan_round(federation.contract, federation.server)
    federation.download(0)
    return federation, plan, federation.upload(0)


def forged(
    federation: Federation, data: bytes, version=None, kind=None, plan=None, behind=None, **fields: bytes | None
) -> bytes:
    """The same message with some of it replaced, and a checksum that fits."""
    schema = schema_of(federation.contract, data)
    message = wire.unpack(data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    content = dict(body.fields)
    for name, payload in fields.items():
        field = getattr(wire, name)
        content.pop(field, None)
        if payload is not None:
            content[field] = payload
    packed = wire.pack_body(wire.Body(plan or body.plan, content), schema)
    bodies = [packed, *message.bodies[1:]]  # the ask, if it has one, stays
    return wire.pack(
        kind or message.kind,
        message.version if version is None else version,
        bodies,
        schema,
        message.behind if behind is None else behind,
    )


def number(value: float) -> bytes:
    return Raw().encode({"x": torch.tensor(value)}, {}, None)[0]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"version": 0}, WireError, "client 0 trained version 0, the round is at 1"),
        ({"version": 2}, WireError, "trained version 2"),
        ({"kind": wire.STEPS}, WireError, "kind 'steps' came from a client"),
        ({"plan": frozenset({"0.weight"})}, WireError, "other blocks than the round asked for"),
        ({"COORDS": None}, WireError, "fields .* expected"),
        ({"WEIGHT": None}, WireError, "fields .* expected"),
        ({"BUFFERS": None}, WireError, "fields .* expected"),
        ({"SHARED": b""}, WireError, "fields .* expected"),
        ({"REPORT": b"abcd"}, WireError, "fields .* expected"),
        ({"BASE": b"abcd"}, WireError, "fields .* expected"),
        ({"COORDS": b"abcd"}, WireError, "bytes of raw numbers"),
        ({"BUFFERS": b""}, WireError, "bytes of raw numbers"),
        ({"WEIGHT": b"\0" * 8}, WireError, "bytes of raw numbers"),
        ({"WEIGHT": number(0.0)}, WireError, "counts 0.0; expected above 0"),
        ({"WEIGHT": number(-3.0)}, WireError, "counts -3.0"),
        ({"WEIGHT": number(float("nan"))}, WireError, "counts nan"),
        ({"WEIGHT": number(float("inf"))}, WireError, "counts inf"),
    ],
)
def test_answers_that_do_not_fit_are_refused(opened, change, error, says):
    federation, plan, data = opened
    assert forged(federation, data) == data
    with pytest.raises(error, match=says):
        closed(federation.contract, federation.server, plan, {0: forged(federation, data, **change)}, 6)
    closed(federation.contract, federation.server, plan, {0: data}, 6)


@pytest.mark.parametrize("field", ["COORDS", "BUFFERS"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(opened, field, value):
    federation, plan, data = opened
    payload = lanes_of(federation, data)[0].fields[getattr(wire, field)]
    bad = forged(federation, data, **{field: bytes(payload[:-4]) + number(value)})
    with pytest.raises(WireError, match="client 0 sent a number that is not finite"):
        closed(federation.contract, federation.server, plan, {0: bad}, 6)


def test_a_damaged_answer_is_refused_and_the_round_can_be_closed_without_it(opened):
    federation, plan, data = opened
    for at in range(0, len(data), 97):
        bad = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        with pytest.raises(WireError):
            closed(federation.contract, federation.server, plan, {0: bad}, 6)
    assert federation.server.public.version == 1


def test_a_round_without_answers_says_so(opened):
    federation, plan, _ = opened
    with pytest.raises(WireError, match="no client answered"):
        closed(federation.contract, federation.server, plan, {}, 6)


def elsewhere(model: nn.Module, name: str) -> nn.Module:
    """The same model with one number a little larger."""
    model.state_dict()[name].view(-1)[0] += 1e-6
    return model


def test_messages_of_another_method_model_start_or_seed_are_refused(opened):
    federation, plan, data = opened
    others = [
        Federation(Method(client_opt=SGD(0.2)), WITH_NORM()),
        Federation(Method(), digits_task(perceptron(norm=True, hidden=13))),
        Federation(Method(), WITH_NORM(), seed=1),
        Federation(Method(), digits_task(elsewhere(perceptron(norm=True), "0.bias"))),
        Federation(Method(), digits_task(elsewhere(perceptron(norm=True), "1.running_mean"))),
    ]
    for other in others:
        with pytest.raises(WireError, match="another method or model"):
            closed(other.contract, other.server, plan, {0: data}, 6)
        with pytest.raises(WireError, match="another method or model"):
            receive(other.contract, other.first, open_round(federation.contract, federation.server, {0: 0})[0])


def test_clients_refuse_what_does_not_continue_their_version(opened):
    federation, _, data = opened
    for _ in range(4):
        federation.round((0, 1))
    contract, server = federation.contract, federation.server
    with pytest.raises(WireError, match="kind 'up' came from the server, which never sends it"):
        receive(contract, federation.first, data)
    with pytest.raises(WireError, match="kind 'lost' came from the server"):
        receive(contract, federation.first, request_full_state(contract, 0, 0))
    steps = open_round(contract, server, {0: server.public.version - 1})[0]
    state = full_state_message(contract, server, request_full_state(contract, 2, 0), 0)
    assert wire.unpack(state, contract.schema).kind == wire.STATE
    for message, start in ((steps, 4), (state, 2)):
        with pytest.raises(WireError, match=f"from version {start} cannot continue version 0"):
            receive(contract, federation.first, message)
        with pytest.raises(WireError, match="cannot continue version 5"):
            receive(contract, server.public, message)
    whole = full_state_message(contract, server, request_full_state(contract, 0, 0), 0)
    assert same_public(receive(contract, federation.first, whole).public, server.public)
    for fields in ({"BASE": b""}, {"WEIGHT": number(1.0)}, {"BUFFERS": b""}, {"COORDS": None}):
        with pytest.raises(WireError, match=r"fields .* expected"):
            receive(contract, federation.first, forged(federation, whole, **fields))


def test_a_server_answers_only_those_who_say_that_they_are_lost(opened):
    federation, _, data = opened
    with pytest.raises(WireError, match="kind 'up' asks for no state"):
        full_state_message(federation.contract, federation.server, data, 0)
    with pytest.raises(WireError, match="lost at version 9, the server is at 1"):
        full_state_message(federation.contract, federation.server, request_full_state(federation.contract, 9, 0), 0)


def test_ways_that_do_not_lead_to_their_version_are_refused():
    federation = Federation(Method(space=Drift(k=2, redraw_every=3), client_opt=SGD(0.5)))
    contract = federation.contract
    for _ in range(8):
        federation.round((0,))
    data = open_round(contract, federation.server, {1: 1})[1]
    message = wire.unpack(data, contract.schema)
    fields = [set(body.fields) for body in lanes_of(federation, data)]
    assert fields == [{wire.VALUES}, {wire.VALUES}, {wire.VALUES}, {wire.DRIFT_CHECK}]  # to 3, to 6, to 8, and the ask
    at = federation.first._replace(version=1)

    def built(*bodies: bytes) -> bytes:
        return wire.pack(wire.STEPS, 8, bodies, contract.schema, 7)

    one, two, three, ask = message.bodies
    with pytest.raises(WireError, match="steps to version 8 end at version 6"):
        receive(contract, at, built(one, two, ask))
    with pytest.raises(WireError, match="lead on beyond version 8"):
        receive(contract, at, built(one, two, three, three, ask))
    with pytest.raises(WireError, match=r"fields .* expected"):
        receive(contract, at, built(one, two, three))
    with pytest.raises(WireError, match=r"fields .* expected"):
        receive(contract, at, forged(federation, data, COORDS=b"abcd"))
    with pytest.raises(WireError, match="bytes of raw numbers"):
        receive(contract, at, forged(federation, data, VALUES=b"abcd"))


def test_entries_with_other_lanes_are_refused():
    federation = Federation(Method())
    federation.round((0,))
    contract = federation.contract
    steps = open_round(contract, federation.server, {1: 0})[1]
    for fields in ({"COORDS": None}, {"SHARED": b""}, {"WEIGHT": number(1.0)}):
        with pytest.raises(WireError, match=r"fields .* expected"):
            receive(contract, federation.first, forged(federation, steps, **fields))


def test_nobody_can_ask_for_private_blocks_or_overwrite_them():
    federation = Federation(Method(schedule=AllBlocks(private=("2.*",))))
    federation.round((0,))
    contract = federation.contract
    data = open_round(contract, federation.server, {1: 0})[1]
    message = wire.unpack(data, contract.schema)
    honest = [wire.unpack_body(body, contract.schema) for body in message.bodies]
    everything = contract.coords.zeros()
    for bodies in (
        [honest[0], wire.Body(None, honest[1].fields)],
        [honest[0], wire.Body(honest[1].plan | {"2.bias"}, honest[1].fields)],
        [wire.Body(None, {wire.COORDS: raw(everything)}), honest[1]],
    ):
        packed = [wire.pack_body(body, contract.schema) for body in bodies]
        for kind in (wire.STEPS, wire.STATE):
            with pytest.raises(WireError, match="is private and never travels"):
                receive(contract, federation.first, wire.pack(kind, 1, packed, contract.schema, behind=1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_clients_refuse_what_leads_to_numbers_that_are_not_finite(value):
    federation = Federation(Method())
    federation.round((0,))
    contract = federation.contract
    held = federation.first
    if value == 3e38:  # finite by itself, not when it is added
        held = held._replace(coords={name: block + 3e38 for name, block in held.coords.items()})
    data = open_round(contract, federation.server, {1: 0})[1]
    payload = lanes_of(federation, data)[0].fields[wire.COORDS]
    bad = forged(federation, data, kind=wire.STEPS, COORDS=bytes(payload[:-4]) + number(value))
    with pytest.raises(WireError, match="version 1 that are not finite"):
        receive(contract, held, bad)


def test_training_that_diverges_is_named_before_it_is_sent():
    federation = Federation(Method(client_opt=SGD(1e30), up=Half()))
    with pytest.raises(Diverged, match="client 0 trained to a number that is not finite"):
        federation.round((0,))


@dataclass(frozen=True)
class Blast(Clip):
    """Releases a number so large that the merged base overflows."""

    def release(self, mean, clients, key):
        return {name: torch.full_like(block, 3e38) for name, block in mean.items()}


@pytest.mark.parametrize("space", [{}, {"space": Drift()}])
def test_weights_that_overflow_on_the_server_are_found(space):
    federation = Federation(Method(privacy=Blast(), server_opt=SGD(2.0), **space))
    with pytest.raises(Diverged, match="step to version 1 is not finite"):
        federation.round((0,))


# -- parts that cannot work together -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            Method(space=Drift(), download="full"),
            r"Drift\(.*link = 'snapshot' does not say all there is to know. Write download = 'incremental'",
        ),
        (Method(space=Drift(), correction=Scaffold()), "Scaffold.*redraws them. Write redraw_every = 0"),
        (Method(space=Drift(), correction=FedDyn()), "FedDyn.*redraws them"),
        (Method(space=Drift(), schedule=AllBlocks(private=("2.*",))), "hold back '2.bias/b'.*Write redraw_every = 0"),
        (Method(sketch=Project(), upload="weights"), "Project.*Write upload = 'delta'"),
        (Method(sketch=Project(), correction=FedDyn()), "server memory.*identity sketch"),
        (Method(sketch=Project(), server_opt=SGD(1.0, weight_decay=0.1)), "Write weight_decay = 0 for the server"),
        (Method(download="full", down=Remember()), "Remember.*Write download = 'incremental'"),
    ],
)
def test_parts_that_cannot_work_together_are_refused_with_a_way_out(method, says):
    with pytest.raises(IncompatibleParts, match=says):
        Federation(method)


def test_held_coordinates_in_a_frame_that_is_redrawn_are_refused():
    with pytest.raises(IncompatibleParts, match="hold back"):
        Federation(Method(space=Drift(), schedule=Turns(2)))


class Skips(Turns):
    """Blocks in turns, with a new cohort in every round: that blocks wait shows only in its plans."""

    def resamples(self, version):
        return True


def test_a_plan_that_holds_back_what_a_redrawn_frame_loses_is_refused():
    federation = Federation(Method(space=Drift(), schedule=Skips(2)))
    with pytest.raises(IncompatibleParts, match="hold back"):
        federation.round((0,))


@pytest.mark.parametrize("memory", [{"server_opt": SGD(1.0, momentum=0.9)}, {"up": Remember()}, {"down": Remember()}])
def test_memory_of_codes_that_change_their_shape_is_refused(memory):
    with pytest.raises(IncompatibleParts, match="Take a sketch that codes each block by itself"):
        Federation(Method(sketch=Pool(), schedule=Turns(2), **memory))
    federation = Federation(Method(sketch=Pool(), schedule=Skips(2), **memory))
    with pytest.raises(IncompatibleParts, match="Take a sketch that codes each block by itself"):
        federation.round((0,))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Method(download="ledgr"), "link must be one of ledger, snapshot, not 'ledgr'"),
        (lambda: Method(upload="weightss"), "say must be one of delta, value"),
        (lambda: Federation(Method(schedule=AllBlocks(private=("3.*",)))), "private '3.*' matches no block"),
        (lambda: Federation(Method(space=Drift(k=0))), "k must be 1 or more"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make, says):
    with pytest.raises(ConfigError, match=says.replace("*", r"\*")):
        make()


def test_a_model_without_trainable_weights_is_refused():
    with pytest.raises(ConfigError, match="no trainable weights"):
        Federation(Method(), digits_task(nn.Linear(64, 10).requires_grad_(False)))


def test_an_empty_plan_is_legal():
    @dataclass(frozen=True)
    class Rest(AllBlocks):
        def plan(self, state, coords, version):
            return Plan(frozenset() if version == 1 else frozenset(coords.names))

    federation = Federation(Method(schedule=Rest(), server_opt=SGD(1.0, momentum=0.9), up=Half()))
    for cohort in ((0, 1), (0, 2), (1, 2)):
        federation.round(cohort)
    federation.download(5)
    assert same_public(federation.public[5], federation.server.public)


def test_both_sides_derive_the_same_contract():
    weights = {n: p.detach() for n, p in perceptron().named_parameters()}
    one, two = (make_contract(Method(space=Product()), weights, {}, Key(4)) for _ in range(2))
    assert one[0].schema == two[0].schema
    assert same_public(one[1], two[1])
    assert initial_server_state(*one).ledger.version == 0
