"""Nodes with their own JSONL records of a language model, over a transport in memory: the bits of the simulation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import thinwire as tw
from tests.checkpoints import write_language_model
from tests.federation import same_public
from tests.flower.in_memory import FlowerServer
from tests.flower.test_server import OwnData as OwnClients, experiment, play
from thinwire.data.site import OwnData, SiteRecords
from thinwire.errors import ThinwireError
from thinwire.federation.simulation import make_simulation
from thinwire.flower.client import Client
from thinwire.models import build
from thinwire.runs.build import build_job

pytest.importorskip("transformers")

RECORDS = {
    "north": [{"prompt": f"{a} one", "response": "yes it is"} for a in "abcdefgh"],
    "south": [{"prompt": f"the {a} two {b}", "response": "no"} for a in "abc" for b in "de"],
    "west": [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": "two"}]} for a in "efgh"],
}


@pytest.mark.parametrize(
    "up", [None, tw.codecs.Chain((tw.codecs.TopK(0.5), tw.codecs.Quantize(4)))], ids=["dense", "compressed"]
)
def test_nodes_with_their_own_records_equal_the_simulation(tmp_path, monkeypatch, up):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    checkpoint = str(write_language_model(tmp_path / "llama"))
    for name, rows in RECORDS.items():
        (tmp_path / "sites" / name).mkdir(parents=True)
        (tmp_path / "sites" / name / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = SiteRecords(checkpoint=checkpoint, length=32)
    own = OwnData(data, lambda: build("causal-lm", checkpoint=checkpoint), metrics=("perplexity",))
    chosen = experiment("fedavg", **{"cohort.size": 3, "local.batch": 2})
    more = {} if up is None else {"up": up}
    method = tw.Method(tw.spaces.LoRA(2, 4.0, ("q_proj", "v_proj")), client_opt=tw.optimizers.SGD(0.05), **more)
    job = replace(build_job(chosen), method=method, task=own.task(tmp_path / "sites", clients=3), rounds=2)
    theirs, their_records, their_messages = play(make_simulation(chosen.engine, job), 2)
    sites = {
        i: Client(chosen.engine, replace(job, task=own.at_site(tmp_path / "sites" / name, clients=3)))
        for i, name in enumerate(RECORDS)
    }
    server = replace(job, task=own.without_examples(3))
    ours, records, messages = play(FlowerServer(chosen.engine, server, OwnClients(sites)), 2)
    assert same_public(ours.server.public, theirs.server.public)
    assert sorted(messages) == sorted(their_messages)
    assert [one.loss for one in records] == [one.loss for one in their_records]
    assert all(block.abs().max() > 0 for name, block in ours.server.public.coords.items() if name.endswith("/b"))


def test_bad_records_of_a_node_are_one_line_with_file_and_row(tmp_path):
    checkpoint = str(write_language_model(tmp_path / "llama"))
    data = SiteRecords(checkpoint=checkpoint, length=32, too_long="error")
    own = OwnData(data, lambda: build("causal-lm", checkpoint=checkpoint))
    file = tmp_path / "records.jsonl"
    for text, message in (
        (b'{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": ""}\n', "row 2: 'response'"),
        (b'{"prompt": "a", "response": "b"}\n\xff\n', "row 2 is not UTF-8"),
        (b'{"prompt": "a", "response": "' + b"b " * 40 + b'"}\n', "row 1: it has 4"),
    ):
        file.write_bytes(text)
        with pytest.raises(ThinwireError, match=message) as caught:
            own.at_site(tmp_path, clients=2)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
