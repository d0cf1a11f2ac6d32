"""FedLAMA: clients that missed rounds, combinations with other parts, and errors."""

from dataclasses import replace

import pytest
import torch

from tests.federation import Federation, perceptron, same_public, workload
from thinwire.aggregators import Uniform
from thinwire.codecs import ErrorFeedback, TopK
from thinwire.core.key import Key
from thinwire.core.tree import Spec, same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD, Adam, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.client import Group, initial_client_state
from thinwire.protocol.round import Round
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.schedules import FedLAMA
from thinwire.spaces import MAPO, FedPara, Full, Route
from thinwire.training import Local

STEPS = Local(batch=8, steps=3)
SMALL = Spec.of(dict(perceptron().named_parameters()))


# -- missed rounds -----------------------------------------------------------------------------------------------------


def upload_of(federation: Federation, client: int, state) -> bytes:
    """The upload of a client with that state."""
    version = federation.server.public.version
    work = workload(federation.task, [client], [Key(9)], STEPS)
    plan = federation.requested[client]
    group = Group(federation.public[client], plan, (client,), (state,))
    return bytes(federation.train(group, work)[0][0]) + version.to_bytes(2, "little")


def within_a_window() -> Federation:
    """A federation within a window: client 0 has an update that is not synchronized, and momentum."""
    federation = Federation(Method(schedule=FedLAMA(3), client_opt=SGD(0.1, momentum=0.9)), local=STEPS)
    for _ in range(4):
        federation.round((0, 1, 2))
    assert federation.states[0].unsent
    assert federation.states[0].opt
    return federation


def test_a_client_that_missed_windows_starts_from_the_public_state():
    federation = within_a_window()
    for _ in range(6):
        federation.round((1, 2))
    assert federation.server.public.version == 10
    federation.download(0)
    assert same_public(federation.public[0], federation.server.public)
    assert federation.states[0].unsent == {}
    new = initial_client_state(federation.contract, federation.first)
    assert upload_of(federation, 0, federation.states[0]) == upload_of(federation, 0, new)
    assert upload_of(federation, 1, federation.states[1]) != upload_of(
        federation, 1, initial_client_state(federation.contract, federation.first)
    )


def test_a_client_that_missed_a_round_within_a_window_keeps_unsynchronized_layers_but_not_momentum():
    federation = within_a_window()
    federation.round((1, 2))
    unsent = federation.states[0].unsent
    federation.download(0)
    assert same(federation.states[0].unsent, unsent), "its layer was not synchronized in that round"
    without = replace(federation.states[0], opt={})
    assert upload_of(federation, 0, federation.states[0]) == upload_of(federation, 0, without)


def test_the_cohort_is_resampled_only_at_the_start_of_a_window():
    job = build_job(resolve("fedlama", "digits", {"rounds": 8, "local.steps": 1, "cohort.size": 5}))
    simulation = make_simulation(Engine(), job)
    state, cohorts = simulation.start(), []
    for _ in range(8):
        state, _ = simulation.round(state)
        cohorts.append(state.cohort)
    assert len(set(cohorts[:4])) == len(set(cohorts[4:])) == 1
    assert cohorts[3] != cohorts[4]


# -- combinations ------------------------------------------------------------------------------------------------------

COMBINATIONS = {
    "error feedback": {"up": ErrorFeedback(TopK(0.2)), "down": ErrorFeedback(TopK(0.2))},
    "scaffold": {"correction": Scaffold(), "client_opt": SGD(0.05)},
    "server adam": {"server_opt": Adam(0.01)},
    "client adam": {"client_opt": Adam(0.01)},
    "fedpara": {"space": FedPara(gamma=0.1)},
    "a fixed random subspace": {"space": Route((("0.*", MAPO(k=8, redraw_every=0)), ("*", Full())))},
    "full downloads": {"download": "full"},
    "a private head": {"schedule": FedLAMA(2, private=("2.*",))},
    "public rules": {"schedule": FedLAMA(2, rules="public"), "client_weight": Uniform()},
    "accelerated": {"schedule": FedLAMA(2, accelerate=True)},
}


@pytest.mark.parametrize("case", COMBINATIONS)
def test_fedlama_combines_with(case):
    method = Method(**{"schedule": FedLAMA(2), "client_opt": SGD(0.1, momentum=0.9), **COMBINATIONS[case]})
    federation = Federation(method, local=STEPS)
    unsent = set()
    for number, cohort in enumerate(((0, 1, 4), (2, 3), (1, 5, 2), (4, 0), (3, 5, 1))):
        for _ in range(2 if number < 4 else 1):  # the last window is incomplete
            plan = Round.open(federation.contract, federation.server).plan
            before = federation.server
            federation.round(cohort)
            absent = frozenset(federation.contract.sendable.names) - plan.names
            unsent |= {name for i in cohort for name in federation.states[i].unsent}
            slots = {slot: (tree, federation.server.opt[slot]) for slot, tree in before.opt.items()}
            slots["correction"] = (before.correction, federation.server.correction)
            for slot, (old, new) in slots.items():
                for name in absent & old.keys():
                    assert torch.equal(old[name], new[name]), f"{name} was not synchronized, but {slot} changed"
        federation.download(number)
    assert unsent, "all layers were synchronized in every round"
    assert all(torch.isfinite(torch.tensor(federation.losses)))
    for client in federation.public:
        federation.download(client)
        assert same_public(federation.public[client], federation.server.public)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_space_that_redraws_its_basis_is_refused_before_training():
    with pytest.raises(IncompatibleParts, match="Write redraw_every = 0"):
        Federation(Method(space=MAPO(k=8, redraw_every=1), schedule=FedLAMA(2)))
    Federation(Method(space=MAPO(k=8, redraw_every=1), schedule=FedLAMA(1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedLAMA(0), "phi must be 1"),
        (lambda: FedLAMA(2, rules="papers"), "rules must be one of paper, public"),
        (lambda: FedLAMA(2, rules="public").init(Spec.of({"b": torch.zeros(3)})), "write rules = 'paper'"),
        (lambda: FedLAMA(2, private=("nothing*",)).init(SMALL), "matches no block"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
