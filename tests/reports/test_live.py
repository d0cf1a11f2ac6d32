"""The live page, metrics and health of a run over HTTP: complete, escaped, read-only."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.browser import CHROMIUM, chromium, open_page
from thinwire.errors import ConfigError
from thinwire.experiments.lock import note_process
from thinwire.reports.live import health, live_page, metrics_text, newest_by_site
from thinwire.reports.live_server import live_server

SAMPLE = re.compile(r'[a-z_]+(?:\{[a-z]+="(?:[^"\\\n]|\\[\\"n])*"(?:,[a-z]+="(?:[^"\\\n]|\\[\\"n])*")*\})? \S+')


def get(address: str, target: str, method: str = "GET") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(address, timeout=300)
    connection.request(method, target)
    reply = connection.getresponse()
    body = reply.read().decode()
    connection.close()
    return reply.status, reply.headers.get("Content-Type", ""), body


def samples(text: str) -> dict[str, float]:
    """The samples of a text in the format of Prometheus, which is checked line by line."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP [a-z_]+ .+|TYPE [a-z_]+ (gauge|counter))", line)
        else:
            assert SAMPLE.fullmatch(line), line
            name, value = line.rsplit(" ", 1)
            assert name not in found
            found[name] = float(value)
    return found


def hostile(path) -> None:
    """Lines of a log and of sites as a malicious client would have them."""
    evil = '<script>alert("x")</script>\x1b[31m'
    (path / "server.log").write_text(f"2026-01-01 first\n2026-01-02 refused client 1: {evil}\nincompl")
    lines = [{"round": 14, "site": "north", "status": "accepted", "norm": 0.5}]
    lines += [{"round": 15, "site": "north", "status": "refused", "why": evil}, {"round": 15, "site": evil}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "sites.jsonl").write_text(text + '[1, 2]\n{"round": "x"}\nnot json\n{"round": 16, "sit')


def test_a_running_run_is_served_read_only(write_run):
    path = write_run("mine", finished=False)
    hostile(path)
    lines = []
    with live_server(path, "127.0.0.1:0", lines.append) as address:
        assert lines == [f"live page at http://{address}/, metrics at /metrics, health at /health"]
        code, kind, page = get(address, "/")
        assert (code, kind) == (200, "text/html; charset=utf-8")
        assert "round 15/30" in page
        assert 'http-equiv="refresh"' in page
        assert "refused client 1" in page
        assert "incompl" not in page
        code, kind, text = get(address, "/metrics")
        assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        found = samples(text)
        code, kind, body = get(address, "/health")
        assert (code, kind, json.loads(body)["round"]) == (200, "application/json", 15)
        for target in ("/config.toml", "/../config.toml", "/metrics/", "/?x=1", "/health?"):
            assert get(address, target)[0] == 404, target
        assert get(address, "/", "POST")[0] == get(address, "/", "DELETE")[0] == 501
        assert get(address, "/health", "HEAD")[::2] == (200, "")
    labels = 'method="mine",task="letters"'
    assert found[f"thinwire_round{{{labels}}}"] == 15
    assert found[f'thinwire_bytes_total{{{labels},direction="up"}}'] == 15_000
    assert found[f'thinwire_uploads_total{{{labels},outcome="accepted"}}'] == 150
    assert found[f'thinwire_state{{{labels},state="running"}}'] == 1
    assert found[f'thinwire_site_status{{{labels},site="north",status="refused"}}'] == 1
    with pytest.raises(OSError, match="refused"):
        get(address, "/")


class Tags(HTMLParser):
    """The tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)


def test_texts_of_clients_are_escaped(write_run):
    path = write_run("mine", finished=False)
    hostile(path)
    page = live_page(path)
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.seen
    assert "\x1b" not in page + metrics_text(path)
    samples(metrics_text(path))
    assert set(newest_by_site(path)) == {"north", '<script>alert("x")</script>\\x1b[31m'}


def test_health_of_finished_stopped_silent_and_damaged_runs(write_run, tmp_path):
    assert health(write_run("done")).code == 200
    path = write_run("x", finished=False)
    assert health(path).code == 200
    now = (path / "metrics.jsonl").stat().st_mtime
    assert health(path, now + 1000).why.startswith("no new round for")
    note_process(path)  # nobody holds the lock
    assert health(path)[:3] == (False, health(path).why, "stopped")
    assert "its process is gone" in live_page(path)
    (path / "config.toml").write_text("= broken")
    for broken in (path, tmp_path / "none"):
        assert health(broken).code == 503
        assert "section" in live_page(broken)
        assert samples(metrics_text(broken)) == {"thinwire_healthy": 0}


@pytest.mark.parametrize("address", ["8080", ":8080", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x"])
def test_wrong_address_is_one_line(thinwire, write_run, address):
    code, _, err = thinwire("watch", str(write_run("x")), "--http", address)
    assert (code, err.count("\n")) == (2, 1)
    assert "HOST:PORT" in err


def test_port_in_use_is_one_line(tmp_path):
    with (
        live_server(tmp_path, "127.0.0.1:0") as address,
        pytest.raises(ConfigError, match="name another port"),
        live_server(tmp_path, address),
    ):
        pass


def test_watch_serves_until_sigterm(write_run):
    path = write_run("x", finished=False)
    command = [sys.executable, "-m", "thinwire", "watch", str(path), "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = re.search(r"http://([^/]+)/", process.stdout.readline())[1]
        assert get(address, "/health")[0] == 200
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 130


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_live_page_in_a_browser(write_run, tmp_path, width):
    pytest.importorskip("playwright")
    path = write_run("mine", finished=False)
    hostile(path)
    (tmp_path / "page.html").write_text(live_page(path))
    with chromium() as browser:
        context, page = open_page(browser, tmp_path / "page.html", width)
        assert page.locator("h2").all_inner_texts() == ["State", "Rounds", "Sites", "Log"]
        context.close()
