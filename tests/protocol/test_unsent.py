"""Client states: changes of blocks that are private or synchronized later are kept, and are not sent."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.federation import SIZES, Federation, digits, keeps_nothing, perceptron
from tests.parts import Turns
from tests.protocol.messages import D, assert_close, bodies_of
from thinwire.core.tree import add, same
from thinwire.optimizers import SGD, FedDyn, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.client import drop_stale
from thinwire.protocol.round import Round
from thinwire.protocol.state import ClientState
from thinwire.schedules import AllBlocks
from thinwire.training import Local
from thinwire.wire import message as wire


@pytest.mark.parametrize("download", ["incremental", "full"])
@pytest.mark.parametrize("correction", [None, Scaffold()])
def test_private_blocks_are_trained_and_never_sent(download, correction):
    private = ("2.weight", "2.bias")
    method = Method(schedule=AllBlocks(private=("2.*",)), download=download)
    federation = Federation(replace(method, correction=correction) if correction else method)
    public_size = D - (12 * 10 + 10)
    lengths = set()
    for cohort in ((0, 1), (0, 2), (3,), (4,), (3,), (1,)):
        before = dict(federation.states[cohort[0]].unsent)
        for client, data in federation.round(cohort).items():
            (body,) = bodies_of(federation, data, client)
            assert body.plan == {"0.weight", "0.bias"}
            lengths |= {len(body.fields[field]) for field in (wire.COORDS, wire.SHARED) if field in body.fields}
        assert set(federation.states[cohort[0]].unsent) == set(private)
        if before:
            assert not same(before, federation.states[cohort[0]].unsent), "training continues from the private blocks"
        for client in (0, 5):
            for body in bodies_of(federation, federation.opened.downloads.messages({client: 0})[client]):
                assert not (body.plan or set(federation.contract.coords.names)) & set(private)
                lengths |= {len(body.fields[field]) for field in (wire.COORDS, wire.SHARED) if field in body.fields}
    assert lengths == {4 * public_size}
    for name in private:
        assert torch.equal(federation.server.public.coords[name], federation.first.coords[name])


def test_private_blocks_are_kept_over_missed_rounds():
    federation = Federation(Method(schedule=AllBlocks(private=("2.*",))))
    federation.round((0, 1))
    before = federation.states[0].unsent
    for _ in range(4):
        federation.round((1, 2))
    federation.download(0)
    assert same(federation.states[0].unsent, before)


def test_training_starts_from_private_blocks():
    """Two clients with a private head, one in each round, equal a computation by hand."""
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
        head = add(federation.states[i].unsent, federation.public[i].coords)
        assert_close(head, heads[i], 1e-5)
        assert_close({n: federation.public[i].coords[n] for n in bodies}, bodies, 1e-5)


def test_a_change_that_was_not_sent_is_sent_when_its_block_is_synchronized():
    federation = Federation(Method(schedule=Turns(2), client_opt=SGD(0.2)), local=Local(batch=0, steps=1))
    federation.round((0,))
    first, second = (Round.open(federation.contract, federation.server).plan.names for _ in range(2))
    assert first == second
    assert set(federation.states[0].unsent) == first, "blocks that round one did not send are sent in round two"
    drift = federation.states[0].unsent
    federation.round((0,))
    assert not set(federation.states[0].unsent) & first
    for name in first:  # the second step starts where the first one ended
        moved = federation.server.public.coords[name] - federation.first.coords[name]
        assert (moved - drift[name]).abs().max() > 0
        assert torch.nn.functional.cosine_similarity(moved.flatten(), drift[name].flatten(), dim=0) > 0.5


def test_the_unsent_change_of_a_block_synchronized_without_the_client_is_dropped():
    federation = Federation(Method(schedule=Turns(2)))
    federation.round((0, 1))
    assert federation.states[0].unsent
    federation.round((2,))
    federation.download(0)
    assert federation.states[0].unsent == {}


def test_drop_stale_drops_synchronized_blocks_only():
    state = ClientState(3, {"a": torch.ones(1), "b": torch.ones(1)}, {"c": torch.ones(1)}, {"d": torch.ones(1)})
    assert drop_stale(state, frozenset({"x"})) is state
    after = drop_stale(state, frozenset({"a", "x"}))
    assert list(after.unsent) == ["b"]
    assert (after.version, after.correction, after.codec) == (3, state.correction, state.codec)


def test_methods_without_client_state_leave_it_empty():
    federation = Federation(Method())
    federation.round((0, 1))
    assert keeps_nothing(federation.states[0])
    assert federation.states[0].version == 0


def test_server_states_of_blocks_outside_the_plan_do_not_change():
    federation = Federation(Method(schedule=Turns(2), server_opt=SGD(1.0, momentum=0.9), correction=FedDyn()))
    for _ in range(4):
        plan = Round.open(federation.contract, federation.server).plan
        before = federation.server
        federation.round((0, 1))
        for name in federation.contract.coords.names:
            moved = not torch.equal(federation.server.opt["momentum"][name], before.opt["momentum"][name])
            assert moved == (name in plan.names)
            assert (name in plan.names) != torch.equal(federation.server.correction[name], before.correction[name])


def test_corrections_do_not_change_private_blocks():
    """With one client, SCAFFOLD's control variates cancel: a private head is trained as without a correction."""
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
