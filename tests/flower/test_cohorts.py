"""Cohorts from clients that are there, and rounds that do not wait for the slowest."""

from __future__ import annotations

import json

import pytest

from tests.federation import same_public
from tests.flower.in_memory import FlowerServer
from tests.flower.replay import replay
from tests.flower.test_faults import check_correction_states
from tests.flower.test_server import experiment, play
from tests.flower.timed import Timed
from thinwire.errors import ConfigError, WireError
from thinwire.federation.simulation import make_simulation
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.runs.build import build_job
from thinwire.runs.deployment_records import CohortLog
from thinwire.runs.execute import execute

TEN = {"task.clients": 10, "cohort.size": 4, "local.steps": 1}


def federation(policy: RoundPolicy, method="fedavg", record=None, transport=None, overrides=TEN, **timed):
    chosen = experiment(method, **overrides)
    job = build_job(chosen)
    transport = transport or Timed(Client(chosen.engine, job), **timed)
    lines: list[str] = []
    server = FlowerServer(
        chosen.engine, job, transport, policy, lines.append, record or CohortLog(), clock=transport.clock
    )
    return server, transport, lines


@pytest.mark.parametrize(("clients", "size"), [(10, 4), (10, 10), (40, 3)])
def test_the_order_of_a_round_starts_with_its_cohort_and_has_all_clients(clients, size):
    server, _, _ = federation(RoundPolicy(), overrides={**TEN, "task.clients": clients, "cohort.size": size})
    sampler = server.sampler
    for number in range(3):
        order = sampler.order(number)
        assert order[:size] == sampler.cohort(number)
        assert sorted(order) == list(range(clients))
    assert clients == size or sampler.order(0)[size:] != sampler.order(1)[size:]


def test_forty_rounds_with_most_sites_offline_and_one_slow():
    """Five of ten are offline from the start, two more from round 5, listed for three rounds longer; one takes 25 s."""
    done = [0]

    def offline():
        return frozenset(range(5)) | (frozenset({5, 6}) if done[0] >= 4 else frozenset())

    def listed():
        return frozenset(range(10)) - (frozenset(range(5)) if done[0] < 7 else offline())

    policy = RoundPolicy(seconds=60.0, quorum=0.5, grace=3.0, wait=30.0)
    server, transport, lines = federation(
        policy, overrides={**TEN, "rounds": 40}, offline=offline, listed=listed, seconds={9: 25.0}
    )
    state, waits, late = server.start(), [], 0
    for _ in range(40):
        state, record = server.round(state)
        done[0], late = done[0] + 1, late + record.late
        assert not frozenset(transport.asked[-1]) & frozenset(range(5))
        quorum = sorted(transport.arrivals)[1][0]
        waits.append(transport.ended - quorum)
    assert state.round == len(transport.asked) == 40, "no round was asked twice"
    assert max(waits) == pytest.approx(3.0)
    asked = sum(9 in one for one in transport.asked)
    assert 0 < asked < 12, "a client that still works is not asked again"
    assert sum("responded to a round that is closed" in line for line in lines) >= asked - 1
    assert late > asked
    assert all(len(one.accepted) >= 2 for one in server.clients.record.rounds.values())


def test_everyone_there_gives_the_cohorts_of_the_simulation():
    server, _, _ = federation(RoundPolicy(quorum=1.0, grace=3.0))
    simulated = make_simulation(server.engine, server.job)
    (ours, records, messages), (theirs, their_records, their_messages) = play(server, 3), play(simulated, 3)
    assert same_public(ours.server.public, theirs.server.public)
    assert sorted(messages) == sorted(their_messages)
    assert records == their_records


def test_a_late_upload_is_not_used_and_its_client_returns_to_the_state_before():
    server, transport, lines = federation(
        RoundPolicy(seconds=60.0, grace=3.0), "scaffold", overrides={**TEN, "task.clients": 4}, seconds={1: 5.0}
    )
    state, records, _ = play(server, 6)
    assert [record.late for record in records[:2]] == [1, 0]
    assert [record.absent for record in records[:2]] == [0, 1], "it still works, so its place is empty"
    assert any("client 1 responded to a round that is closed" in line for line in lines)
    assert all(record.clients == 3 for record in records)
    check_correction_states(server, transport, state)


def test_over_selection_closes_at_the_size_of_the_cohort():
    slow = {i: float(i + 1) for i in range(10)}
    server, transport, _ = federation(RoundPolicy(seconds=60.0, over_select=0.5), seconds=slow)
    _, record = server.round(server.start())
    assert len(transport.asked[0]) == 6
    assert (record.clients, record.late, record.absent) == (4, 2, 0)
    (one,) = server.clients.record.rounds.values()
    assert set(one.accepted) == set(sorted(one.cohort)[:4])
    assert transport.ended == sorted(one.cohort)[3] + 1


def test_others_take_the_places_of_clients_that_do_not_respond():
    server, transport, lines = federation(
        RoundPolicy(seconds=10.0, quorum=1.0), offline=lambda: frozenset(range(6)), listed=lambda: frozenset(range(10))
    )
    state, record = server.round(server.start())
    assert len(transport.asked) > 1
    assert sorted(server.clients.record.rounds[1].accepted) == [6, 7, 8, 9]
    assert any("take part in place of clients that did not respond" in line for line in lines)
    assert record.absent + record.late == len(server.clients.record.rounds[1].cohort) - 4
    assert state.round == 1


def test_a_run_without_enough_clients_stops_and_can_be_resumed():
    there = [frozenset({7})]
    server, _, _ = federation(RoundPolicy(seconds=5.0, wait=5.0), listed=lambda: there[0])
    with pytest.raises(WireError, match=r"round 1: 1 of 1 clients .* 2 are needed"):
        server.round(server.start())
    there[0] = frozenset({2, 7, 8})
    state, record = server.round(server.start())
    assert (state.round, record.clients, record.absent) == (1, 3, 1)


def test_clients_that_join_while_a_round_has_too_few_are_asked():
    server, transport, _ = federation(
        RoundPolicy(seconds=5.0, wait=0.0), listed=lambda: frozenset({7} if transport.clock.now < 6 else {2, 7, 8})
    )
    state, record = server.round(server.start())
    assert (state.round, record.clients, record.absent) == (1, 3, 1)
    assert [set(one) for one in transport.asked] == [{7}, {2, 8}]


def test_a_first_round_with_a_roster_waits_for_its_sites_only():
    there = [frozenset({1, 2, 5})]
    server, transport, lines = federation(RoundPolicy(wait=30.0), listed=lambda: there[0])
    transport.known = lambda: {1, 2, 5}
    server.round(server.start())
    assert transport.began == 0
    assert not lines
    there[0] = frozenset({1, 2})
    server, transport, lines = federation(RoundPolicy(wait=30.0), listed=lambda: there[0])
    transport.known = lambda: {1, 2, 5}
    server.round(server.start())
    assert transport.began == 30
    awaited = "waiting for client 5: 2 clients are there, 3 are wanted"
    there = "round 1: 2 of 3 clients are there after 30 seconds"
    assert lines == [awaited, there, "round 1: without client 5 (not connected)"]


def test_sites_join_and_leave_between_rounds():
    there = [frozenset({0, 1})]
    server, transport, _ = federation(RoundPolicy(seconds=5.0, wait=5.0), listed=lambda: there[0])
    state = server.start()
    for there[0] in (frozenset({0, 1}), frozenset(range(3, 9)), frozenset({2, 9, 4})):
        state, _ = server.round(state)
        assert set(transport.asked[-1]) <= there[0]
        assert len(transport.asked[-1]) == min(4, len(there[0]))


def test_within_a_window_the_cohort_is_kept_and_the_missing_are_replaced():
    there = [frozenset(range(10))]
    server, transport, _ = federation(RoundPolicy(seconds=5.0), "fedlama", listed=lambda: there[0])
    state, _ = server.round(server.start())
    first = set(transport.asked[0])
    there[0] = frozenset(range(10)) - {min(first)}
    state, _ = server.round(state)
    assert set(transport.asked[1]) == first - {min(first)}
    there[0] = frozenset(range(10)) - first
    state, _ = server.round(state)
    assert not set(transport.asked[2]) & first
    assert len(transport.asked[2]) == 4


# -- cohorts.jsonl -----------------------------------------------------------------------------------------------------


def test_a_resumed_round_has_its_recorded_cohort_while_that_comes_back(tmp_path):
    there = [frozenset({1, 3, 5, 7, 9})]
    policy = RoundPolicy(seconds=20.0, wait=10.0)

    def restarted(transport=None):
        return federation(policy, record=CohortLog(tmp_path), transport=transport, listed=lambda: there[0])

    server, transport, _ = restarted()
    state, _ = server.round(server.start())
    server.round(state)  # killed before its checkpoint
    (cohort,) = [one.cohort for number, one in CohortLog(tmp_path).rounds.items() if number == 2]
    there[0] = frozenset(range(10))
    again, _, lines = restarted(transport)
    again.round(state)
    assert transport.asked[-1] == cohort
    assert not lines
    there[0] = frozenset(range(10)) - {cohort[0]}
    again, _, lines = restarted(transport)
    after, _ = again.round(state)
    assert cohort[0] not in transport.asked[-1]
    assert f"round 2: drawn again without client {cohort[0]}, not back in 10 seconds" in lines
    assert CohortLog(tmp_path).rounds[2].cohort == transport.asked[-1]
    assert after.round == 2


def test_cohorts_of_a_file_survive_an_incomplete_line(tmp_path):
    record = CohortLog(tmp_path)
    record.drawn(1, [0, 1, 2], [2, 0])
    record.closed(1, [0], [2])
    file = tmp_path / "cohorts.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"round": 2, "avail')
    again = CohortLog(tmp_path)
    assert again.rounds == record.rounds
    again.drawn(2, [1], [1])
    assert file.read_bytes().startswith(whole)
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()] == [1, 1, 2]
    again.drawn(1, [0], [0])  # the run went back
    assert list(CohortLog(tmp_path).rounds) == [1]


@pytest.mark.parametrize(
    "line", [b"[]\n", b'{"round": -1}\n', b'{"round": 1, "cohort": ["x"], "available": []}\n', b"\xff\n"]
)
def test_lines_that_are_not_valid_are_left_out(line, tmp_path):
    (tmp_path / "cohorts.jsonl").write_bytes(line)
    assert not CohortLog(tmp_path).rounds


# -- replay ------------------------------------------------------------------------------------------------------------


def deployed(folder, method: str):
    """A finished run in which cohorts are not those of the seed."""
    chosen = experiment(method, **{**TEN, "rounds": 6})
    policy = RoundPolicy(seconds=60.0, grace=3.0, wait=5.0)

    def prepare():
        slow = {9: 25.0, 8: 4.5}
        return federation(
            policy,
            method,
            CohortLog(folder),
            overrides={**TEN, "rounds": 6},
            seconds=slow,
            offline=lambda: frozenset({0, 1, 2}),
        )[0]

    execute(chosen, folder, prepare=prepare)


@pytest.mark.parametrize("method", ["scaffold", "mapo", "fedlama"])
def test_a_replay_has_the_weights_of_the_deployment(method, tmp_path):
    deployed(tmp_path / "run", method)
    late = [one.late for one in CohortLog(tmp_path / "run").rounds.values()]
    assert any(late)
    assert replay(tmp_path / "run")


def test_a_replay_with_other_cohorts_differs(tmp_path):
    run = tmp_path / "run"
    deployed(run, "fedavg")
    assert replay(run)
    file = run / "cohorts.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[3]["accepted"] = [0]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not replay(run)


@pytest.mark.parametrize("given", [{"grace": "soon"}, {"over-select": -1}, {"wait": -1.0}, {"tries": "x"}])
def test_invalid_run_configurations_are_an_error(given):
    with pytest.raises(ConfigError, match="must be"):
        RoundPolicy.of(given)
