"""The wire format does not change by accident, and docs/wire.md is enough to read it.

The golden files are written by `python -m tests.golden.make`.
"""

import json

import numpy as np
import pytest
import torch

from tests import wire_reader as reader
from tests.golden import make
from thinwire.codecs import Peer, indices, symbols
from thinwire.core.rng import Key
from thinwire.core.spec import DTYPES, Block, Spec
from thinwire.rounds.down import receive
from thinwire.rounds.lanes import unraw
from thinwire.run.parts import build

FILES = {file.stem: json.loads(file.read_text()) for file in sorted(make.HERE.glob("*.json"))}
TYPES = {code: dtype for dtype, (code, _) in DTYPES.items()}


def of(kind):
    return pytest.mark.parametrize("name", [name for name in FILES if name.startswith(kind)])


def spec_of(blocks):
    return Spec(tuple(Block(name, tuple(shape), TYPES[kind]) for name, shape, kind in blocks))


def flat(blocks, names=None):
    """Blocks as the reader wants them."""
    return [(name, int(np.prod(shape)), kind) for name, shape, kind in blocks if names is None or name in names]


def numbers(blocks, as_hex):
    """Blocks of a golden file as lists of Python numbers, by way of torch."""
    return {
        block.name: unraw(bytes.fromhex(as_hex[block.name]), Spec((block,)))[block.name].flatten().tolist()
        for block in spec_of(blocks)
        if block.name in as_hex
    }


@pytest.fixture(scope="module")
def today():
    return make.cases()


def test_the_files_are_those_that_are_made(today):
    assert sorted(today) == sorted(FILES), "run python -m tests.golden.make"


@pytest.mark.parametrize("name", list(FILES))
def test_the_same_bytes_are_made_today(name, today):
    assert json.loads(make.as_text(today[name])) == FILES[name]


@of("positions")
def test_positions_are_read(name):
    file = FILES[name]
    data = bytes.fromhex(file["bytes"])
    assert reader.read_positions(data, file["n"], file["k"]) == file["positions"]
    assert indices.decode(data, file["n"], file["k"]).tolist() == file["positions"]


@of("levels")
def test_levels_are_read(name):
    file = FILES[name]
    data, levels = bytes.fromhex(file["bytes"]), file["levels"]
    assert reader.read_levels(data, len(levels), file["bits"]) == levels
    assert symbols.decode(data, len(levels), file["bits"]).tolist() == levels


@of("codec")
def test_codecs_are_read(name):
    file = FILES[name]
    data, wanted = bytes.fromhex(file["bytes"]), numbers(file["blocks"], file["numbers"])
    assert reader.read_codec(file["codec"], data, flat(file["blocks"]), file["key"]) == wanted
    codec, spec = build("codec", file["codec"], "golden"), spec_of(file["blocks"])
    assert make.as_hex(codec.decode(data, spec, Peer(Key(file["key"])))) == file["numbers"]


@of("message-up")
def test_answers_are_read(name):
    file = FILES[name]
    kind, version, bodies = reader.read_message(
        bytes.fromhex(file["bytes"]), bytes.fromhex(file["digest"]), [block[0] for block in file["coords"]]
    )
    assert (kind, version, len(bodies)) == ("up", file["version"], 1)
    plan, lanes = bodies[0]
    assert plan == file["plan"]
    key = reader.fold(file["key"], "peer", version, file["client"])
    said = reader.read_codec(file["up"], lanes.pop(1), flat(file["coords"], plan), key)
    assert said == numbers(file["coords"], file["numbers"])
    assert reader.read_codec("raw", lanes.pop(2), [("weight", 1, "f4")], 0) == {"weight": [file["weight"]]}
    read_rest(file, lanes, "shared_said", "buffers_said", file)


@of("message-steps")
def test_steps_are_read(name):
    file = FILES[name]
    kind, version, bodies = reader.read_message(
        bytes.fromhex(file["bytes"]), bytes.fromhex(file["digest"]), [block[0] for block in file["coords"]]
    )
    assert (kind, version, len(bodies)) == ("steps", file["version"], file["version"] - file["from"] + 1)
    assert bodies[-1] == (file["plan"], {})
    for at, ((plan, lanes), step) in enumerate(zip(bodies[:-1], file["steps"], strict=True)):
        assert plan == step["plan"]
        key = reader.fold(file["key"], "peer", file["from"] + at, -1)
        said = reader.read_codec(file["down"], lanes.pop(1), flat(file["coords"], plan), key)
        assert said == numbers(file["coords"], step["numbers"])
        read_rest(file, lanes, "shared_added", "buffers_said", step)


@of("message-state")
def test_states_are_read(name):
    file = FILES[name]
    kind, version, bodies = reader.read_message(
        bytes.fromhex(file["bytes"]), bytes.fromhex(file["digest"]), [block[0] for block in file["coords"]]
    )
    assert (kind, version, len(bodies)) == ("state", file["version"], 2)
    assert bodies[-1] == (file["plan"], {})
    plan, lanes = bodies[0]
    assert plan == file["touched"]
    after = file["after"]
    blocks = flat(file["sendable"]) if file["link"] == "snapshot" else flat(file["coords"], plan)
    codec = file["down"] if file["link"] == "snapshot" else "raw"
    said = reader.read_codec(codec, lanes.pop(1), blocks, reader.fold(file["key"], "peer", version, -1))
    held = numbers(file["coords"], after["coords"])
    assert said == {name: held[name] for name, _, _ in blocks}
    if 6 in lanes:
        assert reader.read_codec("raw", lanes.pop(6), flat(file["weights"]), 0) == numbers(
            file["weights"], after["base"]
        )
    read_rest(file, lanes, "shared", "buffers", after)


def read_rest(file, lanes, shared, buffers, wanted):
    for lane, blocks, numbers_of in ((3, "buffers", buffers), (4, "shared", shared)):
        payload = lanes.pop(lane, b"")
        assert reader.read_codec("raw", payload, flat(file[blocks]), 0) == numbers(file[blocks], wanted[numbers_of])
    assert not lanes


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith(("message-steps", "message-state"))])
def test_clients_arrive_where_the_file_says(name):
    file = FILES[name]
    contract, servers, _ = make.history(name.split("-")[2])
    after = receive(contract, servers[file["from"]].public, bytes.fromhex(file["bytes"])).public
    assert make.public_hex(after) == file["after"]


def test_every_codec_and_kind_of_message_has_a_file():
    from thinwire.codecs.message import KINDS
    from thinwire.core.registry import entries

    used = json.dumps([file.get("codec") for file in FILES.values()])
    assert [name for name in entries("codec") if f'"{name}"' not in used] == []
    assert {name.split("-")[1] for name in FILES if name.startswith("message")} == set(KINDS.values())


def test_the_reader_reads_numbers_of_all_types():
    types = {kind for file in FILES.values() for _, _, kind in file.get("blocks", ())}
    assert types == set(TYPES)
    assert torch.tensor(reader.philox(7, 9)).tolist() == Key(7).words(9).tolist()
