"""Parts of a method that cannot work together, and invalid settings, are refused with what to write instead."""

import pytest
from torch import nn

from tests.federation import Federation, digits_task
from tests.parts import Drift, Pool, Project, Remember, Turns
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.optimizers import SGD, FedDyn, Scaffold
from thinwire.protocol import Method
from thinwire.schedules import AllBlocks


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            Method(space=Drift(), download="full"),
            r"Drift\(.*which download = 'full' does not send. Write download = 'incremental'",
        ),
        (Method(space=Drift(), correction=Scaffold()), "Scaffold.*redraws them. Write redraw_every = 0"),
        (Method(space=Drift(), correction=FedDyn()), "FedDyn.*redraws them"),
        (
            Method(space=Drift(), schedule=AllBlocks(private=("2.*",))),
            "keeps changes of '2.bias/b' on clients.*Write redraw_every = 0",
        ),
        (Method(sketch=Project(), upload="weights"), "Project.*Write upload = 'delta'"),
        (Method(sketch=Project(), correction=FedDyn()), "keeps a server state.*identity sketch"),
        (Method(sketch=Project(), server_opt=SGD(1.0, weight_decay=0.1)), "Write weight_decay = 0 for the server"),
        (Method(download="full", down=Remember()), "Remember.*Write download = 'incremental'"),
    ],
)
def test_incompatible_parts_are_refused(method, message):
    with pytest.raises(IncompatibleParts, match=message):
        Federation(method)


def test_unsent_changes_in_a_basis_that_is_redrawn_are_refused():
    with pytest.raises(IncompatibleParts, match=r"keeps changes of .* on clients"):
        Federation(Method(space=Drift(), schedule=Turns(2)))


class Skips(Turns):
    """Blocks in turns, with a new cohort in every round: only its plans show that blocks are sent later."""

    def resamples(self, version):
        return True


def test_a_plan_with_unsent_changes_in_a_basis_that_is_redrawn_is_refused():
    federation = Federation(Method(space=Drift(), schedule=Skips(2)))
    with pytest.raises(IncompatibleParts, match=r"keeps changes of .* on clients"):
        federation.round((0,))


@pytest.mark.parametrize("state", [{"server_opt": SGD(1.0, momentum=0.9)}, {"up": Remember()}, {"down": Remember()}])
def test_states_of_codes_that_change_their_shape_are_refused(state):
    with pytest.raises(IncompatibleParts, match="Use a sketch that codes each block separately"):
        Federation(Method(sketch=Pool(), schedule=Turns(2), **state))
    federation = Federation(Method(sketch=Pool(), schedule=Skips(2), **state))
    with pytest.raises(IncompatibleParts, match="Use a sketch that codes each block separately"):
        federation.round((0,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Method(download="incremntal"), "download must be one of incremental, full, not 'incremntal'"),
        (lambda: Method(upload="weightss"), "upload must be one of delta, weights"),
        (lambda: Federation(Method(schedule=AllBlocks(private=("3.*",)))), "private '3.*' matches no block"),
        (lambda: Federation(Method(space=Drift(k=0))), "k must be 1 or more"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        make()


def test_a_model_without_trainable_weights_is_refused():
    with pytest.raises(ConfigError, match="no trainable weights"):
        Federation(Method(), digits_task(nn.Linear(64, 10).requires_grad_(False)))
