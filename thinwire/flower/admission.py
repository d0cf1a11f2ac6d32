"""Which nodes are used, and for which clients.

Without a roster a node says which clients it has, and the first that names a client has it. With a roster a node proves
which site it is (`hello.py`), and the roster says which clients the site has. The roster may change during the run: a
site that was revoked or changed is asked again at once, and so are the nodes that were refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from thinwire.core.text import visible
from thinwire.errors import ConfigError, WireError
from thinwire.flower.hello import Claim, Report, Site, Sites, Software, proven_site

Log = Callable[[str], None]


class Admission:
    """The nodes of a run. A line is logged when a node is refused or, with a roster, a site joins or leaves.

    Args:
        software: that of the server.
        count: number of clients.
        sites: returns the sites that are known now; None without a roster.
        log: receives the lines.
    """

    def __init__(self, software: Software, count: int, sites: Callable[[], Sites] | None, log: Log) -> None:
        self.software, self.count, self.log = software, count, log
        self.serves: dict[int, frozenset[int]] = {}  # clients by node
        self.site_of: dict[int, Site] = {}  # by node
        self.refused: set[int] = set()  # nodes that are not asked again until something changes
        self.put_off: dict[int, float] = {}  # nodes, and until when they are not asked again
        self._read = sites
        self._sites = sites() if sites else None
        self._said: dict[int, str] = {}  # the last line about a node: each is logged once
        for site in self._sites.active() if self._sites else ():
            if why := self._beyond(site):
                raise ConfigError(why)

    @property
    def has_roster(self) -> bool:
        """Whether nodes must prove which site they are."""
        return self._sites is not None

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
        if self._read is None or (now := self._read()) is self._sites:
            return
        before, self._sites = {site.name: site for site in self._active()}, now
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
        try:
            site = self._proven(node, report, run, nonce)
        except WireError as error:
            return self.refuse(node, str(error))
        clients = frozenset(site.clients) if site else report.clients
        who = f"site {site.name} (node {node})" if site else f"node {node}"
        if why := self.software.difference(report.software) or self._taken(site, clients):
            return self.refuse(node, why, who)
        self.serves[node] = clients
        if site:
            self.site_of[node] = site
            self.log(f"site {site.name} joined (node {node}): {_listed(site.clients)}")
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

    def _proven(self, node: int, report: Report, run: str, nonce: bytes) -> Site | None:
        if self._sites is None:
            return None
        return proven_site(self._sites, Claim(run, nonce, node, report.site, report.software), report.signature)

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
        if max(site.clients) < self.count:
            return ""
        highest = self.count - 1
        return (
            f"site {site.name} has client {max(site.clients)} on the roster, the experiment has clients 0 to {highest}"
        )

    def _active(self) -> list[Site]:
        return list(self._sites.active()) if self._sites else []

    def _drop(self, node: int) -> None:
        self.serves.pop(node, None)
        self.site_of.pop(node, None)

    def _say(self, node: int, line: str) -> None:
        if self._said.get(node) != line:
            self._said[node] = line
            self.log(line)


def _listed(clients: tuple[int, ...]) -> str:
    """Numbers of clients, for a log.

    >>> _listed((3,)), _listed((1, 2))
    ('client 3', 'clients 1, 2')
    """
    shown = ", ".join(str(client) for client in clients[:20])
    return f"client{'s' * (len(clients) > 1)} {shown}{' ...' * (len(clients) > 20)}"
