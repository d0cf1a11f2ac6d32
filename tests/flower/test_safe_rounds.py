"""Hostile clients of a server with a run directory: bounds from the latest rounds, going back, records of sites."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from benchmarks.faults import hostile
from tests.flower.in_memory import FlowerServer, InMemory
from thinwire.errors import CheckpointError
from thinwire.flower.apps import deployable
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.reports.report import report
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.runs.deployment_records import append_sites, read_sites
from thinwire.runs.execute import execute
from thinwire.runs.records import read_run, rounds_in
from thinwire.runs.retry import read_retries, roll_back
from thinwire.wire import message as wire

QUICK = {"task.clients": 8, "cohort.size": 8, "task.partition.kind": "iid", "local.steps": 8, "rounds": 6}
QUICK |= {"local.batch": 32, "eval.every": 3}


class Hostile(InMemory):
    """Clients of which some are hostile: an attack by client, and the rounds in which it happens."""

    def __init__(self, client, attacks, rounds=range(1000)) -> None:
        super().__init__(client)
        self.attacks, self.rounds, self.asked = attacks, rounds, []

    def receive(self, clients, deadline):
        for number, one in super().receive(clients, deadline):
            version = wire.unpack(one.data, self.client.contract.schema.sent_by(number)).version
            self.asked.append((version, number))
            if number in self.attacks and version in self.rounds and one.data:
                one = self.attacks[number](self.client, number, one)
            yield number, one


def experiment(**more):
    return deployable(resolve("fedavg", "digits", {**QUICK, **more}))


def run(path: Path, attacks, when=range(1000), resume=False, **more):
    """A run with hostile clients: its summary, the lines of its log, and the transport."""
    chosen, lines, transports = experiment(**more), [], []

    def prepare():
        job = build_job(chosen)
        transports.append(Hostile(Client(chosen.engine, job), attacks, when))
        sites = partial(append_sites, path)
        policy = RoundPolicy(0.01, quorum=0.2, tries=1)
        return FlowerServer(chosen.engine, job, transports[0], policy, lines.append, on_sites=sites, goes_back=True)

    summary = execute(chosen, path, prepare=prepare, resume=resume)
    return summary, lines, transports[0]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return run(tmp_path_factory.mktemp("honest") / "run", {})[0]


def test_a_run_with_five_hostile_clients_of_eight_ends_as_the_honest_one(honest, tmp_path):
    """In every round; replies of 400 MB are refused before they reach the server, see tests/flower."""
    attacks = {
        1: partial(hostile.scaled, -1e6),
        2: hostile.largest,
        4: hostile.infinite_loss,
        5: hostile.long_error,
        7: partial(hostile.scaled, -1e6),
    }
    summary, lines, _ = run(tmp_path / "run", attacks)
    assert abs(summary["final_accuracy"] - honest["final_accuracy"]) < 0.02
    for number in range(1, 7):
        for client in attacks:
            named = [
                line for line in lines if line.startswith(f"round {number}: refused ") and f"client {client}" in line
            ]
            (found,) = [one for one in read_sites(tmp_path / "run") if (one.round, one.client) == (number, client)]
            assert (found.status, len(named)) in [("refused", 1), ("left out", 0)], (number, client, named)
            assert found.why
            assert found.status == "refused" or number > 3
    assert max(map(len, lines)) < 600
    assert all(line.isprintable() for line in lines)
    assert (tmp_path / "run/sites.jsonl").stat().st_size < 48 * 600


def test_a_hostile_client_alone_in_its_cohort_is_left_out(tmp_path):
    """There is no median in a cohort of one: the latest rounds decide."""
    settings = {"task.clients": 4, "cohort.size": 1, "rounds": 12}
    plain = run(tmp_path / "honest", {}, **settings)[0]
    summary, lines, transport = run(tmp_path / "run", {2: partial(hostile.scaled, -1e6)}, range(4, 100), **settings)
    assert abs(summary["final_accuracy"] - plain["final_accuracy"]) < 0.03
    (back,) = summary["retries"]
    assert (back["status"], back["left_out"]) == ("rolled back", [2])
    asked = [version for version, client in transport.asked if client == 2 and version >= 4]
    assert len(asked) == 1, "then it is left out"
    assert len([line for line in lines if "client 2" in line]) == 1
    assert [one["round"] for one in read_run(tmp_path / "run").records] == list(range(1, 13))
    assert summary["bytes_abandoned"] == back["bytes_abandoned"] > 0


BACK = {"task.clients": 4, "cohort.size": 3, "rounds": 9, "method.norm_bound": 10.0}


def far_off(path, **more):
    """Two clients send 300 times their update, reversed, in one round, which is scaled down, but not refused."""
    attack = partial(hostile.scaled, -300.0)
    return run(path, {0: attack, 1: attack, 2: attack}, range(5, 6), **{**BACK, **more})


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    path = tmp_path_factory.mktemp("back") / "run"
    return path, *far_off(path)


def test_a_state_that_is_not_fit_is_given_up(rolled_back):
    path, summary, lines, _ = rolled_back
    (back,) = summary["retries"]
    assert (back["round"], back["from_round"]) == (7, 5)
    assert back["left_out"]
    assert any("far above that of the latest rounds" in line and "goes back to round 5" in line for line in lines)
    losses = [one["loss"] for one in read_run(path).records]
    assert len(losses) == 9
    assert max(losses[5:]) < 3 * losses[4]
    sites = read_sites(path)
    assert {one.attempt for one in sites} == {0, 1}
    abandoned = [one for one in sites if one.round == 6 and one.attempt == 0]
    assert any(one.norm > 100 * losses[0] or one.status == "bounded" for one in abandoned)
    again = [one.client for one in sites if one.attempt == 1 and one.status != "left out"]
    assert not set(again) & set(back["left_out"])


@pytest.mark.parametrize("number", [4, 6])
def test_a_server_killed_around_a_rollback_resumes_with_the_same_bits(rolled_back, tmp_path, number):
    path, _, _, _ = rolled_back

    def stop(record) -> None:
        if record.round == number:
            raise KeyboardInterrupt

    chosen, lines = experiment(**BACK), []
    transport = Hostile(
        Client(chosen.engine, build_job(chosen)),
        dict.fromkeys((0, 1, 2), partial(hostile.scaled, -300.0)),
        range(5, 6),
    )

    def prepare():
        policy, sites = RoundPolicy(0.01, quorum=0.2, tries=1), partial(append_sites, tmp_path)
        job = transport.client.job
        return FlowerServer(chosen.engine, job, transport, policy, lines.append, on_sites=sites, goes_back=True)

    with pytest.raises(KeyboardInterrupt):
        execute(chosen, tmp_path, prepare=prepare, on_round=stop)
    execute(chosen, tmp_path, prepare=prepare, resume=True)
    assert (tmp_path / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    ours, theirs = ([one._replace(seconds=None) for one in read_sites(where)] for where in (tmp_path, path))
    assert ours == theirs
    assert read_retries(tmp_path) == read_retries(path)


def test_the_page_names_what_was_rolled_back(rolled_back, tmp_path):
    path, *_ = rolled_back
    report([path], tmp_path / "page.html", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "rolled back: back to round 5 without clients" in text


def test_going_back_by_hand(rolled_back, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(rolled_back[0], path)
    for number, words in ((12, "no checkpoint of round 12; it has 1"), (9, "nothing")):
        with pytest.raises(CheckpointError, match=words):
            roll_back(path, number)
    assert (path / "summary.json").is_file(), "nothing was changed"
    assert rounds_in(path / "checkpoints") == list(range(1, 10)), "a deployment keeps ten"
    before = read_run(path)
    found = roll_back(path, 3)
    lost = sum(one["bytes_up"] + one["bytes_down"] + one["bytes_catchup"] for one in before.records[3:])
    assert (found.from_round, found.round - found.from_round, found.bytes_abandoned) == (3, 6, lost)
    assert rounds_in(path / "checkpoints") == [1, 2, 3]
    assert [one["round"] for one in read_run(path).records] == [1, 2, 3]
    summary, _, _ = run(path, {}, resume=True, **BACK)
    assert [one["round"] for one in read_run(path).records] == list(range(1, 10))
    assert [one["from_round"] for one in summary["retries"]] == [5, 3]
    assert summary["bytes_abandoned"] == before.totals["bytes_abandoned"] + lost
