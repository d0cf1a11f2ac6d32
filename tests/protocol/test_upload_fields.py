"""The fields of an upload, and their bytes."""

import pytest

from tests.federation import Federation
from tests.parts import Half, Turns
from tests.protocol.messages import ALL_CLIENTS, D, bodies_of, with_norm
from thinwire.aggregators import Uniform
from thinwire.optimizers import Scaffold
from thinwire.protocol import Method
from thinwire.wire import message as wire


@pytest.mark.parametrize("client_weight", [None, Uniform()])
def test_fedavg_uploads_four_bytes_a_parameter(client_weight):
    federation = Federation(Method(client_weight=client_weight) if client_weight else Method())
    up = federation.round(ALL_CLIENTS)
    assert {len(data) for data in up.values()} == {4 * D + (10 if client_weight else 11)}
    federation.round((0,))
    assert 4 * D < len(federation.download(1)) <= 4 * D + 64


def test_uniform_weights_are_not_sent():
    federation = Federation(Method(client_weight=Uniform()))
    data = federation.round((0,))[0]
    body = bodies_of(federation, data)[0]
    assert set(body.fields) == {wire.COORDS}


def test_uploads_have_the_fields_that_the_method_needs():
    method = Method(correction=Scaffold(), schedule=Turns(2))
    federation = Federation(method, with_norm())
    data = federation.round((0,))[0]
    body = bodies_of(federation, data)[0]
    assert {field: len(payload) for field, payload in body.fields.items()} == {
        wire.COORDS: federation.contract.coords.restrict(body.plan).nbytes,
        wire.WEIGHT: 1,  # the number of examples, below 128
        wire.BUFFERS: 4 * 2 * 12,
        wire.SHARED: federation.contract.coords.nbytes,
        wire.REPORT: 4 * len(body.plan),
    }


def test_half_precision_halves_the_bytes():
    up = Federation(Method(up=Half(), client_weight=Uniform())).round((0,))[0]
    assert len(up) == 2 * D + 10
