"""Clients refuse downloads that do not continue their version, or that contain what no server sends."""

import pytest
from torch import nn

from tests.federation import Federation, closed, digits_task, perceptron, same_public
from tests.parts import Drift
from tests.protocol.messages import bodies_of, forged, value_bytes, with_norm
from thinwire.errors import WireError
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.protocol.receive import receive, request_full_state
from thinwire.protocol.round import Round
from thinwire.protocol.upload import raw
from thinwire.schedules import AllBlocks
from thinwire.wire import message as wire
from thinwire.wire.message import pack_weight


def perturbed(model: nn.Module, name: str) -> nn.Module:
    """The same model with one value a little larger."""
    model.state_dict()[name].view(-1)[0] += 1e-6
    return model


def test_messages_of_another_method_model_initialization_or_seed_are_refused(opened):
    federation, plan, data = opened
    others = [
        Federation(Method(client_opt=SGD(0.2)), with_norm()),
        Federation(Method(), digits_task(perceptron(norm=True, hidden=13))),
        Federation(Method(), with_norm(), seed=1),
        Federation(Method(), digits_task(perturbed(perceptron(norm=True), "0.bias"))),
        Federation(Method(), digits_task(perturbed(perceptron(norm=True), "1.running_mean"))),
    ]
    for other in others:
        with pytest.raises(WireError, match="another method or model"):
            closed(other.contract, other.server, plan, {0: data}, 6)
        with pytest.raises(WireError, match="another method or model"):
            receive(other.contract, other.first, federation.opened.downloads.messages({0: 0})[0])


def test_downloads_that_do_not_continue_the_version_are_refused(opened):
    federation, _, data = opened
    for _ in range(4):
        federation.round((0, 1))
    contract, server = federation.contract, federation.server
    with pytest.raises(WireError, match="kind 'up' came from the server, which never sends it"):
        receive(contract, federation.first, data)
    with pytest.raises(WireError, match="kind 'lost' came from the server"):
        receive(contract, federation.first, request_full_state(contract, 0, 0))
    steps = Round.open(contract, server).downloads.messages({0: server.public.version - 1})[0]
    state = Round.open(contract, server).downloads.full_state(request_full_state(contract, 2, 0), 0)
    assert wire.unpack(state, contract.schema).kind == wire.STATE
    for message, start in ((steps, 4), (state, 2)):
        with pytest.raises(WireError, match=f"from version {start} do not continue our version 0"):
            receive(contract, federation.first, message)
        with pytest.raises(WireError, match="do not continue our version 5"):
            receive(contract, server.public, message)
    whole = Round.open(contract, server).downloads.full_state(request_full_state(contract, 0, 0), 0)
    assert same_public(receive(contract, federation.first, whole).public, server.public)
    for fields in ({"BASE": b""}, {"WEIGHT": pack_weight(1.0)}, {"BUFFERS": b""}, {"COORDS": None}):
        with pytest.raises(WireError, match=r"fields .* expected"):
            receive(contract, federation.first, forged(federation, whole, **fields))


def test_steps_that_do_not_end_at_their_version_are_refused():
    federation = Federation(Method(space=Drift(k=2, redraw_every=3), client_opt=SGD(0.5)))
    contract = federation.contract
    for _ in range(8):
        federation.round((0,))
    data = Round.open(contract, federation.server).downloads.messages({1: 1})[1]
    message = wire.unpack(data, contract.schema)
    fields = [set(body.fields) for body in bodies_of(federation, data)]
    assert fields == [
        {wire.VALUES},
        {wire.VALUES},
        {wire.VALUES},
        {wire.DRIFT_CHECK},
    ]  # to 3, to 6, to 8, and the request
    at = federation.first._replace(version=1)

    def built(*bodies: bytes) -> bytes:
        return wire.pack(wire.STEPS, 8, bodies, contract.schema, 7)

    one, two, three, request = message.bodies
    with pytest.raises(WireError, match="steps to version 8 end at version 6"):
        receive(contract, at, built(one, two, request))
    with pytest.raises(WireError, match="steps continue beyond version 8"):
        receive(contract, at, built(one, two, three, three, request))
    with pytest.raises(WireError, match=r"fields .* expected"):
        receive(contract, at, built(one, two, three))
    with pytest.raises(WireError, match=r"fields .* expected"):
        receive(contract, at, forged(federation, data, COORDS=b"abcd"))
    with pytest.raises(WireError, match="bytes of raw values"):
        receive(contract, at, forged(federation, data, VALUES=b"abcd"))


def test_entries_with_other_fields_are_refused():
    federation = Federation(Method())
    federation.round((0,))
    contract = federation.contract
    steps = Round.open(contract, federation.server).downloads.messages({1: 0})[1]
    for fields in ({"COORDS": None}, {"SHARED": b""}, {"WEIGHT": pack_weight(1.0)}):
        with pytest.raises(WireError, match=r"fields .* expected"):
            receive(contract, federation.first, forged(federation, steps, **fields))


def test_private_blocks_cannot_be_requested_or_overwritten():
    federation = Federation(Method(schedule=AllBlocks(private=("2.*",))))
    federation.round((0,))
    contract = federation.contract
    data = Round.open(contract, federation.server).downloads.messages({1: 0})[1]
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
            with pytest.raises(WireError, match="is private and never sent"):
                receive(contract, federation.first, wire.pack(kind, 1, packed, contract.schema, behind=1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_downloads_with_non_finite_results_are_refused(value):
    federation = Federation(Method())
    federation.round((0,))
    contract = federation.contract
    known = federation.first
    if value == 3e38:  # finite by itself, not when it is added
        known = known._replace(coords={name: block + 3e38 for name, block in known.coords.items()})
    data = Round.open(contract, federation.server).downloads.messages({1: 0})[1]
    payload = bodies_of(federation, data)[0].fields[wire.COORDS]
    bad = forged(federation, data, kind=wire.STEPS, COORDS=bytes(payload[:-4]) + value_bytes(value))
    with pytest.raises(WireError, match="version 1 that are not finite"):
        receive(contract, known, bad)
