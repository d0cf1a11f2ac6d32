"""Asynchronous rounds in a simulation: staleness, the simulated clock, checkpoints, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import thinwire as tw
from tests.federation import same_public
from thinwire.core.tree import add, scale
from thinwire.errors import CheckpointError, ConfigError, IncompatibleParts
from thinwire.federation.job import RunState
from thinwire.federation.simulation import make_simulation
from thinwire.protocol.round import Round
from thinwire.protocol.upload import decode_upload
from thinwire.runs.build import build_job
from thinwire.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.files import read_checked, with_checksum
from thinwire.runs.run_directory import RunFolder
from thinwire.schedules.base import Plan

SMALL = {"task.clients": 10, "cohort.size": 3, "local.steps": 1, "engine.backend": "loop"}
SLOW = {"speed.slow_fraction": 0.3, "speed.slow_factor": 5.0, "speed.spread": 0.4}


def simulation(method: str, **overrides):
    chosen = resolve(method, "digits", {**SMALL, **overrides})
    return make_simulation(chosen.engine, build_job(chosen))


def play(runner, rounds: int, state: RunState | None = None, on_message=None):
    """Some rounds: the state after each, and the records without their measured seconds."""
    states, records = [state or runner.start()], []
    for _ in range(rounds):
        state, record = runner.round(states[-1], on_message)
        states.append(state)
        records.append(record._replace(seconds=0.0))
    return states, records


def test_equal_speeds_and_no_concurrency_are_synchronous_rounds():
    ours, records = play(simulation("fedbuff", **{"method.asynchronous.concurrency": 1.0}), 4)
    theirs, their_records = play(simulation("fedavg"), 4)
    assert same_public(ours[-1].server.public, theirs[-1].server.public)
    assert [one.clock for one in records] == [1.0, 2.0, 3.0, 4.0]
    assert [one._replace(clock=None, staleness=None) for one in records] == their_records
    assert not ours[-1].waiting


def test_a_version_is_the_sum_of_the_first_uploads_weighted_by_staleness():
    runner = simulation("fedbuff", **SLOW)
    messages: dict[tuple[int, int], bytes] = {}
    states, records = play(
        runner, 8, on_message=lambda n, way, i, data: messages.update({(n, i): data}) if way == "up" else None
    )
    contract, stale = runner.contract, 0
    plan = Plan(contract.sendable.named)
    for number in range(1, 9):
        before, after = states[number - 1], states[number]
        waiting = {one.client: one for one in before.waiting}
        arrived = {i: data for (n, i), data in messages.items() if n == number}
        assert len(arrived) == 3
        total = scale(before.server.public.coords, 0.0)
        examples = {i: len(runner.job.task.clients.client(i)) for i in arrived}
        for i, data in arrived.items():
            version = waiting[i].version if i in waiting else number - 1
            code = decode_upload(contract, plan, version, i, data).code
            weight = examples[i] / sum(examples.values()) * (1 + number - 1 - version) ** -0.5
            total, stale = add(total, scale(code, weight)), max(stale, number - 1 - version)
        expected = add(before.server.public.coords, total)
        for name, block in after.server.public.coords.items():
            torch.testing.assert_close(block, expected[name], atol=1e-6, rtol=1e-5)
    assert stale >= 2
    assert max(one.staleness for one in records) > 0


def test_slow_clients_go_on_training_and_their_uploads_count_later():
    runner = simulation("fedbuff", **SLOW)
    states, records = play(runner, 12)
    slow, used = runner.clients.speeds.slow, Counter(i for state in states for i in state.cohort)
    assert len(slow) == 3
    assert any(used[i] for i in slow), "slow clients take part"
    assert sum(used[i] for i in slow) / 3 < sum(used[i] for i in range(10) if i not in slow) / 7
    for before, state, record in zip(states, states[1:], records, strict=False):
        training = [one.client for one in state.waiting]
        assert len(set(training)) == len(training) == 3, "six at a time, three of whom have arrived"
        assert not set(training) & set(state.cohort)
        assert state.clock == record.clock >= before.clock
        assert all(one.arrives >= state.clock for one in state.waiting)


def test_synchronous_rounds_take_as_long_as_their_slowest_client_and_their_bytes():
    links = {"speed.up_mbps": 1.0, "speed.down_mbps": 8.0, "speed.latency": 0.25}
    runner = simulation("fedavg", **SLOW, **links)
    states, records = play(runner, 3)
    speeds, version = runner.clients.speeds, 1
    got = runner.clients.open(Round.open(runner.contract, states[1].server), states[1])
    runner.clients.collect(got)
    down = {i: len(message) for i, message in got.downloads.items()}
    up = records[1].bytes_up // 3
    seconds = [speeds.seconds(i, version, down[i], up) for i in got.cohort]
    assert records[1].clock - records[0].clock == pytest.approx(max(seconds), abs=1e-3)
    alone = [speeds.seconds(i, version, 0, 0) for i in got.cohort]
    assert max(seconds) == pytest.approx(max(alone) + 8e-6 * up + 1e-6 * max(down.values()), rel=1e-3)
    assert play(simulation("fedavg"), 1)[1][0].clock is None, "without a speed there is no simulated clock"
    assert same_public(states[-1].server.public, play(simulation("fedavg"), 3)[0][-1].server.public)


def test_the_jitter_of_a_client_changes_with_the_version():
    speeds = simulation("fedavg", **{"speed.jitter": 0.5}).clients.speeds
    assert len({speeds.seconds(0, version, 0, 0) for version in range(5)}) == 5
    assert speeds.seconds(0, 1, 0, 0) == speeds.seconds(0, 1, 0, 0)


@pytest.mark.parametrize("method", ["fedbuff+ef+topk+int4", "fedbuff+fedper"])
def test_a_checkpoint_has_the_clients_that_train(method, tmp_path):
    runner = simulation(method, **SLOW)
    states, records = play(runner, 6)
    save_checkpoint(tmp_path, Checkpoint(states[3]), "x")
    loaded = load_checkpoint(tmp_path, "x").state
    assert loaded is not None
    assert [one[:4] for one in loaded.waiting] == [one[:4] for one in states[3].waiting]
    again, their_records = play(simulation(method, **SLOW), 3, loaded)
    assert same_public(again[-1].server.public, states[-1].server.public)
    assert their_records == records[3:]
    assert again[-1].clock == states[-1].clock


@pytest.fixture(scope="module")
def two_rounds():
    return play(simulation("fedbuff", **SLOW), 2)[0][-1]


@pytest.mark.parametrize("change", [{"client": 1.5}, {"version": -1}, {"arrives": None}, {"loss": float("inf")}])
def test_damaged_counts_of_clients_that_train_are_refused(change, two_rounds, tmp_path):
    save_checkpoint(tmp_path, Checkpoint(two_rounds), "x")
    assert load_checkpoint(tmp_path, "x").state.waiting
    file = tmp_path / "round-000002.json"
    meta = read_checked(file)
    waiting = meta["state"]["waiting"]
    meta["state"]["waiting"] = [{**waiting[0], **change}] if change else [waiting[0], waiting[0]]
    file.write_bytes(with_checksum(meta))
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path, "x")


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    chosen = resolve("fedbuff", "digits", {**SMALL, **SLOW, "rounds": 6, "checkpoint.every": 2})
    whole = execute(chosen, tmp_path / "whole")

    def stop(record):
        if record.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(chosen, tmp_path / "killed", on_round=stop)
    resumed = execute(chosen, tmp_path / "killed", resume=True)
    assert resumed["clock"] == whole["clock"] > 0
    one, other = (RunFolder.open(tmp_path / name).path / "model.safetensors" for name in ("whole", "killed"))
    assert one.read_bytes() == other.read_bytes()


def test_uploads_that_are_too_stale_are_not_used():
    records = play(simulation("fedbuff", **SLOW, **{"method.asynchronous.most_stale": 1}), 9)[1]
    assert max(one.staleness for one in records) <= 1
    assert sum(one.refused for one in records) > 0
    assert all(one.clients == 3 for one in records), "others take their place"
    assert max(one.bytes_up for one in records) > 3.5 * min(one.bytes_up for one in records) / 3, "their bytes count"


def test_fedbuff_needs_less_simulated_time_than_synchronous_rounds_with_a_tenth_of_slow_clients():
    """The command of the page on stragglers, with one seed."""
    overrides = {"task.clients": 20, "cohort.size": 5, "speed.slow_fraction": 0.1, "engine.backend": "vmap"}

    def seconds_to(method: str, target: float) -> float:
        runner = simulation(method, **overrides, seed=1, rounds=60)
        state = runner.start()
        for _ in range(60):
            state, record = runner.round(state)
            if record.accuracy >= target:
                return record.clock
        raise AssertionError(f"{method} did not reach {target}")

    assert seconds_to("fedbuff", 0.85) < 0.7 * seconds_to("fedavg", 0.85)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"method.asynchronous.concurrency": 0.5}, "0 .synchronous rounds. or 1 and more"),
        ({"method.asynchronous.exponent": -1.0}, "exponent must be 0"),
        ({"method.asynchronous.most_stale": -1}, "most_stale must be 0"),
        ({"cohort.size": 10}, "cohort below the number of clients, 10"),
        ({"engine.workers": 2}, "engine.workers = 0"),
        ({"speed.slow_fraction": 1.5}, "slow_fraction must be from 0 to 1"),
        ({"speed.slow_factor": 0.1}, "slow_factor must be 1 or more"),
        ({"speed.step_seconds": -1.0}, "step_seconds must be 0 or more"),
        ({"speed.spread": 9.0}, "from 0 to 5"),
        ({"speed.steps": 1.0}, "unknown key in speed 'steps'"),
        ({"method.secure_aggregation": True}, "masks cancel"),
        ({"method.upload": "weights"}, "upload = 'delta'"),
        ({"method.space": "mapo"}, "redraw_every = 0"),
        ({"method.sketch": "evofed"}, "identity sketch"),
        ({"method.schedule": "fedlama"}, "all-blocks"),
        ({"method.correction": "scaffold"}, "correction = 'none'"),
        ({"method.mask": "topk"}, "mask = 'none'"),
        ({"method.privacy": {"kind": "dp", "clip": 1.0, "sigma": 1.0}}, "privacy = 'none'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(overrides, words):
    with pytest.raises((ConfigError, IncompatibleParts), match=words) as caught:
        simulation("fedbuff", **overrides)
    assert "\n" not in str(caught.value)


def test_an_experiment_without_speed_has_the_table_of_before():
    table = tw.runs.config.to_table(resolve("fedavg", "digits"))
    assert "speed" not in table
    assert "asynchronous" not in table["method"]
    timed = resolve("fedbuff", "digits", {"speed.slow_fraction": 0.1})
    assert tw.runs.config.from_table(tw.runs.config.to_table(timed)) == timed


def test_the_speed_of_a_simulation_in_python(tmp_path):
    clients = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(6)]
    run = tw.simulate(
        torch.nn.Linear(4, 2),
        clients,
        tw.methods.fedbuff(),
        rounds=3,
        cohort=2,
        speed=tw.Speed(slow_fraction=0.5, step_seconds=0.5),
        test=clients[0],
        out=tmp_path / "run",
    )
    assert run.history[-1].clock == run.summary["clock"] > 0
    assert tw.load_run(tmp_path / "run").history == run.history
