"""When the basis is redrawn, states of the old coordinates are reset on the server and on clients."""

from __future__ import annotations

from dataclasses import replace

import pytest

import thinwire as tw
from tests.federation import Federation
from thinwire.core.tree import same
from thinwire.protocol.client import initial_client_state


def is_zero(tree) -> bool:
    return all(not block.any() for block in tree.values())


@pytest.mark.parametrize(
    "opt", [tw.optimizers.SGD(0.5, momentum=0.9), tw.optimizers.Adam(0.01), tw.optimizers.Yogi(0.01)], ids=repr
)
@pytest.mark.parametrize(
    "space", [tw.spaces.MAPO(k=32, redraw_every=2), tw.spaces.LoRA(rank=2, redraw_every=2)], ids=repr
)
def test_server_states_are_reset_with_the_basis(opt, space):
    method = tw.Method(
        space=space,
        server_opt=opt,
        down=tw.codecs.ErrorFeedback(tw.codecs.TopK(0.2)),
        client_opt=tw.optimizers.SGD(0.05),
    )
    federation = Federation(method)
    for merges in (False, True, False, True):
        federation.round((0, 2))
        assert all(is_zero(tree) == merges for tree in federation.server.opt.values())
        assert is_zero(federation.server.codec) == merges


def test_server_states_are_kept_with_a_fixed_basis():
    federation = Federation(
        tw.Method(space=tw.spaces.MAPO(k=32, redraw_every=0), server_opt=tw.optimizers.SGD(0.5, momentum=0.9))
    )
    for _ in range(3):
        federation.round((0, 2))
        assert not is_zero(federation.server.opt["momentum"])


def test_momentum_has_no_effect_in_a_basis_of_one_round():
    runs = [
        Federation(tw.Method(space=tw.spaces.MAPO(k=32), server_opt=tw.optimizers.SGD(0.5, momentum=momentum)))
        for momentum in (0.0, 0.9)
    ]
    for federation in runs:
        for _ in range(3):
            federation.round((0, 2))
    plain, heavy = (federation.server.public for federation in runs)
    assert same(plain.base, heavy.base)


def test_client_codec_states_are_reset_with_the_basis():
    """Also if the client missed the round in which the basis was redrawn."""
    method = tw.Method(space=tw.spaces.MAPO(k=32, redraw_every=3), up=tw.codecs.ErrorFeedback(tw.codecs.TopK(0.2)))
    federation = Federation(method)
    federation.round((0, 1))
    feedback = federation.states[0].codec
    assert not is_zero(feedback)
    federation.download(0)
    within = federation.upload(0)
    federation.states[0] = replace(
        federation.states[0], codec=initial_client_state(federation.contract, federation.first).codec
    )
    assert federation.upload(0) != within  # in the same basis the state changes the upload
    for _ in range(2):
        federation.round((1, 2))
    federation.download(0)
    version = federation.states[0].version
    federation.states[0] = replace(federation.states[0], codec=feedback)
    after = federation.upload(0)
    federation.states[0] = replace(
        federation.states[0], version=version, codec=initial_client_state(federation.contract, federation.first).codec
    )
    assert federation.upload(0) == after
