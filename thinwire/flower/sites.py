"""Sites and nodes: the roster, what a node says of itself before it is used, and which nodes have which clients.

    server to node    run, and with a roster a nonce
    node to server    schema and version; and its clients, or with a roster its site and a signature
    server to node    refusal, if it is not used

Without a roster a node says which clients it has, and the first that names a client has it. With a roster a node proves
which site it is, and the roster says which clients the site has. A node of a site signs its `Report` with the key of
the site. The nonce is new in each process of the server, and Flower's node id is that of the node which the server
asked, so the proof of another node, run or time is worth nothing.

The roster is a file. Of the sites that are not revoked, names and clients are unique; keys are unique among all, so a
key that was revoked does not return. A site whose key was lost is revoked and added again with a new key.

    [[sites]]
    name = "north"
    key = "ecdsa-sha2-nistp384 AAAA..."
    clients = [0]
    revoked = false

It may change during the run: a site that was revoked or changed is asked again at once, and so are the nodes that were
refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import ConfigError, UnknownName
from thinwire.flower.policy import Log
from thinwire.runs.files import INVALID, unpack, write_atomically
from thinwire.runs.toml import dumps, read_toml
from thinwire.secure.keys import SiteKeys, fingerprint, is_signed, public_key, sign

KEY_VARIABLE = "THINWIRE_SITE_KEY"  # `thinwire site start` sets it to the key of --auth-supernode-private-key


class Software(NamedTuple):
    """What must be the same on the server and on every node.

    Args:
        schema: the hash of method, model, initial weights and seed.
        version: the version of thinwire.
    """

    schema: bytes
    version: str

    def difference(self, node: Software) -> str:
        """Why a node with this software cannot be used by a server with ours; "" if it can.

        >>> Software(b"s", "1.1").difference(Software(b"s", "1.0"))
        'it runs thinwire 1.0, the server 1.1; install the same version on both'
        """
        if node.version != self.version:
            theirs = visible(node.version, 40) or "of an unknown version"
            return f"it runs thinwire {theirs}, the server {self.version}; install the same version on both"
        if node.schema != self.schema:
            return (
                f"it runs another method, model or seed (schema {node.schema[:16].hex()}, ours {self.schema.hex()}); "
                "start it with the same app and the same data"
            )
        return ""


class Report(NamedTuple):
    """What a node reports of itself, not trusted."""

    software: Software = Software(b"", "")
    clients: tuple[int, ...] = ()  # without a roster
    site: str = ""  # with a roster
    signature: bytes = b""
    error: str = ""  # why it cannot take part now
    refusal: str = ""  # why it does not run the app of the server

    def statement(self, run: str, nonce: bytes, node: int) -> bytes:
        """What a node of a site signs; different reports, runs, nonces and nodes of Flower have different bytes."""
        signed = ["thinwire site", 2, run, nonce, node, self.site, self.software]
        return json.dumps(signed, default=bytes.hex).encode()


@dataclass(frozen=True)
class Site:
    """A site of the roster.

    Args:
        name: letters, digits, - and _, at most 64.
        key: its public key in OpenSSH form.
        clients: the numbers of its clients.
        revoked: whether it may no longer take part.
    """

    name: str
    key: str
    clients: tuple[int, ...]
    revoked: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            shown = visible(repr(self.name), 80)
            raise ConfigError(f"name is {shown}, expected 1 to 64 letters, digits, - and _, such as north")
        if not self.clients or repeated(self.clients):
            shown = visible(str(list(self.clients)), 60)
            raise ConfigError(f"clients is {shown}, expected different numbers from 0, such as [0]")
        object.__setattr__(self, "key", public_key(self.key, "key"))  # without its comment


@dataclass(frozen=True)
class Roster:
    """The sites that may take part in a run.

    Args:
        sites: all sites, also those that were revoked.
    """

    sites: tuple[Site, ...] = ()

    def __post_init__(self) -> None:
        for what, values in (
            ("name", [site.name for site in self.active]),
            ("client", [client for site in self.active for client in site.clients]),
            ("key", [fingerprint(site.key) for site in self.sites]),
        ):
            if twice := repeated(values):
                raise ConfigError(f"two sites of the roster have the same {what}, {twice[0]}; change or revoke one")

    @classmethod
    def read(cls, path: Path) -> Roster:
        """The roster in a file."""
        table = read_toml(path)
        try:
            return unpack(cls, {"sites": [], **table})  # type: ignore[no-any-return]
        except (*INVALID, ConfigError) as error:
            why = visible(f"{type(error).__name__}: {error}", 300)
            expected = "expected tables [[sites]] with name, key, clients = [0] and revoked = false"
            raise ConfigError(f"{path} cannot be read ({why}); {expected}") from error

    def write(self, path: Path) -> None:
        """Write the roster to a file; one that exists keeps its permissions and its owner."""
        before = path.stat() if path.exists() else None
        tables = (f"[[sites]]\n{dumps({**asdict(site), 'clients': list(site.clients)})}" for site in self.sites)
        write_atomically(path, "\n".join(tables).encode())
        path.chmod(before.st_mode & 0o777 if before else 0o644)  # the server may run as another user
        if before and os.name == "posix":
            with suppress(PermissionError):
                os.chown(path, before.st_uid, before.st_gid)

    @property
    def active(self) -> tuple[Site, ...]:
        """The sites that are not revoked."""
        return tuple(site for site in self.sites if not site.revoked)

    def site(self, name: str) -> Site | None:
        """The site of a name: the one that is not revoked, if there is one; None if there is none."""
        return min((site for site in self.sites if site.name == name), key=lambda site: site.revoked, default=None)

    @property
    def by_client(self) -> dict[int, Site]:
        """The site of each client."""
        return {client: site for site in self.active for client in site.clients}

    def add(self, name: str, key: str) -> Roster:
        """A roster with one more site, which gets the lowest client number that is free.

        Args:
            name: its name. One that was revoked may be added again with a new key, and keeps its clients if it can.
            key: its public key in OpenSSH form.
        """
        key, known = public_key(key, "the key"), self.site(name)
        if known and not known.revoked:
            raise ConfigError(f"site {name!r} is on the roster; to change its key write: thinwire site revoke {name}")
        if same := [other.name for other in self.sites if other.key == key]:
            raise ConfigError(f"this key is or was that of site {same[0]!r}; write: thinwire site key FILE")
        taken = self.by_client
        kept = tuple(i for i in known.clients if i not in taken) if known else ()
        first = next(i for i in range(len(taken) + 1) if i not in taken)
        return Roster((*self.sites, Site(name, key, kept or (first,))))

    def revoke(self, name: str) -> Roster:
        """A roster in which a site is revoked; its clients are free."""
        known = self.site(name)
        if known is None:
            raise UnknownName("site", visible(name, 64), [site.name for site in self.active])
        if known.revoked:
            raise ConfigError(f"site {name!r} was revoked before")
        return Roster(tuple(replace(site, revoked=True) if site is known else site for site in self.sites))


def repeated(values: Sequence[Any]) -> list[Any]:
    """The values that occur more than once."""
    return [value for value, times in Counter(values).items() if times > 1]


class RosterFile:
    """The roster of a run, which is read again when its file changes. A file that is damaged changes nothing.

    Args:
        path: the file.
        log: receives a line if the file cannot be read during the run.
    """

    def __init__(self, path: Path, log: Log) -> None:
        self.path, self.log = path, log
        self._text, self._roster = self._read(), Roster.read(path)

    def __call__(self) -> Roster:
        """The roster as it is now; the same object while its file does not change."""
        if (now := self._read()) != self._text:
            self._text = now
            try:
                self._roster = Roster.read(self.path)
            except ConfigError as error:
                self.log(f"the roster was changed but cannot be used, so the old one stays: {error}")
        return self._roster

    def _read(self) -> bytes:
        with suppress(OSError):
            return self.path.read_bytes()
        return b""


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Keep other processes from changing a file at the same time, by a lock beside it, which stays."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        with suppress(ImportError):  # this system has no such lock
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# -- on a node ---------------------------------------------------------------------------------------------------------


def clients_of_node(node_config: Mapping[str, Any], clients: int) -> tuple[int, ...]:
    """The clients of a node: those whose index modulo `num-partitions` is its `partition-id`.

    >>> clients_of_node({"partition-id": 1, "num-partitions": 4}, 10)
    (1, 5, 9)
    """
    part, parts = node_config.get("partition-id"), node_config.get("num-partitions")
    if not (isinstance(part, int) and isinstance(parts, int) and 0 <= part < parts):
        raise ConfigError(f"--node-config needs partition-id=0 num-partitions={clients} (from 0), not {node_config!r}")
    return tuple(range(part, clients, parts))


def introduce(
    node_config: Mapping[str, Any], run: str, nonce: bytes, node: int, clients: int, software: Software
) -> Report:
    """The response to the server's question: software, and clients or the proof of a site.

    Args:
        node_config: the `--node-config`; with a roster `site`, and `site-key` unless `thinwire site start` got
            `--auth-supernode-private-key`; without one `partition-id` and `num-partitions`.
        run: the name of the run.
        nonce: of the question; empty if the server has no roster.
        node: Flower's node id.
        clients: number of clients of the experiment.
        software: that of this node.
    """
    site = str(node_config.get("site", ""))
    if nonce:
        report = Report(software, site=site)
        if not site:  # the server refuses it with the reason
            return report
        return report._replace(signature=sign(_key_file(node_config), report.statement(run, nonce, node)))
    if site and "partition-id" not in node_config:
        raise ConfigError(
            f"--node-config names site {site!r}, but the server has no roster; start the run with "
            "-c 'roster=\"/path/roster.toml\"', or name partition-id and num-partitions"
        )
    return Report(software, clients_of_node(node_config, clients))


def site_keys(node_config: Mapping[str, Any]) -> SiteKeys | None:
    """The keys with which a site signs and checks messages of secure aggregation; None if it has no roster.

    Args:
        node_config: the `--node-config`: `site`, and `roster`, this site's own copy, which the server cannot change.
    """
    if not (file := str(node_config.get("roster", ""))):
        return None
    if not node_config.get("site"):
        raise ConfigError('--node-config has a roster, but does not name the site; write site="north"')
    by_client = Roster.read(Path(file)).by_client
    return SiteKeys(_key_file(node_config), {client: site.key for client, site in by_client.items()})


def _key_file(node_config: Mapping[str, Any]) -> Path:
    """The private key of this node's site."""
    if not (file := str(node_config.get("site-key") or os.environ.get(KEY_VARIABLE, ""))):
        raise ConfigError(
            f"site {node_config['site']!r} has no key here; give `thinwire site start` --auth-supernode-private-key "
            'FILE, or name it in --node-config: site-key="/path"'
        )
    return Path(file)


# -- on the server -----------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """What the server knows of a connected node.

    Args:
        clients: its clients; empty while it is not used.
        site: its site, if there is a roster.
        ask_at: when it may be asked what it is, on the clock; infinite until something changes.
        line: the last line about it: each is logged once.
    """

    clients: frozenset[int] = frozenset()
    site: Site | None = None
    ask_at: float = 0.0
    line: str = ""


class Admission:
    """The nodes of a run. A line is logged when a node is refused or, with a roster, a site joins or leaves.

    Args:
        software: that of the server.
        count: number of clients.
        sites: returns the roster as it is now; None without a roster.
        log: receives the lines.
    """

    def __init__(self, software: Software, count: int, sites: Callable[[], Roster] | None, log: Log) -> None:
        self.software, self.count, self.log, self._read = software, count, log, sites or Roster
        self.nodes: dict[int, Node] = {}  # all that are connected
        self.roster = self._read()
        self.nonce = secrets.token_bytes(32) if sites else b""  # in all questions of this process
        self._say_beyond({})

    def clients(self) -> frozenset[int]:
        """The clients of all nodes that are used."""
        return frozenset().union(*(node.clients for node in self.nodes.values()))

    def node_of(self, client: int) -> int | None:
        """The node of a client."""
        return next((name for name, node in self.nodes.items() if client in node.clients), None)

    def known(self) -> Set[int]:
        """The clients of sites on the roster; empty without one."""
        return self.roster.by_client.keys()

    def name(self, client: int) -> str:
        """What logs and records call a client."""
        site = self.roster.by_client.get(client)
        if site is None:
            return f"client {client}"
        return f"site {site.name}" + (f", client {client}" if len(site.clients) > 1 else "")

    def reread(self) -> None:
        """Read the roster, and stop using the nodes of sites that were revoked or changed."""
        if (now := self._read()) == self.roster:
            return
        before, after = ({site.name: site for site in roster.active} for roster in (self.roster, now))
        self.roster = now
        for name in sorted(before.keys() ^ after.keys()):
            self.log(f"roster: site {name} was {'added' if name in after else 'revoked or removed'}")
        self._say_beyond(before)
        for node in self.nodes.values():
            if node.site and after.get(node.site.name) != node.site:
                node.clients, node.site, node.ask_at = frozenset(), None, 0.0
        self._ask_refused_again()

    def to_ask(self, here: Set[int]) -> list[int]:
        """Forget the nodes that left; returns those that must be asked what they are.

        Args:
            here: the nodes that are connected.
        """
        self.reread()
        gone = {name: self.nodes.pop(name) for name in sorted(self.nodes.keys() - here)}
        for name, node in gone.items():
            if node.site:
                self.log(f"site {node.site.name} left (node {name})")
        if any(node.clients for node in gone.values()):
            self._ask_refused_again()  # what one has lost, another may have
        self.nodes |= {name: Node() for name in here - self.nodes.keys()}
        now = time.monotonic()
        return sorted(name for name, node in self.nodes.items() if not node.clients and node.ask_at <= now)

    def admit(self, name: int, report: Report, run: str) -> str:
        """Use a node, or refuse it; returns why it was refused, or "".

        Args:
            name: Flower's node id.
            report: what it sent, not trusted.
            run: the name of this run.
        """
        who, clients, site = f"node {name}", frozenset(report.clients), None
        if self.nonce:
            site = self.roster.site(report.site)
            shown = repr(visible(report.site, 64))
            if not report.site:
                why = "it names no site, and the server has a roster; write --node-config 'site=\"NAME\"'"
            elif site is None:
                why = f"site {shown} is not on the roster; on the server write: thinwire site add NAME KEY.pub"
            elif not is_signed(site.key, report.statement(run, self.nonce, name), report.signature):
                why = f"its key is not that of site {shown} on the roster"
            else:
                who, clients = f"site {site.name} (node {name})", frozenset(site.clients)
                why = f"site {shown} was revoked" if site.revoked else ""
            if why:
                return self.refuse(name, why)
        if why := self.software.difference(report.software) or self._taken(site, clients):
            return self.refuse(name, why, who)
        self.nodes[name] = Node(clients, site)
        if site:
            shown = visible(", ".join(map(str, site.clients)), 80)
            self.log(f"site {site.name} joined (node {name}): client{'s' * (len(clients) > 1)} {shown}")
        return ""

    def refuse(self, name: int, why: str, who: str = "") -> str:
        """Do not use a node until something changes; returns why, on one line."""
        why = visible(why, 300)
        self.postpone(name, math.inf, f"{who or f'node {name}'} is not used: {why}")
        return why

    def postpone(self, name: int, seconds: float, line: str = "") -> None:
        """Ask a node again after some time, for the reason of this line."""
        node = self.nodes.setdefault(name, Node())
        node.ask_at = time.monotonic() + seconds
        if line not in ("", node.line):
            node.line = line
            self.log(line)

    def _taken(self, site: Site | None, clients: frozenset[int]) -> str:
        """Why a node cannot have these clients; "" if it can."""
        if site:
            other = (name for name, node in self.nodes.items() if node.site and node.site.name == site.name)
            if (first := next(other, None)) is not None:
                return f"site {site.name} is already connected as node {first}; stop one of the two"
            return self._beyond(site)
        if not clients or not clients <= frozenset(range(self.count)):
            return f"it reports clients {sorted(clients)[:5]}, there are {self.count}"
        if taken := clients & self.clients():
            return f"it reports client {min(taken)}, which another node has"
        return ""

    def _beyond(self, site: Site) -> str:
        if (last := max(site.clients)) < self.count:
            return ""
        return (
            f"site {site.name} has client {last} on the roster, the experiment has clients 0 to {self.count - 1}; the "
            f"run goes on without it: a run with it needs an app with --clients {last + 1}"
        )

    def _say_beyond(self, known: Mapping[str, Site]) -> None:
        """Log the sites whose clients the experiment does not have, but for those that were known before."""
        for site in self.roster.active:
            if known.get(site.name) != site and (why := self._beyond(site)):
                self.log(f"roster: {why}")

    def _ask_refused_again(self) -> None:
        for node in self.nodes.values():
            node.ask_at = 0.0 if node.ask_at == math.inf else node.ask_at
