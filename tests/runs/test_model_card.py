"""Trained models as folders with a card, and on a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import thinwire as tw


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "run"
    return tw.run("mapo", "digits", rounds=2, out=path, set={"local.epochs": 1})


def test_a_folder_has_the_weights_and_a_card_with_the_bytes(run, tmp_path):
    run.save_pretrained(tmp_path / "made")
    assert sorted(one.name for one in (tmp_path / "made").iterdir()) == [
        "README.md",
        "config.toml",
        "model.safetensors",
    ]
    wanted = run.model().state_dict()
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    card = (tmp_path / "made" / "README.md").read_text()
    for row in ("| method | mapo |", "| rounds | 2 |", "| seed | 0 |", f"| bytes up | {run.bytes_up:,} |"):
        assert row in card
    assert f"| test accuracy | {100 * run.accuracy:.2f} % |" in card
    assert (tmp_path / "made" / "config.toml").read_text() in card
    loaded = tw.load_run(run.path)
    loaded.save_pretrained(tmp_path / "loaded")
    assert (tmp_path / "loaded" / "README.md").read_text() == card


def test_the_command_of_the_card_trains_the_same_model(run, tmp_path, thinwire):
    run.save_pretrained(tmp_path / "made")
    assert thinwire("run", str(tmp_path / "made" / "config.toml"), "--out", str(tmp_path / "again"), "-q")[0] == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], one) for name, one in run.weights.items())


def test_a_lora_run_becomes_an_adapter_and_else_the_whole_model(tmp_path):
    clients = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(2)]
    for method, files in {
        "lora": {"adapter_config.json", "adapter_model.safetensors"},
        "fedloru": {"model.safetensors"},  # merges its adapters
    }.items():
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        trained = tw.simulate(net, clients, method, rounds=2, set={"method.space.target_modules": ["0.weight"]})
        found = {file.name for file in trained.save_pretrained(tmp_path / method)}
        assert found == files | {"README.md", "config.toml"}


def test_without_the_library_the_error_names_the_package(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(tw.ConfigError, match="pip install huggingface_hub"):
        run.push_to_hub("me/mapo")


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the hub that an upload of small files needs."""

    received: ClassVar[list] = []

    def do_POST(self):
        size = self.headers["Content-Length"]
        body = self.rfile.read(int(size)) if size else b""
        self.received.append((self.path, body))
        url = f"http://{self.headers['Host']}/me/mapo"
        answers = {"create": {"url": url}, "yaml": {"errors": [], "warnings": []}}
        answers["main"] = {"commitUrl": f"{url}/commit/{'1' * 40}", "commitOid": "1" * 40}
        last = self.path.rpartition("/")[2]
        if "preupload" in self.path:
            files = [one["path"] for one in json.loads(body)["files"]]
            answer = {"files": [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in files]}
        else:
            answer = next((one for end, one in answers.items() if last.endswith(end)), {})
        text = json.dumps(answer).encode()
        self.send_response(403 if "refused" in self.path + str(body) else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *args):
        pass


def test_the_folder_is_uploaded(run, tmp_path):
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_x"}

    def push(repo):
        words = [sys.executable, "-m", "thinwire", "export", str(run.path), str(tmp_path / "f"), "--push", repo]
        return subprocess.run(words, env={**env, "HF_HUB_OFFLINE": "0"}, capture_output=True, text=True, check=False)

    done = push("me/mapo")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.splitlines()[-1].endswith("/me/mapo/commit/" + "1" * 40)
    commit = next(body for path, body in Hub.received if "/commit/main" in path)
    sent = [json.loads(line) for line in commit.splitlines()]
    assert {one["value"]["path"] for one in sent if one["key"] == "file"} == {
        *("README.md", "config.toml", "model.safetensors")
    }
    failed = push("me/refused")
    server.shutdown()
    server.server_close()
    assert failed.returncode == 2
    assert "the hub did not take me/refused" in failed.stderr
    assert "Traceback" not in failed.stderr
