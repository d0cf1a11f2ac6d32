"""Optimizer states of places in the cohort (`opt_owner = "place"`)."""

import pytest
import torch
import torch.nn.functional as F

from tests.federation import SIZES, digits, digits_task, perceptron, workload
from thinwire.core.key import Key
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.flower.apps import deployable
from thinwire.optimizers import SGD
from thinwire.protocol import Asynchronous, Method, Stage
from thinwire.protocol.setup import make_contract
from thinwire.protocol.state import ClientState, hand_over
from thinwire.runs.build import build_job
from thinwire.runs.config import from_table, resolve, to_table
from thinwire.schedules import FedLAMA
from thinwire.spaces import MAPO, LoRA
from thinwire.training import Local

STEPS = Local(batch=8, steps=3)
MOMENTUM = Method(client_opt=SGD(0.05, momentum=0.9), opt_lifetime="run", opt_owner="place")


def simulation(method: Method, rounds: int = 4, cohort: int = 3, **engine):
    job = Job(task=digits_task(), method=method, rounds=rounds, cohort=cohort, local=STEPS, eval_every=rounds)
    return make_simulation(Engine(backend="loop", **engine), job)


def test_fedavg_equals_torch_optimizers_of_as_many_machines_as_the_cohort_has_clients():
    """One torch optimizer for each place in the cohort, never reset, used for all clients trained at that place."""
    ours = simulation(MOMENTUM)
    state, (x, y) = ours.start(), digits()
    common = {name: block.clone() for name, block in ours.weights(state.server.public).items()}
    models = [perceptron() for _ in range(3)]
    opts = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in models]
    cohorts = []
    for number in range(4):
        state, _ = ours.round(state)
        cohorts.append(state.cohort)
        for i, model, opt in zip(state.cohort, models, opts, strict=True):
            model.load_state_dict(common)
            work = workload(ours.job.task, [i], [Key(0).fold("batches", number, i)], STEPS)
            for step in range(work.rows.shape[1]):
                rows = work.index[0, step, : work.rows[0, step]]
                opt.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                opt.step()
        total = sum(SIZES[i] for i in state.cohort)
        common = {
            name: sum(
                SIZES[i] / total * model.state_dict()[name] for i, model in zip(state.cohort, models, strict=True)
            )
            for name in common
        }
        for name, block in ours.weights(state.server.public).items():
            torch.testing.assert_close(block, common[name], rtol=2e-5, atol=2e-5)
    assert len(set(cohorts)) > 1  # else places and clients are the same
    holders = {i for i, one in state.clients.items() if one.opt}
    assert holders == set(state.cohort)  # clients of earlier cohorts have handed their states over


def test_with_one_client_both_owners_are_the_same():
    finals = []
    for owner in ("client", "place"):
        method = MOMENTUM.replace(opt_owner=owner)
        job = Job(task=digits_task(sizes=(20,)), method=method, rounds=3, cohort=1, local=STEPS, eval_every=3)
        run = make_simulation(Engine(backend="loop"), job)
        state = run.start()
        for _ in range(3):
            state, _ = run.round(state)
        finals.append(state.server.public.coords)
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def test_lifetimes_that_end_with_the_cohort_do_not_depend_on_the_owner():
    finals = []
    for owner in ("client", "place"):
        method = MOMENTUM.replace(schedule=FedLAMA(2), opt_lifetime="window", opt_owner=owner)
        run = simulation(method)
        state = run.start()
        for _ in range(4):
            state, _ = run.round(state)
        finals.append(state.server.public.coords)
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def test_groups_of_clients_do_not_change_the_result():
    finals = []
    for chunk in (0, 1):
        run = simulation(MOMENTUM, chunk=chunk)
        state = run.start()
        for _ in range(3):
            state, _ = run.round(state)
        finals.append(state.server.public.coords)
    for name in finals[0]:
        torch.testing.assert_close(finals[0][name], finals[1][name], rtol=1e-5, atol=1e-6)


def test_a_place_that_was_empty_has_no_state():
    kept = {1: ClientState(1, opt={"momentum": {"w": torch.ones(1)}})}
    after = hand_over({1: kept[1], 2: ClientState()}, (2, 1), (1,), kept)
    assert after[2].opt == kept[1].opt
    assert after[1].opt == {}
    assert kept[1].opt  # nothing was changed in place


def test_the_setting_is_part_of_files_only_where_it_is_not_the_default():
    assert "opt_owner" not in to_table(resolve("fedavg"))["method"]
    chosen = resolve("fedavg", overrides={"method.opt_lifetime": "run", "method.opt_owner": "place"})
    assert from_table(to_table(chosen)) == chosen
    assert build_job(chosen).method.opt_owner == "place"


@pytest.mark.parametrize(
    "part",
    [
        {"space": MAPO(k=32, redraw_every=2)},
        {"asynchronous": Asynchronous(2.0)},
        {"next_stage": Stage(1, LoRA(rank=2)), "download": "full"},
    ],
)
def test_what_cannot_be_handed_over_is_refused(part):
    weights = {name: p.detach() for name, p in perceptron().named_parameters()}
    with pytest.raises(IncompatibleParts, match=r"^opt_owner = 'place' hands optimizer states .* Write "):
        make_contract(MOMENTUM.replace(**part).over(4), weights, {}, Key(0))


def test_a_deployment_and_another_word_are_refused():
    chosen = resolve("fedavg", overrides={"method.opt_lifetime": "run", "method.opt_owner": "place"})
    with pytest.raises(ConfigError, match=r"^opt_owner = 'place' is for simulations"):
        deployable(chosen)
    with pytest.raises(ConfigError, match=r"^opt_owner must be one of client, place, not 'server'$"):
        Method(opt_owner="server")
