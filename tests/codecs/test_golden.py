"""The wire format does not change by accident, and a reader written from docs/wire.md alone can read it.

The golden files are written by `python -m tests.golden.make`.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests import wire_reader as reader
from tests.golden import make
from thinwire.codecs import Peer
from thinwire.core.key import Key
from thinwire.core.tree import DTYPES, Block, Spec
from thinwire.protocol.receive import receive
from thinwire.protocol.upload import unraw
from thinwire.runs.parts import build
from thinwire.wire import indices, row_signs, symbols

FILES = {file.stem: json.loads(file.read_text()) for file in sorted(make.HERE.glob("*.json"))}
TYPES = {code: dtype for dtype, (code, _) in DTYPES.items()}


def of(kind):
    return pytest.mark.parametrize("name", [name for name in FILES if name.startswith(kind)])


def spec_of(blocks):
    return Spec(tuple(Block(name, tuple(shape), TYPES[kind]) for name, shape, kind in blocks))


def flat(blocks, names=None):
    """Blocks in the form that the reader takes."""
    return [(name, tuple(shape), kind) for name, shape, kind in blocks if names is None or name in names]


def values(blocks, as_hex):
    """Blocks of a golden file as lists of Python numbers, decoded with torch."""
    return {
        block.name: unraw(bytes.fromhex(as_hex[block.name]), Spec((block,)))[block.name].flatten().tolist()
        for block in spec_of(blocks)
        if block.name in as_hex
    }


@pytest.fixture(scope="module")
def current():
    return make.cases()


def test_there_is_a_file_for_each_case(current):
    assert sorted(current) == sorted(FILES), "run python -m tests.golden.make"


def test_the_code_still_writes_the_same_bytes(current):
    assert not [name for name, file in FILES.items() if json.loads(make.as_text(current[name])) != file]


@of("positions")
def test_positions_are_read(name):
    file = FILES[name]
    data = bytes.fromhex(file["bytes"])
    sizes = file["n"], file["k"], file.get("shapes", ())
    assert reader.read_positions(data, *sizes) == file["positions"]
    assert indices.decode(data, *sizes).tolist() == file["positions"]


@of("signs")
def test_signs_are_read(name):
    file = FILES[name]
    data, at = bytes.fromhex(file["bytes"]), file["positions"]
    assert reader.read_signs(data, at, file["shapes"]) == list(map(bool, file["negative"]))
    sent = np.zeros(sum(r * c for r, c in file["shapes"]), bool)
    sent[at] = True
    assert row_signs.decode(data, sent, file["shapes"])[at].tolist() == list(map(bool, file["negative"]))


@of("levels")
def test_levels_are_read(name):
    file = FILES[name]
    data, levels = bytes.fromhex(file["bytes"]), file["levels"]
    assert reader.read_levels(data, len(levels), file["bits"]) == levels
    assert symbols.decode(data, len(levels), file["bits"]).tolist() == levels


@of("codec")
def test_codecs_are_read(name):
    file = FILES[name]
    data, wanted = bytes.fromhex(file["bytes"]), values(file["blocks"], file["values"])
    keys = (file["key"], file["everyone"], file.get("mask", {}), *([file["known"]] if "known" in file else []))
    assert reader.read_codec(file["codec"], data, flat(file["blocks"]), keys) == wanted
    codec, spec = build("codec", file["codec"], "golden"), spec_of(file["blocks"])
    mask = {b.name: torch.tensor(keys[2][b.name]).reshape(b.shape) for b in spec if b.name in keys[2]}
    known = {b.name: torch.tensor(file["known"][b.name]).reshape(b.shape) for b in spec if "known" in file}
    peer_of = Peer(Key(file["key"]), Key(file["everyone"]), mask, known)
    assert make.as_hex(codec.decode(data, spec, peer_of)) == file["values"]


def read(file):
    return reader.read_message(
        bytes.fromhex(file["bytes"]), bytes.fromhex(file["digest"]), [block[0] for block in file["coords"]]
    )


def peer(file, version, client):
    return reader.fold(file["key"], "peer", version, client), reader.fold(file["key"], "peers", version)


@of("message-up")
def test_uploads_are_read(name):
    file = FILES[name]
    kind, version, behind, bodies = read(file)
    assert (kind, version, behind, len(bodies)) == ("up", file["version"], 0, 1)
    plan, fields = bodies[0]
    assert plan == file["plan"]
    code = reader.read_codec(file["up"], fields.pop(1), flat(file["coords"], plan), peer(file, version, file["client"]))
    assert code == values(file["coords"], file["values"])
    assert fields.pop(2) == file["weight"]
    read_rest(file, fields, "sent_report", "sent_buffers", file)


@of("message-lost")
def test_requests_for_the_full_state_are_read(name):
    file = FILES[name]
    assert read(file) == ("lost", file["version"], 0, [])


@of("message-steps")
def test_steps_are_read(name):
    file = FILES[name]
    kind, version, behind, bodies = read(file)
    assert (kind, version, behind) == ("steps", file["version"], file["version"] - file["from"])
    read_request(file, bodies.pop(), news=behind > 0)
    at = file["from"]
    for (plan, fields), wanted in zip(bodies, file["steps"], strict=True):
        assert (at, plan) == (wanted["from"], wanted["plan"])
        blocks = flat(file["coords"], plan)
        if 9 in fields:
            found, at = reader.read_codec(file["merge_codec"], fields.pop(9), blocks, peer(file, 0, -1)), version
        elif 3 in fields:
            end = (at // file["window"] + 1) * file["window"] if file["window"] else None
            ends = end is not None and end <= version
            at = end if ends else version
            codec = file["merge_codec"] if ends else "raw"
            found = reader.read_codec(codec, fields.pop(3), blocks, peer(file, at, -1))
        else:
            if 10 in fields:
                adapted = [block for block in flat(file["weights"]) if f"{block[0]}/b" in plan]
                stack = reader.read_stack(fields.pop(10), adapted, file["rank"], file["down"], peer(file, at, -2))
                assert stack[:2] == (wanted["stacked"], values(stack[2], wanted["stack"]))
                blocks = [block for block in blocks if "/" not in block[0]]  # those of adapters are stacked
            found = reader.read_codec(file["down"], fields.pop(1), blocks, peer(file, at, -1))
            at += 1
        assert found == values(file["coords"], wanted["values"])
        assert at == wanted["until"]
        assert not fields
    assert at == version


@of("message-state")
def test_states_are_read(name):
    file = FILES[name]
    kind, version, behind, bodies = read(file)
    assert (kind, version, behind) == ("state", file["version"], file["version"] - file["from"])
    read_request(file, bodies.pop(), news=True)
    ((plan, fields),) = bodies
    assert plan == file["synced"]
    after, blocks = file["after"], flat(file["sendable"])
    codec = file["down"] if file["download"] == "full" else "raw"
    found = reader.read_codec(codec, fields.pop(1), blocks, peer(file, version, -1))
    expected = values(file["coords"], after["coords"])
    assert found == {name: expected[name] for name, _, _ in blocks}
    if file["window"] and version >= file["window"]:
        base = reader.read_codec("raw", fields.pop(8), flat(file["weights"]), 0)
        assert base == values(file["weights"], after["base"])
    assert not fields


def read_request(file, request, news):
    plan, fields = request
    assert plan == file["plan"]
    if file["drift_check"]:
        state = [values(file[blocks], file["after"][part]) for blocks, part in checked_parts(file)]
        value = reader.read_codec("raw", fields.pop(4), [("drift_check", (), "f4")], 0)["drift_check"][0]
        assert value == reader.drift_check(state, reader.fold(file["key"], "guard", file["version"]))
    if news:
        read_rest(file, fields, "shared", "buffers", file["after"])
    assert not fields


def checked_parts(file):
    """The parts of the drift check: the base, if the space merges into it, then the coordinates."""
    base = [("weights", "base")] if file["window"] else []
    return [*base, ("coords", "coords")]


def read_rest(file, fields, shared, buffers, wanted):
    for field, blocks, part in ((5, "buffers", buffers), (6, "shared", shared)):
        payload = fields.pop(field, b"")
        assert reader.read_codec("raw", payload, flat(file[blocks]), 0) == values(file[blocks], wanted[part])
    assert not fields


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith(("message-steps", "message-state"))])
def test_clients_reach_the_state_of_the_file(name):
    file = FILES[name]
    contract, servers, _ = make.history(name.split("-")[2])
    after = receive(contract, servers[file["from"]].public, bytes.fromhex(file["bytes"]), 0).public
    assert make.public_hex(after) == file["after"]


def test_every_codec_and_kind_of_message_has_a_file():
    from thinwire.core.registry import entries
    from thinwire.wire.message import KINDS

    used = json.dumps([file.get("codec") for file in FILES.values()])
    assert [name for name in entries("codec") if f'"{name}"' not in used] == []
    assert {one["kind"] for file in FILES.values() for one in file.get("steps", ())} == {"entry", "snapshot", "sum"}
    assert {name.split("-")[1] for name in FILES if name.startswith("message")} == set(KINDS.values())


def test_the_reader_reads_values_of_all_types():
    types = {kind for file in FILES.values() for _, _, kind in file.get("blocks", ())}
    assert types == set(TYPES)
    assert torch.tensor(reader.philox(7, 9)).tolist() == Key(7).words(9).tolist()


SETTINGS = {
    "one thread": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    "two threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "no vector instructions": {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "DEFAULT"},
    "no FMA": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"},
}


# this process has all instructions and, in CI, one thread; the last settings differ most from that
@pytest.mark.parametrize("name", [*(pytest.param(one, marks=pytest.mark.slow) for one in list(SETTINGS)[:3]), "no FMA"])
def test_bytes_do_not_depend_on_threads_and_instructions(name):
    """Golden files, drift checks of a state for several threads, and initial weights of networks."""
    child = [sys.executable, "-W", "ignore", "-c", "from tests.golden import make; print(make.digest())"]
    made = subprocess.run(child, stdout=subprocess.PIPE, env={**os.environ, **SETTINGS[name]}, check=True, text=True)
    assert made.stdout.strip() == make.digest()
