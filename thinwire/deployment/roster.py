"""The roster: the sites that may take part in a run, each with a name, a key and the numbers of its clients.

    [[sites]]
    name = "north"
    key = "ecdsa-sha2-nistp384 AAAA..."
    clients = [0]
    revoked = false

Of the sites that are not revoked, names and clients are unique; keys are unique among all, so a key that was revoked
does not return. A site whose key was lost is revoked and added again under its name with a new key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.files import write_atomically
from thinwire.experiments.toml import dumps, read_toml
from thinwire.flower.hello import Site
from thinwire.flower.site_key import fingerprint, public_key

FILE = "roster.toml"
MOST_CLIENTS = 1_000_000  # a number above is a mistake
_FIELDS = {"name": str, "key": str, "clients": list, "revoked": bool}


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

    def site_of_key(self, key: str) -> Site | None:
        """The site that has or had a public key."""
        return next((site for site in self.sites if site.key == key), None)

    def site_of(self, client: int) -> Site | None:
        """The site that has a client."""
        return next((site for site in self.active() if client in site.clients), None)

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
        if other := self.site_of_key(key):
            state = "was revoked" if other.revoked else "is on the roster"
            raise ConfigError(f"this key is that of site {other.name!r}, which {state}; write: thinwire site key FILE")
        taken = {client for site in self.active() for client in site.clients}
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
    seen: set[Any] = set()
    return [value for value in values if value in seen or seen.add(value)]  # type: ignore[func-returns-value]


class RosterFile:
    """The roster of a run, which is read again when its file changes. A file that is damaged changes nothing.

    Args:
        path: the file.
        log: receives a line if the file cannot be read during the run.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self.path, self.log = path, log
        self._state = self._stat()
        self._roster = Roster.read(path)

    @classmethod
    def from_config(cls, run_config: Mapping[str, Any], log: Callable[[str], None]) -> RosterFile | None:
        """The roster that a run configuration names; None if it names none."""
        name = str(run_config.get("roster", ""))
        if name and not Path(name).is_absolute():
            raise ConfigError(f"roster is {name!r}, expected the whole path, such as /etc/thinwire/{FILE}")
        return cls(Path(name), log) if name else None

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
