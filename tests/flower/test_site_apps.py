"""A run with a roster: Flower's messages and contexts, real keys, in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from flwr import app as flwr

from tests.flower.test_flower_apps import DirectGrid, identity, lines, serve  # noqa: F401 - a fixture
from thinwire.errors import ConfigError
from thinwire.flower.apps import client_app, deployable, job_of, server_app
from thinwire.flower.sites import KEY_VARIABLE, Roster
from thinwire.runs.config import resolve
from thinwire.runs.deployment_records import read_sites
from thinwire.runs.execute import execute
from thinwire.secure.keys import make_key, read_public_key

SMALL = {"task.clients": 3, "cohort.size": 3, "local.steps": 1, "rounds": 4}


@pytest.fixture
def sites(tmp_path):
    """The private keys of three sites and of a stranger, and the roster's file."""
    keys = {name: str(make_key(tmp_path / name)) for name in ("north", "south", "east", "stranger")}
    roster = Roster()
    for name in ("north", "south", "east"):
        roster = roster.add(name, read_public_key(tmp_path / f"{name}.pub"))
    roster.write(tmp_path / "roster.toml")
    return keys


def run(tmp_path, configs, events=None, **config):
    """Run an experiment with these nodes; events are called before a round with the grid."""
    experiment = deployable(resolve("scaffold", "digits", SMALL))

    def job(node_config):
        return job_of(experiment, node_config)

    def on_message(number, *_):
        if number in (events or {}):
            events.pop(number)(grid)

    grid = DirectGrid(client_app(job), configs)
    app = server_app(experiment, job, on_message)
    settings = {"roster": str(tmp_path / "roster.toml"), "seconds": 5.0, "quorum": 0.3, **config}
    serve(app, grid, tmp_path / "run", **settings)
    return experiment


def test_run_of_sites_equals_the_simulation_and_impostors_are_named_on_both_sides(sites, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, sites["east"])  # as `thinwire site start` sets it
    configs = {
        1: {"site": "north", "site-key": sites["stranger"]},
        2: {"site": "north", "site-key": sites["north"]},
        3: {"site": "south", "site-key": sites["south"]},
        4: {"site": "east"},
        5: {"site": "east"},  # the same key twice
        6: {"partition-id": 0, "num-partitions": 1},  # claims all clients
        7: {"site": "west", "site-key": sites["stranger"]},
        8: {"site": "south", "site-key": str(tmp_path / "nowhere")},
    }
    experiment = run(tmp_path, configs)
    execute(experiment, tmp_path / "simulated")
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "simulated/model.safetensors").read_bytes()
    assert lines(tmp_path / "run") == lines(tmp_path / "simulated")
    printed = capsys.readouterr().out.splitlines()
    refusals = {
        "node 1 is not used": "its key is not that of site 'north' on the roster",
        "site east (node 5) is not used": "site east is already connected as node 4; stop one of the two",
        "node 6 is not used": "it names no site, and the server has a roster",
        "node 7 is not used": "site 'west' is not on the roster",
    }
    for who, why in refusals.items():
        (line,) = [line for line in printed if line.startswith(f"{who}: {why}")]
        reason = line.removeprefix(f"{who}: ")
        assert printed.count(f"thinwire: the server does not use this node: {reason}") == 1
    cannot = "nowhere cannot be read: No such file or directory"
    assert len([line for line in printed if line.startswith("node 8 could not report") and cannot in line]) == 1
    assert [line for line in printed if line.startswith("thinwire: this node cannot take part") and cannot in line]
    log = (tmp_path / "run/server.log").read_text()
    assert all(who in log for who in refusals)
    assert "site north joined (node 2): client 0" in log
    assert {one.site for one in read_sites(tmp_path / "run")} == {"north", "south", "east"}
    for words in ("connected, introduced as site south; 1,", "client 0 trained version 3: "):
        assert len([line for line in printed if line.startswith(f"thinwire: {words}")]) == 1


def test_an_absent_site_is_named_in_log_record_and_metrics(sites, tmp_path, thinwire):
    configs = {i: {"site": name, "site-key": sites[name]} for i, name in enumerate(("north", "south"), 1)}
    run(tmp_path, configs, wait=3.0)
    log = (tmp_path / "run/server.log").read_text()
    assert log.count("waiting for site east: 2 clients are there, 3 are wanted") == 1
    assert log.count("round 1: without site east (not connected)") == log.count("without site east") == 1
    rows = [one for one in read_sites(tmp_path / "run") if one.site == "east"]
    assert [(one.round, one.status, one.why) for one in rows] == [(i, "absent", "not connected") for i in range(1, 5)]
    assert thinwire("watch", str(tmp_path / "run"), "--once", "--prometheus", str(tmp_path / "p"))[0] == 0
    text = (tmp_path / "p").read_text()
    for site, connected in (("north", 1.0), ("east", 0.0)):
        assert f'thinwire_site_connected{{run="{tmp_path}/run",site="{site}"}} {connected}\n' in text


def test_site_is_revoked_and_another_joins_in_mid_run(sites, tmp_path, capsys):
    file = tmp_path / "roster.toml"
    configs = {i: {"site": name, "site-key": sites[name]} for i, name in enumerate(("north", "south", "east"), 1)}

    def revoke(grid):
        Roster.read(file).revoke("south").write(file)

    def add(grid):
        Roster.read(file).add("west", read_public_key(tmp_path / "stranger.pub")).write(file)
        config = {"site": "west", "site-key": sites["stranger"]}
        state = flwr.RecordDict()
        grid.contexts[9] = flwr.Context(run_id=1, node_id=9, node_config=config, state=state, run_config={})

    run(tmp_path, configs, {1: revoke, 2: add})
    assert [(row["clients"], row["absent"]) for row in lines(tmp_path / "run")] == [(3, 0), (2, 1), (3, 0), (3, 0)]
    printed = capsys.readouterr().out.splitlines()
    assert "thinwire: the server does not use this node: site 'south' was revoked" in printed
    for line in ("roster: site south was revoked or removed", "roster: site west was added"):
        assert printed.count(line) == 1
    assert "site west joined (node 9): client 1" in printed


def test_response_of_a_site_that_was_revoked_meanwhile_is_not_used(sites, tmp_path, capsys):
    file = tmp_path / "roster.toml"
    configs = {i: {"site": name, "site-key": sites[name]} for i, name in enumerate(("north", "south", "east"), 1)}

    class Slow(DirectGrid):
        """The roster is changed after the first request was answered."""

        def pull_messages(self, names):
            replies = super().pull_messages(names)
            if any(reply.metadata.message_type == "train" for reply in replies) and 1 in Roster.read(file).by_client:
                Roster.read(file).revoke("south").write(file)
            return replies

    experiment = deployable(resolve("fedavg", "digits", {**SMALL, "rounds": 1}))

    def job(node_config):
        return job_of(experiment, node_config)

    settings = {"roster": str(file), "seconds": 5.0, "quorum": 0.3}
    serve(server_app(experiment, job), Slow(client_app(job), configs), tmp_path / "run", **settings)
    assert lines(tmp_path / "run")[0]["clients"] == 2
    assert "site south: ignored a response of node 2, which is no longer used" in capsys.readouterr().out


def test_site_without_a_roster_on_the_server_says_what_to_write(sites, tmp_path, capsys):
    configs = {
        1: {"site": "north", "site-key": sites["north"]},
        2: {"partition-id": 1, "num-partitions": 3},
        3: {"site": "east", "partition-id": 2, "num-partitions": 3},  # as for a server with one
    }
    run(tmp_path, configs, roster="", seconds=0.5)
    assert [row["clients"] for row in lines(tmp_path / "run")] == [2] * 4
    printed = capsys.readouterr().out
    assert (
        "node 1 could not report its clients: ConfigError: --node-config names site 'north', but the server" in printed
    )
    assert "thinwire: this node cannot take part: --node-config names site 'north'" in printed


def test_missing_roster_ends_the_run_before_it_starts(tmp_path, capsys):
    with pytest.raises(ConfigError, match="cannot be read"):
        run(tmp_path, {1: {}})
    assert "thinwire failed: " in capsys.readouterr().out
