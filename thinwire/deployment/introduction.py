"""What a node says of itself when the server asks: its software, and its clients or the proof of its site."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.deployment.jobs import clients_of_node
from thinwire.deployment.roster import Roster
from thinwire.errors import ConfigError
from thinwire.flower.hello import Claim, Software
from thinwire.flower.secure.site_keys import SiteKeys
from thinwire.flower.site_key import sign

KEY_VARIABLE = "THINWIRE_SITE_KEY"  # `thinwire node` sets it to the key of --auth-supernode-private-key


class Asked(NamedTuple):
    """The question of the server, and the node that it asks."""

    run: str
    nonce: bytes  # empty if the server has no roster
    node: int  # Flower's node id
    clients: int  # number of clients of the experiment


def introduce(node_config: Mapping[str, Any], asked: Asked, software: Software) -> dict[str, Any]:
    """The fields of the response (`thinwire/flower/hello.py`).

    Args:
        node_config: the `--node-config`; with a roster `site`, and `site-key` unless `thinwire node` was started with
            `--auth-supernode-private-key`; without one `partition-id` and `num-partitions`.
        asked: the question.
        software: that of this node.
    """
    fields = software._asdict()
    site = str(node_config.get("site", ""))
    if not asked.nonce:
        if site and "partition-id" not in node_config:
            raise ConfigError(
                f"--node-config names site {site!r}, but the server has no roster; start the run with "
                "-c 'roster=\"/path/roster.toml\"', or name partition-id and num-partitions"
            )
        return {**fields, "clients": clients_of_node(node_config, asked.clients)}
    if not site:  # the server refuses it with the reason
        return fields
    statement = Claim(asked.run, asked.nonce, asked.node, site, software).statement()
    return {**fields, "site": site, "signature": sign(_key_file(node_config, site), statement)}


def clients_here(node_config: Mapping[str, Any], clients: int) -> list[int]:
    """The clients that a node trains if it is asked to: of a site all, since the roster of the server assigns them.

    Args:
        node_config: the `--node-config`.
        clients: number of clients of the experiment.
    """
    return list(range(clients)) if node_config.get("site") else clients_of_node(node_config, clients)


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
            f"site {site!r} has no key here; start `thinwire node` with --auth-supernode-private-key FILE, or name it "
            'in --node-config: site-key="/path"'
        )
    return Path(file)
