"""Error messages of clients are one escaped line of limited length in every log."""

from __future__ import annotations

import pytest

from tests.flower.in_memory import FlowerServer, InMemory
from tests.flower.test_server import experiment
from thinwire.flower.apps import write_log
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.protocol.round import Response
from thinwire.runs.build import build_job

HOSTILE = ["\x1b[2J\x1b[31mall clear", "one\nround 9: refused client 3: it is malicious", "x" * 10**6, "\u202e\ud800\0"]


class Failing(InMemory):
    """Client 0 responds with an error message."""

    error = ""

    def receive(self, clients, deadline):
        for client, response in super().receive(clients, deadline):
            yield client, Response(b"", error=self.error) if client == 0 else response


@pytest.mark.parametrize("error", HOSTILE, ids=["escape codes", "two lines", "a megabyte", "not UTF-8"])
def test_an_error_message_of_a_client_is_one_short_line_of_the_log(error):
    chosen = experiment("fedavg", **{"cohort.size": 4})
    job = build_job(chosen)
    transport = Failing(Client(chosen.engine, job))
    transport.error = error
    lines: list[str] = []
    server = FlowerServer(chosen.engine, job, transport, RoundPolicy(seconds=0.01, quorum=0.5), lines.append)
    _, record = server.round(server.start())
    assert (record.refused, record.clients) == (1, 3)
    (line,) = lines
    assert line.startswith("round 1: refused client 0: it could not respond: ")
    assert line.isprintable()
    assert len(line) < 400


@pytest.mark.parametrize("error", HOSTILE)
def test_a_line_of_server_log_is_one_line(error, tmp_path, capsys):
    write_log(tmp_path, error)
    assert not (tmp_path / "server.log").exists(), "without a run directory nothing is written"
    (tmp_path / "config.toml").write_text("")
    write_log(tmp_path, error)
    write_log(tmp_path, "next")
    first, second = (tmp_path / "server.log").read_text().splitlines()
    assert first.isprintable()
    assert len(first) < 2100
    assert second.endswith(" next")
    assert len(capsys.readouterr().out.splitlines()) == 3
