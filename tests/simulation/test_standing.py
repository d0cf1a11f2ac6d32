"""Clients that are refused in a simulation: isolation, the warning, the page; the suite of lies."""

import dataclasses
import warnings

import pytest
import torch

from benchmarks import lies
from tests.federation import digits_task
from thinwire.federation.attacks import Attack, SignFlip
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.federation.standing import Standing
from thinwire.protocol import Method
from thinwire.protocol.method import Asynchronous
from thinwire.reports.report import report
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.records import read_run
from thinwire.training import Local


@dataclasses.dataclass(frozen=True, kw_only=True)
class SendNaN(Attack):
    """Send NaN."""

    def updates(self, own, honest, key):
        return torch.full_like(own, torch.nan)


def rounds_of(method=None, attack=None, rounds=6, cohort=6):
    job = Job(digits_task(sizes=(24,) * 6), method or Method(), rounds, cohort, Local(batch=8, steps=2), attack=attack)
    simulation = make_simulation(Engine("cpu", "loop"), job)
    state = simulation.start()
    for _ in range(rounds):
        state, record = simulation.round(state)
        yield state, record


@pytest.mark.parametrize(("method", "cohort"), [(Method(), 6), (Method(asynchronous=Asynchronous(1.5)), 3)])
def test_an_attack_that_sends_nan_is_refused_and_then_left_out(method, cohort):
    *_, (state, last) = found = list(rounds_of(method, SendNaN(fraction=0.1), 16 if cohort == 3 else 6, cohort))
    records = [record for _, record in found]
    refused = [record for record in records if record.refused]
    assert len(refused) == 3
    assert "refused: client" in next(iter(refused[0].why.values()))
    assert last.left_out == 1
    assert "left out: until round" in next(iter(last.why.values()))
    assert all(torch.isfinite(block).all() for block in state.server.public.coords.values())


def test_a_reversed_update_loses_standing():
    records = [record for _, record in rounds_of(attack=SignFlip(fraction=0.1, factor=10.0))]
    assert [one.bounded for one in records] == [1, 1, 1, 0, 0, 0]
    assert [one.left_out for one in records] == [0, 0, 0, 1, 1, 1]
    assert [one.clients for one in records] == [6, 6, 6, 5, 5, 5]


def test_an_honest_run_has_no_standing():
    *_, (state, _) = rounds_of()
    assert state.standing == Standing()
    assert len(state.recent.medians) >= 3, "a simulation remembers medians as a server does"


def test_a_refusal_without_attackers_is_one_warning_and_on_the_page(tmp_path, monkeypatch):
    from thinwire.federation.simulated import SimulatedClients

    usable = SimulatedClients.usable
    monkeypatch.setattr(
        SimulatedClients,
        "usable",
        lambda self, got, reply: (
            "it sent a value that is not finite" if reply.client == 2 else usable(self, got, reply)
        ),
    )
    small = {"task.clients": 4, "cohort.size": 4, "rounds": 5, "local.epochs": 1, "checkpoint.every": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        execute(resolve("fedavg", "digits", small), tmp_path / "run")
    (told,) = [str(one.message) for one in caught if "client 2" in str(one.message)]
    assert told.startswith("client 2 is not used in 1 round (round 1, refused: it sent a value that is not finite)")
    records = read_run(tmp_path / "run").records
    assert [(one["refused"], one["left_out"]) for one in records] == [(1, 0), (1, 0), (1, 0), (0, 1), (0, 1)]
    report([tmp_path / "run"], tmp_path / "page.html", tmp_path / "page.md")
    assert "client 2 is not used in 5 rounds (round 1, refused: it sent" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("lie", ["NaN", "sign x10", "x-9.9, weight x999", "reports x-10", "buffers 1e30", "stale"])
def test_lies(lie):
    """Of one client in eight, for few rounds: named, no honest client refused, no run stopped."""
    method = "scaffold" if "report" in lie else "fedavg"
    found = lies.run(method, "weighted", lie, 1, rounds=6)
    assert found.told
    assert (found.error, found.honest) == ("", ())
    assert found.liars >= 5
    plain = lies.run(method, "weighted", " (buffers)" if "buffers" in lie else "", 0, rounds=6)
    assert found.accuracy > plain.accuracy - 0.12
