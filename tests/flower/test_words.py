"""What clients say in words: shown on one line, escaped and bounded, in every log."""

from __future__ import annotations

import pytest

from tests.flower.test_loop import experiment
from thinwire.deployment.apps import write_log
from thinwire.experiments.build import build_job
from thinwire.flower.client import Client
from thinwire.flower.client_store import Answer
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.server import FlowerServer
from thinwire.flower.transport import Heard, InMemory

HOSTILE = ["\x1b[2J\x1b[31mall is well", "one\nround 9: refused client 3: it lies", "x" * 10**6, "\u202e\ud800\0"]


class Talking(InMemory):
    """Client 0 answers with words only."""

    said = ""

    def ask(self, asks, seconds):
        for heard in super().ask(asks, seconds):
            yield Heard(0, Answer(b"", error=self.said)) if heard.client == 0 else heard


@pytest.mark.parametrize("said", HOSTILE, ids=["escape codes", "two lines", "a megabyte", "not UTF-8"])
def test_words_of_a_client_are_one_short_line_of_the_log(said):
    chosen = experiment("fedavg", **{"cohort.size": 4})
    job = build_job(chosen)
    transport = Talking(Client(chosen.engine, job))
    transport.said = said
    lines: list[str] = []
    served = FlowerServer(chosen.engine, job, lambda *_: transport, RoundPolicy(seconds=0.01, quorum=0.5), lines.append)
    _, record = served.round(served.start())
    assert (record.refused, record.clients) == (1, 3)
    (line,) = lines
    assert line.startswith("round 1: refused client 0: it could not answer: ")
    assert line.isprintable()
    assert len(line) < 400


@pytest.mark.parametrize("said", HOSTILE)
def test_a_line_of_the_servers_log_is_one_line(said, tmp_path, capsys):
    write_log(tmp_path, said)
    assert not (tmp_path / "server.log").exists(), "there is no run directory yet"
    (tmp_path / "config.toml").write_text("")
    write_log(tmp_path, said)
    write_log(tmp_path, "next")
    first, second = (tmp_path / "server.log").read_text().splitlines()
    assert first.isprintable()
    assert len(first) < 2100
    assert second.endswith(" next")
    assert len(capsys.readouterr().out.splitlines()) == 3
