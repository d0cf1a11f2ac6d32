"""Sites and nodes: the roster, what a node says of itself before it is used, and which nodes have which clients.

    server to node    run, and with a roster a nonce
    node to server    schema, version, app; and its clients, or with a roster its site and a signature
    server to node    refusal, if it is not used

Without a roster a node says which clients it has, and the first that names a client has it. With a roster a node proves
which site it is, and the roster says which clients the site has. A node of a site signs its `Report` with the key of
the site. The nonce is new for each node and each question, and Flower's node id is that of the node which the server
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
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import ConfigError, UnknownName, WireError
from thinwire.runs.files import write_atomically
from thinwire.runs.toml import dumps, read_toml
from thinwire.secure.keys import SiteKeys, fingerprint, is_signed, public_key, sign

FILE = "roster.toml"
KEY_VARIABLE = "THINWIRE_SITE_KEY"  # `thinwire site start` sets it to the key of --auth-supernode-private-key
MOST_CLIENTS = 1_000_000  # a number above is a mistake
_FIELDS = {"name": str, "key": str, "clients": list, "revoked": bool}
Log = Callable[[str], None]


class Software(NamedTuple):
    """What must be the same on the server and on every node.

    Args:
        schema: the hash of method, model, initial weights and seed.
        version: the version of thinwire.
        app: the hash of the files of the app; "" where they are not known.
    """

    schema: bytes
    version: str
    app: str = ""

    def difference(self, node: Software) -> str:
        """Why a node with this software cannot be used by a server with ours; "" if it can.

        >>> Software(b"s", "1.1").difference(Software(b"s", "1.0"))
        'it runs thinwire 1.0, the server 1.1; install the same version on both'
        """
        if node.version != self.version:
            theirs = visible(node.version, 40) or "of an unknown version"
            return f"it runs thinwire {theirs}, the server {self.version}; install the same version on both"
        if self.app and node.app != self.app:
            theirs = visible(node.app[:16], 40) or "unknown"
            return f"it runs another app (files {theirs}, ours {self.app[:16]}); start it with the app of the server"
        if node.schema != self.schema:
            return (
                f"it runs another method, model or seed (schema {node.schema[:16].hex()}, ours {self.schema.hex()}); "
                "start it with the same app and the same data"
            )
        return ""


class Report(NamedTuple):
    """What a node reports of itself, not trusted."""

    software: Software
    clients: frozenset[int] = frozenset()  # without a roster
    site: str = ""  # with a roster
    signature: bytes = b""

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

    def client_name(self, client: int) -> str:
        """What logs and records call one of its clients.

        >>> Site("north", "", (3,)).client_name(3), Site("south", "", (4, 5)).client_name(5)
        ('site north', 'site south, client 5')
        """
        return f"site {self.name}" + (f", client {client}" if len(self.clients) > 1 else "")


@dataclass(frozen=True)
class Roster:
    """The sites that may take part in a run.

    Args:
        sites: all sites, also those that were revoked.
    """

    sites: tuple[Site, ...] = ()

    def __post_init__(self) -> None:
        active = self.active()
        for what, values in (
            ("the name", [site.name for site in active]),
            ("client", [client for site in active for client in site.clients]),
        ):
            if twice := _repeated(values):
                raise ConfigError(f"two sites of the roster have {what} {twice[0]!r}; change or revoke one of them")
        if twice := _repeated([site.key for site in self.sites]):
            names = " and ".join(repr(site.name) for site in self.sites if site.key == twice[0])
            raise ConfigError(f"sites {names} of the roster have the same key ({fingerprint(twice[0])})")

    @classmethod
    def read(cls, path: Path) -> Roster:
        """The roster in a file."""
        table = read_toml(path)
        entries = table.get("sites", [])
        if table.keys() - {"sites"} or not isinstance(entries, list):
            raise ConfigError(f"{path}: expected nothing but tables [[sites]], not {visible(str(list(table)), 100)}")
        try:
            return cls(tuple(_site(entry, f"site {number}") for number, entry in enumerate(entries, 1)))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def write(self, path: Path) -> None:
        """Write the roster to a file; one that exists keeps its permissions and its owner."""
        tables = [
            dumps({"name": site.name, "key": site.key, "clients": list(site.clients), "revoked": site.revoked})
            for site in self.sites
        ]
        before = path.stat() if path.exists() else None
        write_atomically(path, "\n".join(f"[[sites]]\n{table}" for table in tables).encode())
        path.chmod(before.st_mode & 0o777 if before else 0o644)  # the server may run as another user
        if before and os.name == "posix":
            with suppress(PermissionError):
                os.chown(path, before.st_uid, before.st_gid)

    def active(self) -> tuple[Site, ...]:
        """The sites that are not revoked."""
        return tuple(site for site in self.sites if not site.revoked)

    def site(self, name: str) -> Site | None:
        """The site of a name: the one that is not revoked, if there is one; None if there is none."""
        found = [site for site in self.sites if site.name == name]
        return min(found, key=lambda site: site.revoked, default=None)

    def keys(self) -> dict[int, str]:
        """The public key of the site of each client."""
        return {client: site.key for site in self.active() for client in site.clients}

    def add(self, name: str, key: str, clients: int | None = None) -> Roster:
        """A roster with one more site, which gets the lowest numbers that are free.

        Args:
            name: its name. One that was revoked may be added again with a new key, and keeps its clients if it can.
            key: its public key in OpenSSH form.
            clients: how many clients it has; by default 1, or as many as it had.
        """
        key = public_key(key, "the key")
        known = self.site(name)
        if known and not known.revoked:
            raise ConfigError(f"site {name!r} is on the roster; to change its key write: thinwire site revoke {name}")
        for other in self.sites:
            if other.key == key:
                state = "was revoked" if other.revoked else "is on the roster"
                line = f"this key is that of site {other.name!r}, which {state}; write: thinwire site key FILE"
                raise ConfigError(line)
        taken = self.keys().keys()
        count = clients if clients is not None else len(known.clients) if known else 1
        if not 1 <= count <= MOST_CLIENTS:
            raise ConfigError(f"a site has 1 to {MOST_CLIENTS:,} clients, not {count}")
        old = [client for client in known.clients if client not in taken] if known else []
        free = (i for i in range(len(taken) + count + len(old)) if i not in taken and i not in old)
        numbers = [*old, *free][:count]
        entry = {"name": name, "key": key, "clients": sorted(numbers)}
        return Roster((*self.sites, _site(entry, "this site")))

    def revoke(self, name: str) -> Roster:
        """A roster in which a site is revoked; its clients are free."""
        known = self.site(name)
        if known is None:
            raise UnknownName("site", visible(name, 64), [site.name for site in self.active()])
        if known.revoked:
            raise ConfigError(f"site {name!r} was revoked before")
        return Roster(tuple(replace(site, revoked=True) if site is known else site for site in self.sites))

    def proven(self, report: Report, statement: bytes) -> Site:
        """The site that a node has proven to be; a WireError if it has not.

        Args:
            report: what the node sent.
            statement: what it must have signed.
        """
        if not report.site:
            raise WireError("it names no site, and the server has a roster; write --node-config 'site=\"NAME\"'")
        shown = repr(visible(report.site, 64))
        site = self.site(report.site)
        if site is None:
            raise WireError(f"site {shown} is not on the roster; on the server write: thinwire site add NAME KEY.pub")
        if not is_signed(site.key, statement, report.signature):
            raise WireError(f"its key is not that of site {shown} on the roster")
        if site.revoked:
            raise WireError(f"site {shown} was revoked")
        return site


def _site(entry: Any, what: str) -> Site:
    """A site from its table in the file."""
    if not isinstance(entry, dict) or entry.keys() - _FIELDS.keys():
        raise ConfigError(f"{what} must be a table with {', '.join(_FIELDS)}, not {visible(str(entry), 100)}")
    given = {"revoked": False, **entry}
    for field, kind in _FIELDS.items():
        if not isinstance(given.get(field), kind):
            shown = visible(repr(given.get(field, "nothing")), 60)
            raise ConfigError(f"{what}: {field} is {shown}, expected a {kind.__name__}")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", given["name"]):
        shown = visible(repr(given["name"]), 80)
        raise ConfigError(f"{what}: name is {shown}, expected 1 to 64 letters, digits, - and _, such as north")
    clients = given["clients"]
    right = all(type(client) is int and 0 <= client < MOST_CLIENTS for client in clients)
    if not clients or not right or _repeated(clients):
        shown = visible(str(clients), 60)
        raise ConfigError(f"{what}: clients is {shown}, expected different numbers from 0, such as [0]")
    key = public_key(given["key"], f"{what}: key")
    return Site(given["name"], key, tuple(clients), given["revoked"])


def _repeated(values: list[Any]) -> list[Any]:
    """The values that occur more than once."""
    return [value for value, times in Counter(values).items() if times > 1]


class RosterFile:
    """The roster of a run, which is read again when its file changes. A file that is damaged changes nothing.

    Args:
        path: the file.
        log: receives a line if the file cannot be read during the run.
    """

    def __init__(self, path: Path, log: Log) -> None:
        if not path.is_absolute():
            raise ConfigError(f"roster is {str(path)!r}, expected the whole path, such as /etc/thinwire/{FILE}")
        self.path, self.log = path, log
        self._state = self._stat()
        self._roster = Roster.read(path)

    def __call__(self) -> Roster:
        """The roster as it is now; the same object while it does not change."""
        if (now := self._stat()) != self._state:
            self._state = now
            try:
                new = Roster.read(self.path)
                self._roster = self._roster if new == self._roster else new
            except ConfigError as error:
                self.log(f"the roster was changed but cannot be used, so the old one stays: {error}")
        return self._roster

    def _stat(self) -> tuple[int, ...]:
        try:
            found = self.path.stat()
            return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns  # the last: permissions
        except OSError:
            return ()


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Keep other processes from changing a roster at the same time."""
    try:
        import fcntl
    except ImportError:  # this system has no such lock
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# -- on a node ---------------------------------------------------------------------------------------------------------


def clients_of_node(node_config: Mapping[str, Any], clients: int) -> list[int]:
    """The clients of a node: those whose index modulo `num-partitions` is its `partition-id`.

    >>> clients_of_node({"partition-id": 1, "num-partitions": 4}, 10)
    [1, 5, 9]
    """
    part, parts = node_config.get("partition-id"), node_config.get("num-partitions")
    if not (isinstance(part, int) and isinstance(parts, int) and 0 <= part < parts):
        raise ConfigError(f"--node-config needs partition-id=0 num-partitions={clients} (from 0), not {node_config!r}")
    return list(range(part, clients, parts))


def introduce(
    node_config: Mapping[str, Any], run: str, nonce: bytes, node: int, clients: int, software: Software
) -> dict[str, Any]:
    """The fields of the response to the server's question: software, and clients or the proof of a site.

    Args:
        node_config: the `--node-config`; with a roster `site`, and `site-key` unless `thinwire site start` got
            `--auth-supernode-private-key`; without one `partition-id` and `num-partitions`.
        run: the name of the run.
        nonce: of the question; empty if the server has no roster.
        node: Flower's node id.
        clients: number of clients of the experiment.
        software: that of this node.
    """
    fields = software._asdict()
    site = str(node_config.get("site", ""))
    if not nonce:
        if site and "partition-id" not in node_config:
            raise ConfigError(
                f"--node-config names site {site!r}, but the server has no roster; start the run with "
                "-c 'roster=\"/path/roster.toml\"', or name partition-id and num-partitions"
            )
        return {**fields, "clients": clients_of_node(node_config, clients)}
    if not site:  # the server refuses it with the reason
        return fields
    statement = Report(software, site=site).statement(run, nonce, node)
    return {**fields, "site": site, "signature": sign(_key_file(node_config, site), statement)}


def site_keys(node_config: Mapping[str, Any]) -> SiteKeys | None:
    """The keys with which a site signs and checks messages of secure aggregation; None if it has no roster.

    Args:
        node_config: the `--node-config`: `site`, and `roster`, this site's own copy, which the server cannot change.
    """
    file = str(node_config.get("roster", ""))
    if not file:
        return None
    site = str(node_config.get("site", ""))
    if not site:
        raise ConfigError('--node-config has a roster, but does not name the site; write site="north"')
    return SiteKeys(_key_file(node_config, site), Roster.read(Path(file)).keys())


def _key_file(node_config: Mapping[str, Any], site: str) -> Path:
    """The private key of this node's site."""
    file = str(node_config.get("site-key") or os.environ.get(KEY_VARIABLE, ""))
    if not file:
        raise ConfigError(
            f"site {site!r} has no key here; give `thinwire site start` --auth-supernode-private-key FILE, or name it "
            'in --node-config: site-key="/path"'
        )
    return Path(file)


# -- on the server -----------------------------------------------------------------------------------------------------


class Admission:
    """The nodes of a run. A line is logged when a node is refused or, with a roster, a site joins or leaves.

    Args:
        software: that of the server.
        count: number of clients.
        sites: returns the roster as it is now; None without a roster.
        log: receives the lines.
    """

    def __init__(self, software: Software, count: int, sites: Callable[[], Roster] | None, log: Log) -> None:
        self.software, self.count, self.log, self._read = software, count, log, sites
        self.serves: dict[int, frozenset[int]] = {}  # clients by node
        self.site_of: dict[int, Site] = {}  # by node
        self.refused: set[int] = set()  # nodes that are not asked again until something changes
        self.put_off: dict[int, float] = {}  # nodes, and until when they are not asked again
        self.roster = sites() if sites else None
        self._said: dict[int, str] = {}  # the last line about a node: each is logged once
        for site in self._active():
            if why := self._beyond(site):
                raise ConfigError(why)

    def clients(self) -> frozenset[int]:
        """The clients of all nodes that are used."""
        return frozenset().union(*self.serves.values())

    def sites(self) -> dict[int, str]:
        """The name of the site of each client; empty without a roster."""
        return {client: site.name for site in self._active() for client in site.clients}

    def name(self, client: int) -> str:
        """What logs and records call a client."""
        found = (site.client_name(client) for site in self._active() if client in site.clients)
        return next(found, f"client {client}")

    def reread(self) -> None:
        """Read the roster, and stop using the nodes of sites that were revoked or changed."""
        if self._read is None or (now := self._read()) is self.roster:
            return
        before, self.roster = {site.name: site for site in self._active()}, now
        after = {site.name: site for site in self._active()}
        for name in sorted(before.keys() - after.keys()):
            self.log(f"roster: site {name} was revoked or removed")
        for name in sorted(after.keys() - before.keys()):
            self.log(f"roster: site {name} was added")
        for node, site in list(self.site_of.items()):
            if after.get(site.name) != site:
                self._drop(node)
        self.refused.clear()

    def to_ask(self, here: Set[int]) -> list[int]:
        """Forget the nodes that left; returns those that must be asked what they are.

        Args:
            here: the nodes that are connected.
        """
        self.reread()
        gone = self.serves.keys() - here
        for node in gone:
            if node in self.site_of:
                self.log(f"site {self.site_of[node].name} left (node {node})")
            self._drop(node)
        self.refused = set() if gone else self.refused & here  # what one has lost, another may have
        now = time.monotonic()
        self.put_off = {node: until for node, until in self.put_off.items() if until > now}
        return sorted(here - self.serves.keys() - self.refused - self.put_off.keys())

    def admit(self, node: int, report: Report, run: str, nonce: bytes) -> str:
        """Use a node, or refuse it; returns why it was refused, or "".

        Args:
            node: Flower's node id.
            report: what it sent, not trusted.
            run: the name of this run.
            nonce: what it was asked with.
        """
        who, clients, site = f"node {node}", report.clients, None
        if self.roster is not None:
            try:
                site = self.roster.proven(report, report.statement(run, nonce, node))
            except WireError as error:
                return self.refuse(node, str(error))
            who, clients = f"site {site.name} (node {node})", frozenset(site.clients)
        if why := self.software.difference(report.software) or self._taken(site, clients):
            return self.refuse(node, why, who)
        self.serves[node] = clients
        if site:
            self.site_of[node] = site
            shown = ", ".join(str(client) for client in site.clients[:20]) + " ..." * (len(clients) > 20)
            self.log(f"site {site.name} joined (node {node}): client{'s' * (len(clients) > 1)} {shown}")
        self._said.pop(node, None)
        return ""

    def refuse(self, node: int, why: str, who: str = "") -> str:
        """Do not use a node until something changes; returns why, on one line."""
        why = visible(why, 300)
        self.refused.add(node)
        self._say(node, f"{who or f'node {node}'} is not used: {why}")
        return why

    def postpone(self, node: int, seconds: float, why: str) -> None:
        """Ask a node again after some time."""
        self.put_off[node] = time.monotonic() + seconds
        self._say(node, f"node {node} {why}")

    def _taken(self, site: Site | None, clients: frozenset[int]) -> str:
        """Why a node cannot have these clients; "" if it can."""
        if site:
            other = [node for node, known in self.site_of.items() if known.name == site.name]
            if other:
                return f"site {site.name} is already connected as node {other[0]}; stop one of the two"
            return self._beyond(site)
        if not clients <= frozenset(range(self.count)):
            return f"it reports clients {sorted(clients)[:5]}, there are {self.count}"
        if taken := clients & self.clients():
            return f"it reports client {min(taken)}, which another node has"
        return ""

    def _beyond(self, site: Site) -> str:
        if (last := max(site.clients)) < self.count:
            return ""
        return f"site {site.name} has client {last} on the roster, the experiment has clients 0 to {self.count - 1}"

    def _active(self) -> tuple[Site, ...]:
        return self.roster.active() if self.roster else ()

    def _drop(self, node: int) -> None:
        self.serves.pop(node, None)
        self.site_of.pop(node, None)

    def _say(self, node: int, line: str) -> None:
        if self._said.get(node) != line:
            self._said[node] = line
            self.log(line)
