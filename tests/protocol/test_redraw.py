"""A new basis: what server and clients remembered of the old coordinates is forgotten by both at the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest

import thinwire as tw
from tests.federation import Federation
from thinwire.core.tree import same
from thinwire.protocol.round import initial_client_state


def nothing(state) -> bool:
    return all(not block.any() for block in state.values())


@pytest.mark.parametrize("opt", [tw.SGD(0.5, momentum=0.9), tw.Adam(0.01), tw.Yogi(0.01)], ids=repr)
@pytest.mark.parametrize("space", [tw.MAPO(k=32, redraw_every=2), tw.LoRA(rank=2, redraw_every=2)], ids=repr)
def test_the_servers_memory_starts_anew_with_the_frame(opt, space):
    method = tw.Method(space=space, server_opt=opt, down=tw.ErrorFeedback(tw.TopK(0.2)), client_opt=tw.SGD(0.05))
    federation = Federation(method)
    for merges in (False, True, False, True):
        federation.round((0, 2))
        assert nothing(federation.server.opt) == merges
        assert nothing(federation.server.codec) == merges


def test_a_frame_that_stays_keeps_the_memory():
    federation = Federation(tw.Method(space=tw.MAPO(k=32, redraw_every=0), server_opt=tw.SGD(0.5, momentum=0.9)))
    for _ in range(3):
        federation.round((0, 2))
        assert not nothing(federation.server.opt)


def test_momentum_in_a_frame_of_one_round_is_none():
    runs = [
        Federation(tw.Method(space=tw.MAPO(k=32), server_opt=tw.SGD(0.5, momentum=momentum))) for momentum in (0.0, 0.9)
    ]
    for federation in runs:
        for _ in range(3):
            federation.round((0, 2))
    plain, heavy = (federation.server.public for federation in runs)
    assert same(plain.base, heavy.base)


def test_a_clients_memory_starts_anew_with_the_frame():
    """Also when the client was away while the basis changed."""
    method = tw.Method(space=tw.MAPO(k=32, redraw_every=3), up=tw.ErrorFeedback(tw.TopK(0.2)))
    federation = Federation(method)
    federation.round((0, 1))
    held = federation.states[0].codec
    assert not nothing(held)
    federation.download(0)
    within = federation.upload(0)
    federation.states[0] = replace(
        federation.states[0], codec=initial_client_state(federation.contract, federation.first).codec
    )
    assert federation.upload(0) != within  # in the same basis it counts
    for _ in range(2):
        federation.round((1, 2))
    federation.download(0)
    version = federation.states[0].version
    federation.states[0] = replace(federation.states[0], codec=held)
    after = federation.upload(0)
    federation.states[0] = replace(
        federation.states[0], version=version, codec=initial_client_state(federation.contract, federation.first).codec
    )
    assert federation.upload(0) == after
