"""The state of a run on disk: tensors in safetensors, the rest in JSON, each guarded by a checksum.

A checkpoint is two files, `round-000010.safetensors` and `round-000010.json`. The second is written last and holds the
SHA-256 of the first: a checkpoint exists when its JSON does, and a kill at any moment leaves the previous one. The
newest two are kept. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from thinwire.core.rng import Device
from thinwire.core.tree import Tree
from thinwire.engines.job import RunState
from thinwire.errors import CheckpointError
from thinwire.rounds.ledger import Ledger, Window
from thinwire.rounds.state import ClientState, Public, ServerState
from thinwire.rounds.tally import Tally
from thinwire.run.files import write_atomically

FORMAT = 2
KEEP = 2
_PUBLIC = ("base", "coords", "shared", "buffers")
_SERVER = ("opt", "correction", "schedule", "codec")
_CLIENT = ("held", "correction", "codec", "opt")


def save_checkpoint(folder: Path, state: RunState, config: str) -> None:
    """Write the state after a round.

    Args:
        folder: where checkpoints lie.
        state: the state.
        config: digest of the experiment that it belongs to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"round-{state.round:06d}"
    tensors = _tensors(state)
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    write_atomically(folder / f"{stem}.safetensors", data)
    ledger = state.server.ledger
    meta: dict[str, Any] = {
        "format": FORMAT,
        "config": config,
        "round": state.round,
        "version": state.server.public.version,
        "names": list(tensors),
        "cohort": list(state.cohort),
        "how": state.how,
        "why": state.why,
        "chunk": state.chunk,
        "onednn": state.onednn,
        "tally": {"syncs": dict(state.tally.syncs), "bytes_up": state.tally.bytes_up},
        "ledger": {
            "version": ledger.version,
            "opened": ledger.opened,
            "lengths": [len(entry) for entry in ledger.entries],
            "past": [[w.since, w.until, *(len(part) for part in (*w.entries, w.end))] for w in ledger.past],
            "synced": dict(ledger.synced),
        },
        "clients": {str(i): client.version for i, client in state.clients.items()},
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    meta["checksum"] = _checksum(meta)
    write_atomically(folder / f"{stem}.json", (json.dumps(meta, indent=1) + "\n").encode())
    for old in rounds_in(folder)[:-KEEP]:
        (folder / f"round-{old:06d}.json").unlink(missing_ok=True)
        (folder / f"round-{old:06d}.safetensors").unlink(missing_ok=True)


def rounds_in(folder: Path) -> list[int]:
    """The rounds of which there is a checkpoint, ascending."""
    found = (re.fullmatch(r"round-(\d{6,})\.json", path.name) for path in folder.glob("round-*.json"))
    return sorted(int(match[1]) for match in found if match)


def load_checkpoint(folder: Path, config: str, device: Device = None) -> RunState | None:
    """The newest checkpoint of a folder, or None if there is none.

    Args:
        folder: where checkpoints lie.
        config: digest of the experiment that it must belong to.
        device: where the public state is to lie; what server and clients remember lies on the CPU.
    """
    rounds = rounds_in(folder)
    if not rounds:
        return None
    path = folder / f"round-{rounds[-1]:06d}.json"
    older = f"; remove it to go on from round {rounds[-2]}" if len(rounds) > 1 else ""
    try:
        meta = json.loads(path.read_bytes())
        checksum = meta.pop("checksum")
        if checksum != _checksum(meta):
            raise CheckpointError(f"{path} is damaged: its checksum does not match{older}")
        if meta["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {meta['format']}, this version reads {FORMAT}")
        if meta["config"] != config:
            raise CheckpointError(f"{path} belongs to another configuration ({meta['config']}, this run is {config})")
        weights = path.with_suffix(".safetensors")
        data = weights.read_bytes()
        if hashlib.sha256(data).hexdigest() != meta["sha256"]:
            raise CheckpointError(f"{weights} is damaged: its SHA-256 does not match{older}")
        tensors = load(data)
        # the order of blocks is part of the contract, and safetensors keeps an order of its own
        places = {name: device or "cpu" if name.startswith("public/") else "cpu" for name in meta["names"]}
        return _state(meta, {name: tensors[name].to(place) for name, place in places.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}){older}") from error


def _tensors(state: RunState) -> Tree:
    """All tensors of a state by a path that says where they belong."""
    out: Tree = {}
    for part in _PUBLIC:
        out |= {f"public/{part}/{name}": block for name, block in getattr(state.server.public, part).items()}
    for part in _SERVER:
        out |= {f"server/{part}/{name}": block for name, block in getattr(state.server, part).items()}
    for i, client in state.clients.items():
        for part in _CLIENT:
            out |= {f"client/{i}/{part}/{name}": block for name, block in getattr(client, part).items()}
    ledger = state.server.ledger
    data = b"".join((*ledger.entries, *(part for w in ledger.past for part in (*w.entries, w.end))))
    if data:
        out["ledger"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return out


def _state(meta: dict[str, Any], tensors: Tree) -> RunState:
    """The inverse of `_tensors`, with the numbers that stand in the JSON."""

    def tree(prefix: str) -> Tree:
        return {name.removeprefix(prefix): block for name, block in tensors.items() if name.startswith(prefix)}

    public = Public(meta["version"], *(tree(f"public/{part}/") for part in _PUBLIC))
    data = bytes(tensors["ledger"].cpu().numpy()) if "ledger" in tensors else b""
    ledger = _ledger(meta["ledger"], io.BytesIO(data))
    server = ServerState(public, **{part: tree(f"server/{part}/") for part in _SERVER}, ledger=ledger)  # type: ignore[arg-type]
    by_client: dict[str, Tree] = {}
    for name, block in tensors.items():
        if name.startswith("client/"):
            _, i, rest = name.split("/", 2)
            by_client.setdefault(i, {})[rest] = block
    clients = {}
    for i, version in meta["clients"].items():
        own = by_client.get(i, {})
        parts = [{n.removeprefix(f"{p}/"): b for n, b in own.items() if n.startswith(f"{p}/")} for p in _CLIENT]
        clients[int(i)] = ClientState(version, *parts)
    tally = Tally(**meta["tally"])
    how = meta["how"], meta["why"]
    settled = meta.get("chunk", 0), meta.get("onednn")
    return RunState(meta["round"], server, clients, tuple(meta["cohort"]), *how, tally, *settled)


def _ledger(meta: dict[str, Any], data: io.BytesIO) -> Ledger:
    """A ledger from its numbers and the bytes of its entries and ends, one after another."""
    entries = tuple(data.read(length) for length in meta["lengths"])
    past = []
    for since, until, *lengths in meta["past"]:
        *own, end = (data.read(length) for length in lengths)
        past.append(Window(since, until, tuple(own), end))
    return Ledger(meta["version"], meta["opened"], entries, tuple(past), meta["synced"])


def _checksum(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
