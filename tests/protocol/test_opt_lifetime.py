"""How long a client keeps the state of its optimizer: a round, a window of the schedule, or the run."""

import pytest
import torch
import torch.nn.functional as F

from tests.federation import SIZES, Federation, digits, perceptron, workload
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.runs.build import build_job
from thinwire.runs.config import from_table, resolve, to_table
from thinwire.schedules import FedLAMA
from thinwire.spaces import MAPO
from thinwire.training import Local

STEPS = Local(batch=8, steps=3)
COHORTS = ((0, 1, 2), (1, 3, 4), (0, 1, 5), (0, 2, 3))


@pytest.mark.parametrize("lifetime", ["round", "window", "run"])
def test_fedavg_with_momentum_equals_torch_optimizers_that_live_as_long(lifetime):
    method = Method(client_opt=SGD(0.05, momentum=0.9), opt_lifetime=lifetime)
    federation = Federation(method, local=STEPS)
    x, y = digits()
    common = {name: p.detach().clone() for name, p in perceptron().named_parameters()}
    models = {i: perceptron() for i in range(len(SIZES))}
    opts = {i: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for i, model in models.items()}
    for version, cohort in enumerate(COHORTS):
        federation.round(cohort)
        for i in cohort:
            models[i].load_state_dict(common)
            if lifetime != "run":
                opts[i] = torch.optim.SGD(models[i].parameters(), 0.05, momentum=0.9)
            work = workload(federation.task, [i], [federation.key.fold("batches", version, i)], STEPS)
            for step in range(work.rows.shape[1]):
                rows = work.index[0, step, : work.rows[0, step]]
                opts[i].zero_grad()
                F.cross_entropy(models[i](x[rows]), y[rows]).backward()
                opts[i].step()
        total = sum(SIZES[i] for i in cohort)
        common = {
            name: sum(SIZES[i] / total * dict(models[i].named_parameters())[name].data for i in cohort)
            for name in common
        }
        for name, block in federation.weights().items():
            torch.testing.assert_close(block, common[name], rtol=2e-5, atol=2e-5)


def momentum_of(federation: Federation, client: int) -> dict[str, torch.Tensor]:
    return dict(federation.states[client].opt.get("momentum", {}))


def test_only_a_run_keeps_momentum_beyond_a_window():
    kept = {}
    for lifetime in ("round", "window", "run"):
        method = Method(schedule=FedLAMA(2), client_opt=SGD(0.05, momentum=0.9), opt_lifetime=lifetime)
        federation = Federation(method, local=STEPS)
        found = []
        for _ in range(4):
            federation.round((0, 1))
            found.append(bool(momentum_of(federation, 0)))
        kept[lifetime] = found
    assert kept == {"round": [False] * 4, "window": [True, False, True, False], "run": [True] * 4}


def test_a_new_basis_starts_a_new_state():
    """Momentum of old coordinates has no meaning in new ones: the first round of a basis is that of `window`."""
    finals = []
    for lifetime in ("window", "run"):
        method = Method(space=MAPO(k=32, redraw_every=1), client_opt=SGD(0.05, momentum=0.9), opt_lifetime=lifetime)
        federation = Federation(method, local=STEPS)
        for _ in range(3):
            federation.round((0, 1, 2))
        finals.append(federation.weights())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.parametrize("backend", ["vmap", "threads"])
def test_backends_agree(backend):
    def trained(name: str):
        quick = {"rounds": 3, "local.steps": 2, "cohort.size": 5, "method.client_opt.momentum": 0.5}
        experiment = resolve("fedavg", overrides={**quick, "method.opt_lifetime": "run"})
        simulation = make_simulation(Engine(backend=name), build_job(experiment))
        state = simulation.start()
        for _ in range(3):
            state, _ = simulation.round(state)
        return state.server.public.coords

    ours, other = trained("loop"), trained(backend)
    for name, block in ours.items():
        torch.testing.assert_close(block, other[name], rtol=1e-4, atol=1e-5)


def test_the_setting_is_part_of_files_and_schema_only_where_it_is_not_the_default():
    plain = resolve("fedavg")
    assert "opt_lifetime" not in to_table(plain)["method"]
    chosen = resolve("fedavg", overrides={"method.opt_lifetime": "run"})
    assert from_table(to_table(chosen)) == chosen
    schemas = {
        lifetime: Federation(Method(opt_lifetime=lifetime)).contract.schema.digest
        for lifetime in ("round", "window", "run")
    }
    assert len(set(schemas.values())) == 3
    assert schemas["window"] == Federation(Method()).contract.schema.digest


def test_another_word_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^opt_lifetime must be one of round, window, run, not 'epoch'$"):
        Method(opt_lifetime="epoch")
