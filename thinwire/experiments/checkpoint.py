"""Checkpoints: the state of a run on disk, tensors in safetensors and the rest in JSON, each with a checksum.

A checkpoint is two files, `round-000010.safetensors` and `round-000010.json`. The second is written last and holds the
SHA-256 of the first: a checkpoint exists when its JSON exists, so a kill at any moment leaves the previous one. The
newest are kept: two, or `checkpoint.keep`. Nothing is pickled. The JSON also holds the lines of `metrics.jsonl` up to
its round, to restore that file if it is damaged. Before tensors are read, all counts are checked against the limits
of the experiment.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from thinwire.core.key import Device
from thinwire.core.state import State
from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.errors import CheckpointError
from thinwire.experiments.files import read_checked, with_checksum, write_atomically
from thinwire.experiments.records import KEEP, checkpoint_file, rounds_in
from thinwire.protocol.ledger import Ledger, Window
from thinwire.protocol.recent import Recent
from thinwire.protocol.state import ClientState, PublicState, ServerState
from thinwire.protocol.sync_counts import SyncCounts
from thinwire.runtime.job import RunState
from thinwire.training.inputs import Backend

FORMAT = 2
_PUBLIC = ("base", "coords", "shared", "buffers")
_SERVER = ("correction", "schedule", "codec")
_CLIENT = ("unsent", "correction", "codec")


class Bounds(NamedTuple):
    """Number of rounds and clients of the experiment, the limits for the counts of a checkpoint."""

    rounds: int = 1 << 40
    clients: int = 1 << 40


def save_checkpoint(
    folder: Path, state: RunState, config: str, metrics: str | None = None, retries: int = 0, keep: int = KEEP
) -> None:
    """Write the state after a round.

    Args:
        folder: the folder of checkpoints.
        state: the state.
        config: the digest of the experiment.
        metrics: the lines of `metrics.jsonl` up to that round.
        retries: how often the run went back before (`retry.py`).
        keep: number of checkpoints in the folder that are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = checkpoint_file(folder, state.round)
    tensors = _tensors(state)
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    write_atomically(file.with_suffix(".safetensors"), data)
    ledger = state.server.ledger
    meta: dict[str, Any] = {
        "format": FORMAT,
        "config": config,
        "round": state.round,
        "version": state.server.public.version,
        "names": list(tensors),
        "cohort": list(state.cohort),
        "backend": state.backend,
        "backend_reason": state.backend_reason,
        "chunk": state.chunk,
        "onednn": state.onednn,
        "sync_counts": {"syncs": dict(state.sync_counts.syncs), "bytes_up": state.sync_counts.bytes_up},
        "ledger": {
            "version": ledger.version,
            "opened": ledger.opened,
            "lengths": [len(entry) for entry in ledger.entries],
            "past": [[w.since, w.until, *(len(part) for part in (*w.entries, w.end))] for w in ledger.past],
            "synced": dict(ledger.synced),
            "adds_since": ledger.adds_since,
        },
        "clients": {str(i): client.version for i, client in state.clients.items()},
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "metrics": metrics,
        **({"retries": retries} if retries else {}),
        **({"recent": recent} if (recent := state.recent.as_json()) else {}),
    }
    write_atomically(file, with_checksum(meta))
    for old in rounds_in(folder)[:-keep]:
        checkpoint_file(folder, old).unlink(missing_ok=True)
        checkpoint_file(folder, old).with_suffix(".safetensors").unlink(missing_ok=True)


def load_checkpoint(
    folder: Path, config: str, device: Device = None, bounds: Bounds | None = None, number: int | None = None
) -> RunState | None:
    """The state of a checkpoint, by default the newest; None if there is none.

    Args:
        folder: the folder of checkpoints.
        config: the digest of the experiment, which must match.
        device: the device of the public state and the averaged model; server and client states are on the CPU.
        bounds: the limits of the experiment; by default very large ones.
        number: the round of the checkpoint.
    """
    rounds = [one for one in rounds_in(folder) if number is None or one <= number]
    if not rounds or number not in (None, rounds[-1]):
        return None
    path = checkpoint_file(folder, rounds[-1])
    older = f"; remove it to continue from round {rounds[-2]}" if len(rounds) > 1 else ""
    meta = read_checked(path, older)
    try:
        if meta["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {meta['format']}, this version reads {FORMAT}")
        if meta["config"] != config:
            raise CheckpointError(f"{path} belongs to another configuration ({meta['config']}, this run is {config})")
        if wrong := _out_of_range(meta, bounds or Bounds()):
            raise CheckpointError(f"{path} cannot be of this run: {wrong}{older}")
        weights = path.with_suffix(".safetensors")
        if "bytes" in meta and (size := weights.stat().st_size) != meta["bytes"]:
            raise CheckpointError(f"{weights} is damaged: it has {size:,} bytes, not {meta['bytes']:,}{older}")
        data = weights.read_bytes()
        if hashlib.sha256(data).hexdigest() != meta["sha256"]:
            raise CheckpointError(f"{weights} is damaged: its SHA-256 does not match{older}")
        tensors = load(data)
        # the order of blocks is part of the contract, and safetensors does not preserve it
        on_device = ("public/", "average/")
        places = {name: device or "cpu" if name.startswith(on_device) else "cpu" for name in meta["names"]}
        state = _state(meta, {name: tensors[name].to(place) for name, place in places.items()})
        return state._replace(recent=Recent.from_json(meta.get("recent"), (bounds or Bounds()).clients))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({visible(str(error), 200)}){older}") from error


def _out_of_range(meta: dict[str, Any], bounds: Bounds) -> str:
    """Describe the first count of a checkpoint that is out of range; "" if there is none. Allocates nothing."""
    ledger = meta["ledger"]
    version, clients = meta["version"], [*map(int, meta["clients"]), *meta["cohort"]]
    lengths = [*ledger["lengths"], *(length for window in ledger["past"] for length in window[2:])]
    seen = [ledger["version"], ledger["opened"], *ledger["synced"].values(), *meta["clients"].values()]
    seen += [ledger.get("adds_since", 0), *(edge for window in ledger["past"] for edge in window[:2])]
    syncs = [*meta["sync_counts"]["syncs"].values()]
    ranges: tuple[tuple[str, Iterable[Any], int], ...] = (
        ("round", [meta["round"]], bounds.rounds),
        ("version", [version], meta["round"]),
        ("version of a client or an entry", seen, version),
        ("client", clients, bounds.clients - 1),
        ("number of clients trained together", [meta.get("chunk", 0)], bounds.clients),
        ("number of synchronizations", syncs, meta["round"]),
        ("length", [*lengths, meta.get("bytes", 0)], 1 << 48),
    )
    for what, values, most in ranges:
        for value in values:
            if type(value) is not int or not 0 <= value <= most:
                return f"it holds the {what} {visible(repr(value), 40)}, expected 0 to {most:,}"
    if meta["backend"] not in get_args(Backend) or meta.get("onednn") not in (True, False, None):
        return f"its backend is {visible(repr(meta['backend']), 40)}"
    return ""


def _tensors(state: RunState) -> Tree:
    """All tensors of a state by path, such as `client/3/unsent/fc.weight`."""
    out: Tree = {}
    for part in _PUBLIC:
        out |= {f"public/{part}/{name}": block for name, block in getattr(state.server.public, part).items()}
    out |= {f"average/{name}": block for name, block in state.average.items()}
    clients = ((f"client/{i}", _CLIENT, own) for i, own in state.clients.items())
    owners: list[tuple[str, tuple[str, ...], Any]] = [("server", _SERVER, state.server), *clients]
    for owner, parts, one in owners:
        trees = {part: getattr(one, part) for part in parts}
        trees |= {f"opt/{slot}": tree for slot, tree in one.opt.items()}
        out |= {f"{owner}/{part}/{name}": block for part, tree in trees.items() for name, block in tree.items()}
    ledger = state.server.ledger
    data = b"".join((*ledger.entries, *(part for w in ledger.past for part in (*w.entries, w.end))))
    if data:
        out["ledger"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return out


def _state(meta: dict[str, Any], tensors: Tree) -> RunState:
    """The inverse of `_tensors`, with the values of the JSON."""

    def tree(prefix: str) -> Tree:
        return {name.removeprefix(prefix): block for name, block in tensors.items() if name.startswith(prefix)}

    public = PublicState(meta["version"], *(tree(f"public/{part}/") for part in _PUBLIC))
    data = bytes(tensors["ledger"].cpu().numpy()) if "ledger" in tensors else b""
    lengths = [*meta["ledger"]["lengths"], *(n for window in meta["ledger"]["past"] for n in window[2:])]
    if sum(lengths) != len(data):
        raise ValueError(f"its ledger has {len(data)} bytes, not {sum(lengths)}")
    ledger = _ledger(meta["ledger"], io.BytesIO(data))
    own = {part: tree(f"server/{part}/") for part in _SERVER}
    server = ServerState(public, opt=_slots(tree("server/opt/")), ledger=ledger, **own)
    by_client: dict[str, Tree] = {}
    for name, block in tensors.items():
        if name.startswith("client/"):
            _, i, rest = name.split("/", 2)
            by_client.setdefault(i, {})[rest] = block
    clients = {}
    for i, version in meta["clients"].items():
        mine = by_client.get(i, {})
        given = {
            p: {n.removeprefix(f"{p}/"): b for n, b in mine.items() if n.startswith(f"{p}/")} for p in (*_CLIENT, "opt")
        }
        clients[int(i)] = ClientState(version, opt=_slots(given.pop("opt")), **given)
    sync_counts = SyncCounts(**meta["sync_counts"])
    backend = meta["backend"], meta["backend_reason"]
    limits = meta.get("chunk", 0), meta.get("onednn")
    cohort, average = tuple(meta["cohort"]), tree("average/")
    return RunState(meta["round"], server, clients, cohort, *backend, sync_counts, *limits, average)


def _slots(tree: Tree) -> State:
    """The state of an optimizer from names such as `momentum/fc.weight`."""
    state: State = {}
    for path, block in tree.items():
        slot, _, name = path.partition("/")
        state.setdefault(slot, {})[name] = block
    return state


def _ledger(meta: dict[str, Any], data: io.BytesIO) -> Ledger:
    """A ledger from its JSON and the concatenated bytes of its entries and ends."""
    entries = tuple(data.read(length) for length in meta["lengths"])
    past = []
    for since, until, *lengths in meta["past"]:
        *window, end = (data.read(length) for length in lengths)
        past.append(Window(since, until, tuple(window), end))
    adds_since = meta.get("adds_since", meta["version"])  # older checkpoints do not have it
    return Ledger(meta["version"], meta["opened"], entries, tuple(past), meta["synced"], adds_since)
