"""Malicious clients in a simulation: what they send, who they are, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire as tw
from tests.federation import digits_task, records_of, same_public
from thinwire.core.key import Key
from thinwire.core.registry import entries
from thinwire.errors import ConfigError
from thinwire.federation import Job
from thinwire.federation.attacks import ALittle, InnerProduct, LabelFlip, Noise, Scaling, SignFlip, poisoned
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.flower.apps import deployable
from thinwire.runs.build import build_job
from thinwire.runs.config import digest, from_table, resolve, to_table
from thinwire.training import Local
from thinwire.wire import message as wire

SIZES = (12,) * 6
ATTACKS = {"sign-flip": SignFlip, "scaling": Scaling, "noise": Noise, "label-flip": LabelFlip}
ATTACKS |= {"inner-product": InnerProduct, "a-little": ALittle}


def job_with(attack, method=None, rounds=1):
    return Job(digits_task(sizes=SIZES), method or tw.Method(), rounds, 6, Local(1, batch=6), attack=attack)


def uploads(attack, method=None):
    """The coordinates that each client uploads in the first round."""
    simulation, sent = make_simulation(Engine(backend="loop"), job_with(attack, method)), {}

    def keep(number, direction, client, message):
        if direction == "up":
            schema = simulation.contract.schema.sent_by(client)
            body = wire.unpack_body(wire.unpack(message, schema).bodies[0], schema)
            sent[client] = torch.frombuffer(bytearray(body.fields[wire.COORDS]), dtype=torch.float32)

    simulation.round(simulation.start(), keep)
    return torch.stack([sent[i] for i in range(6)]), simulation.clients.attackers


def test_every_registered_attack_is_tested_here():
    assert {name: entry.make for name, entry in entries("attack").items()} == ATTACKS


def test_attackers_send_what_the_attack_says_and_the_others_what_they_trained():
    honest, nobody = uploads(None)
    assert not nobody
    for attack, wanted in (
        (SignFlip(fraction=0.3, factor=10.0), lambda own, mean, std: -10 * own),
        (Scaling(fraction=0.3, factor=4.0), lambda own, mean, std: 4 * own),
        (InnerProduct(fraction=0.3, factor=0.5), lambda own, mean, std: (-0.5 * mean).expand_as(own)),
        (ALittle(fraction=0.3, z=1.5), lambda own, mean, std: (mean - 1.5 * std).expand_as(own)),
    ):
        sent, attackers = uploads(attack)
        assert attackers == attack.attackers(Key(0), 6)
        assert len(attackers) == 2
        bad = torch.tensor([i in attackers for i in range(6)])
        assert torch.equal(sent[~bad], honest[~bad])
        others = honest[~bad]
        torch.testing.assert_close(sent[bad], wanted(honest[bad], others.mean(0), others.std(0)))
    sent, attackers = uploads(Noise(fraction=0.3, factor=10.0))
    ratio = sent.norm(dim=1) / honest.norm(dim=1)
    assert all(8 < ratio[i] < 12 if i in attackers else ratio[i] == 1 for i in range(6))
    assert torch.equal(sent, uploads(Noise(fraction=0.3, factor=10.0))[0])


def test_flipped_labels_are_those_of_attackers_alone():
    task = build_job(
        resolve("fedavg", "digits", {"task.clients": 5, "cohort.size": 5, "task.validation_fraction": 0.2})
    ).task
    attack = LabelFlip(fraction=0.4)
    changed, attackers = poisoned(task, attack, Key(3)).targets, attack.attackers(Key(3), 5)
    for i in range(5):
        own, held = task.clients.client(i), task.client_tests.client(i)
        before = task.train.targets
        assert torch.equal(changed[own], 9 - before[own] if i in attackers else before[own])
        assert torch.equal(changed[held], before[held])
    honest, _ = uploads(None)
    sent, who = uploads(LabelFlip(fraction=0.3))
    assert [not torch.equal(sent[i], honest[i]) for i in range(6)] == [i in who for i in range(6)]


def test_attacks_work_with_subspaces_codecs_and_sketches_and_continue_with_the_same_bits():
    for name in ("thin", "stc", "evofed"):
        method = resolve(name, "digits").method
        job = job_with(SignFlip(fraction=0.3), replace(method, norm_bound=0.0), rounds=3)
        engine = Engine(backend="loop")
        one = make_simulation(engine, job)
        state = one.start()
        states = []
        for _ in range(3):
            state, record = one.round(state)
            states.append((state, record.bytes_up))
        other, again = make_simulation(engine, job), states[0][0]
        for i in (1, 2):
            again, record = other.round(again)
            assert record.bytes_up == states[i][1]
        assert same_public(again.server.public, state.server.public)


def test_an_attack_is_part_of_the_experiment_and_its_absence_changes_nothing():
    plain = resolve("fedavg", "digits")
    assert "attack" not in to_table(plain)
    attacked = resolve("fedavg", "digits", {"attack.kind": "a-little", "attack.z": 1.5})
    assert digest(attacked) != digest(plain)
    assert from_table(to_table(attacked)) == attacked
    assert build_job(attacked).attack == ALittle(z=1.5)


def test_robust_rules_withstand_sign_flips_and_the_mean_does_not():
    settings = {"task.clients": 15, "cohort.size": 15, "task.partition": {"kind": "classes", "per_client": 2}}
    settings |= {
        "rounds": 12,
        "eval.every": 12,
        "local.steps": 3,
        "method.norm_bound": 0.0,  # else the attackers are left out
        "attack": {"kind": "sign-flip", "fraction": 0.2},
    }
    found = {}
    for rule in (
        {"kind": "weighted"},
        {"kind": "multi-krum", "faulty": 0.2},
        {"kind": "nearest-mixing", "faulty": 0.2},
    ):
        experiment = resolve("fedavg", "digits", {**settings, "method.aggregator": rule, "engine.backend": "vmap"})
        *_, last = records_of(experiment.engine, build_job(experiment))
        found[rule["kind"]] = last.accuracy
    assert found["weighted"] < 0.5 < 0.7 < min(found["multi-krum"], found["nearest-mixing"]), found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attack.kind": "sign-flp"}, "unknown attack 'sign-flp': did you mean 'sign-flip'"),
        ({"attack.kind": "noise", "attack.fraction": 0.0}, "attack.fraction must be above 0 and below 1, not 0.0"),
        ({"attack.kind": "scaling", "attack.factor": -1.0}, "attack.factor must be above 0, not -1.0; write for"),
        ({"attack.kind": "a-little", "attack.z": -1.0}, "attack.z must be 0 or more, not -1.0"),
        ({"attack.kind": "label-flip", "attack.factor": 2.0}, "label-flip|attack has no key 'factor'|unknown key"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        resolve("fedavg", "digits", settings)
    assert "\n" not in str(error.value)


def test_what_cannot_be_attacked_is_refused():
    experiment = resolve("fedavg", "digits", {"attack.kind": "a-little", "engine.chunk": 2})
    with pytest.raises(ConfigError, match="uses the updates of the whole cohort"):
        make_simulation(experiment.engine, build_job(experiment))
    with pytest.raises(ConfigError, match="an attack is for simulations"):
        deployable(experiment)
    with pytest.raises(ConfigError, match="an attack changes updates, and upload = 'weights'"):
        job_with(SignFlip(), tw.Method(upload="weights"))
    task = digits_task(sizes=SIZES)
    with pytest.raises(ConfigError, match="needs class labels"):
        poisoned(replace(task, train=replace(task.train, targets=task.train.targets.float())), LabelFlip(), Key(0))
