"""FedProx, SCAFFOLD, FedDyn and FedNova: identities over whole rounds."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task
from thinwire.core.tree import flatten, same
from thinwire.errors import ConfigError
from thinwire.protocol.round import Round
from thinwire.protocol.upload import decode_upload
from thinwire.training import Local

UNIFORM = tw.aggregators.Uniform()


def run(method, rounds=3, cohort=(0, 2, 3), local=None):
    federation = Federation(method, local=local)
    for _ in range(rounds):
        federation.round(cohort)
    return federation


def test_fedprox_with_mu_zero_is_fedavg_bit_for_bit():
    plain, zero = run(tw.Method()), run(tw.Method(correction=tw.optimizers.FedProx(mu=0.0)))
    assert same(plain.server.public.coords, zero.server.public.coords)
    strong = run(tw.Method(correction=tw.optimizers.FedProx(mu=1.0)))
    assert not same(plain.server.public.coords, strong.server.public.coords)


def test_a_server_step_of_one_gives_the_weighted_mean_of_the_clients():
    federation = Federation(tw.Method(server_opt=tw.optimizers.SGD(1.0), upload="weights"))
    plan = Round.open(federation.contract, federation.server).plan
    uploads = {}
    for client in (0, 2, 3):
        federation.download(client)
        uploads[client] = decode_upload(federation.contract, plan, 0, client, federation.upload(client))
    federation.round((0, 2, 3))
    total = sum(one.weight for one in uploads.values())
    for name, block in federation.server.public.coords.items():
        mean = sum(one.weight / total * one.code[name] for one in uploads.values())
        assert torch.allclose(block, mean, atol=1e-6)


def test_the_shared_control_variate_of_scaffold_is_the_mean_of_the_clients():
    federation = Federation(tw.Method(correction=tw.optimizers.Scaffold(), client_weight=UNIFORM))
    for cohort in ((0, 2), (1, 2, 4), (3,), (0, 1, 2, 3)):
        federation.round(cohort)
    clients = [state.correction for state in federation.states.values()]
    shared = federation.server.public.shared
    for name, block in shared.items():
        mean = sum(own[name] for own in clients) / len(clients)
        assert torch.allclose(block, mean, atol=1e-6)
        assert float(block.abs().max()) > 0


def test_after_one_full_batch_step_of_all_clients_the_control_variate_is_the_mean_gradient():
    method = tw.Method(correction=tw.optimizers.Scaffold(), client_weight=UNIFORM, client_opt=tw.optimizers.SGD(0.2))
    federation = Federation(method, local=Local(batch=0))
    before = federation.server.public.coords
    federation.round(tuple(range(len(federation.task.clients))))
    after = federation.server.public
    gradient = (flatten(before) - flatten(after.coords)) / 0.2
    assert torch.allclose(flatten(after.shared), gradient, atol=1e-5)


def test_uploads_of_scaffold_have_twice_the_size():
    plain, both = run(tw.Method()), run(tw.Method(correction=tw.optimizers.Scaffold()))
    assert len(both.upload(0)) > 1.99 * len(plain.upload(0)) - 100


def test_the_server_state_of_feddyn_is_the_mean_of_the_clients():
    federation = Federation(tw.Method(correction=tw.optimizers.FedDyn(0.2), client_weight=UNIFORM))
    for cohort in ((0, 2), (1, 2, 4), (3,), (0, 1, 2, 3)):
        federation.round(cohort)
    clients = [state.correction for state in federation.states.values()]
    for name, h in federation.server.correction.items():
        mean = sum(own[name] for own in clients) / len(clients)
        assert torch.allclose(h, mean, atol=1e-6)


def test_the_first_round_of_feddyn_is_a_longer_step_of_fedprox():
    alpha, cohort = 0.3, (0, 1)
    dyn = run(tw.Method(correction=tw.optimizers.FedDyn(alpha), client_weight=UNIFORM), rounds=1, cohort=cohort)
    prox = run(tw.Method(correction=tw.optimizers.FedProx(alpha), client_weight=UNIFORM), rounds=1, cohort=cohort)
    start = flatten(dyn.first.coords)
    fraction = len(cohort) / len(dyn.task.clients)
    wanted = start + (1 + fraction) * (flatten(prox.server.public.coords) - start)
    assert torch.allclose(flatten(dyn.server.public.coords), wanted, atol=1e-6)


CORRECTIONS = (tw.optimizers.FedProx(0.1), tw.optimizers.Scaffold(), tw.optimizers.FedDyn(0.1), tw.optimizers.FedNova())
SPACES = (tw.spaces.Full(), tw.spaces.FedPara(rank=3), tw.spaces.LoRA(rank=2), tw.spaces.MAPO(k=64, redraw_every=0))


@pytest.mark.parametrize("which", [0, 1, 6, 7])
def test_corrections_combine_with_spaces_and_server_optimizers(which):
    """All combinations: tests/test_combinations.py."""
    server = (tw.optimizers.SGD(1.0), tw.optimizers.Adam(0.01, eps=1e-3))[which // 4]
    correction, space = CORRECTIONS[which % 4], SPACES[(which + which // 4) % 4]
    method = tw.Method(space=space, correction=correction, server_opt=server, client_opt=tw.optimizers.SGD(0.05))
    federation = Federation(method, digits_task())
    for _ in range(3):
        federation.round((0, 1, 2))
    assert all(torch.isfinite(torch.tensor(federation.losses)))
    federation.download(3)
    assert same(federation.public[3].coords, federation.server.public.coords)
    assert same(federation.public[3].shared, federation.server.public.shared)


SLOWER = ("feddyn", "fedadam", "fedprox", "fednova", "fedyogi", "fedadagrad")


@pytest.mark.parametrize("preset", ["scaffold", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER)])
def test_presets_learn_digits(preset, tmp_path):
    from thinwire.runs.config import resolve
    from thinwire.runs.execute import execute

    summary = execute(resolve(preset, overrides={"rounds": 10}), tmp_path / preset)
    assert summary["best_accuracy"] > 0.4


def test_invalid_settings_are_refused():
    for make in (
        lambda: tw.optimizers.FedProx(-1.0),
        lambda: tw.optimizers.FedDyn(0.0),
        lambda: tw.optimizers.FedNova(1.0),
    ):
        with pytest.raises(ConfigError, match="must be"):
            make()


def test_fednova_is_fedavg_if_all_clients_take_the_same_number_of_steps():
    plain, nova = (
        run(m, local=Local(batch=8, steps=4)) for m in (tw.Method(), tw.Method(correction=tw.optimizers.FedNova()))
    )
    assert torch.allclose(flatten(plain.server.public.coords), flatten(nova.server.public.coords), atol=1e-6)
    plain, nova = (run(m) for m in (tw.Method(), tw.Method(correction=tw.optimizers.FedNova())))  # 3, 3 and 1 steps
    assert not torch.allclose(flatten(plain.server.public.coords), flatten(nova.server.public.coords), atol=1e-4)


def test_fednova_moves_by_the_mean_step_times_the_mean_number_of_steps():
    federation = Federation(tw.Method(correction=tw.optimizers.FedNova()))  # batches of 16
    plan = Round.open(federation.contract, federation.server).plan
    cohort, uploads = (0, 1, 3), {}
    for client in cohort:
        federation.download(client)
        uploads[client] = decode_upload(federation.contract, plan, 0, client, federation.upload(client))
    steps = {client: -(-len(federation.task.clients.client(client)) // 16) for client in cohort}
    assert {client: float(one.report["steps"]) for client, one in uploads.items()} == steps
    assert len(set(steps.values())) > 1
    start = flatten(federation.server.public.coords)
    federation.round(cohort)
    total = sum(one.weight for one in uploads.values())
    tau = sum(one.weight / total * steps[client] for client, one in uploads.items())
    step = sum(one.weight / total * flatten(one.code) / steps[client] for client, one in uploads.items())
    assert torch.allclose(flatten(federation.server.public.coords), start + tau * step, atol=1e-6)


def test_fednova_with_momentum_sums_the_factors_of_gradients():
    """Constant gradients: the distance of SGD with momentum, in steps of plain SGD."""
    opt, g, w = tw.optimizers.SGD(1.0, momentum=0.6), {"w": torch.ones(1)}, {"w": torch.zeros(1)}
    state = opt.init(w)
    for steps in range(1, 6):
        change, state = opt.update(g, state, w)
        w = {"w": w["w"] + change["w"]}
        _, report = tw.optimizers.FedNova(momentum=0.6).finish({}, steps, 1.0, {}, {})
        assert float(report["steps"]) == pytest.approx(-float(w["w"]), rel=1e-5)


def test_fednova_refuses_invalid_reports_and_uploads_of_weights():
    with pytest.raises(tw.WireError, match="steps"):
        tw.optimizers.FedNova().factor({"steps": torch.tensor(0.0)})
    with pytest.raises(tw.IncompatibleParts, match="upload = 'delta'"):
        Federation(tw.Method(correction=tw.optimizers.FedNova(), upload="weights"))
