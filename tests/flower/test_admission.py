"""Which nodes are used: without a roster by what they report, with one by what they prove."""

from __future__ import annotations

import pytest

from thinwire.flower.sites import Admission, Report, Software

OURS = Software(b"schema", "1.2")
NONCE, RUN = b"n" * 32, "0123456789abcdef"


def admission(count=4, sites=None):
    lines: list[str] = []
    found = Admission(OURS, count, sites, lines.append)
    found.nonce = NONCE if sites else b""
    return found, lines


def reports(*clients, **software):
    return Report(OURS._replace(**software), clients)


def test_node_is_used_for_the_clients_that_it_reports():
    nodes, lines = admission()
    assert list(nodes.to_ask({7, 8})) == [7, 8]
    assert nodes.admit(7, reports(0, 1), RUN) == ""
    assert nodes.admit(8, reports(2), RUN) == ""
    assert nodes.clients() == {0, 1, 2}
    assert list(nodes.to_ask({7, 8, 9})) == [9]
    assert list(nodes.to_ask({8})) == []
    assert nodes.clients() == {2}
    assert (set(nodes.known()), nodes.name(2), lines) == (set(), "client 2", [])


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (reports(1, version="1.1"), "it runs thinwire 1.1, the server 1.2; install the same version on both"),
        (reports(1, version=""), "it runs thinwire of an unknown version"),
        (reports(1, version="\x1b[2J\n"), "it runs thinwire \\x1b[2J\\n, the server"),
        (reports(1, schema=b"other"), "it runs another method, model or seed"),
        (reports(0, 1), "it reports client 0, which another node has"),
        (reports(1, 4), "it reports clients [1, 4], there are 4"),
        (reports(), "it reports clients [], there are 4"),
    ],
)
def test_node_is_refused_once_in_one_line_and_asked_again_when_another_left(report, words):
    nodes, lines = admission()
    nodes.admit(7, reports(0), RUN)
    assert words in nodes.admit(8, report, RUN)
    nodes.admit(8, report, RUN)
    (line,) = lines
    assert line.startswith("node 8 is not used: ")
    assert words in line
    assert line.isprintable()
    assert nodes.clients() == {0}
    assert list(nodes.to_ask({7, 8})) == []
    assert list(nodes.to_ask({8})) == [8]


def test_node_with_an_error_is_asked_later():
    nodes, lines = admission()
    assert list(nodes.to_ask({7})) == [7]
    nodes.postpone(7, 0.0, "node 7 could not report its clients: no data")
    assert list(nodes.to_ask({7})) == [7]
    nodes.postpone(7, 600.0, "node 7 could not report its clients: no data")
    assert list(nodes.to_ask({7})) == []
    assert lines == ["node 7 could not report its clients: no data"]


# -- with a roster -----------------------------------------------------------------------------------------------------


class Federation:
    """Sites with real keys, and the roster that the server has."""

    def __init__(self, folder, *names):
        pytest.importorskip("cryptography")
        from thinwire.flower.sites import Roster, Site
        from thinwire.secure.keys import make_key, read_public_key

        self.keys = {name: make_key(folder / name) for name in (*names, "stranger")}
        self.public = {name: read_public_key(folder / f"{name}.pub") for name in self.keys}
        clients = {"north": (0,), "south": (1, 2), "east": (3,)}
        self.roster = Roster(tuple(Site(name, self.public[name], clients[name]) for name in names))
        self.nodes, self.lines = admission(sites=lambda: self.roster)

    def says(self, site, node, key=None, *, nonce=NONCE, run=RUN, signed_for=None, **software):
        """The report of a node that signs with a key, by default that of its site."""
        from thinwire.secure.keys import sign

        own = OURS._replace(**software)
        report = Report(own, (0, 1, 2, 3), site)
        statement = report.statement(run, nonce, signed_for or node)
        return report._replace(signature=sign(self.keys[key or site], statement))

    def admit(self, site, node, key=None, **changes):
        return self.nodes.admit(node, self.says(site, node, key, **changes), RUN)


@pytest.fixture
def three(tmp_path):
    return Federation(tmp_path, "north", "south", "east")


def test_roster_says_which_clients_a_site_has(three):
    assert three.admit("south", 5) == ""
    assert three.nodes.clients() == {1, 2}  # although it reports all
    assert three.nodes.known() == {0, 1, 2, 3}
    assert (three.nodes.name(0), three.nodes.name(2)) == ("site north", "site south, client 2")
    assert three.lines == ["site south joined (node 5): clients 1, 2"]
    three.nodes.to_ask(set())
    assert three.lines[1:] == ["site south left (node 5)"]


def test_claimed_copied_and_unsigned_sites_are_refused(three):
    wrong_key = "its key is not that of site 'north' on the roster"
    assert three.admit("north", 5, "stranger") == wrong_key
    assert three.admit("north", 5, "south") == wrong_key
    for changes in ({"nonce": b"old"}, {"run": "another"}, {"signed_for": 6}):  # the proof of another time, run or node
        assert three.admit("north", 5, **changes) == wrong_key
    own = three.says("north", 5)
    altered = own._replace(software=OURS._replace(version="1.1"))  # what was signed is what counts
    for report in (altered, own._replace(signature=b""), own._replace(signature=b"x" * 10**6)):
        assert three.nodes.admit(5, report, RUN) == wrong_key
    assert "names no site" in three.nodes.admit(5, reports(0), RUN)
    assert "site 'west' is not on the roster" in three.admit("west", 5, "stranger")
    hostile = three.nodes.admit(5, own._replace(site="\x1b[2J" * 1000), RUN)
    assert hostile.isprintable()
    assert len(hostile) < 300
    assert three.nodes.clients() == set()
    assert three.admit("north", 5) == ""


def test_second_node_of_a_site_is_refused_until_the_first_left(three):
    assert three.admit("north", 5) == ""
    assert "site north is already connected as node 5" in three.admit("north", 6)
    assert three.lines[-1].startswith("site north (node 6) is not used: ")
    assert list(three.nodes.to_ask({5, 6})) == []
    assert list(three.nodes.to_ask({6})) == [6]
    assert three.admit("north", 6) == ""


def test_site_with_another_version_is_named(three):
    assert "it runs thinwire 1.1" in three.admit("north", 5, version="1.1")
    assert three.lines == [
        "site north (node 5) is not used: it runs thinwire 1.1, the server 1.2; install the same version on both"
    ]


def test_sites_join_and_leave_by_the_roster(three):
    three.admit("north", 5)
    three.admit("south", 6)
    assert "not on the roster" in three.admit("west", 7, "stranger")
    three.roster = three.roster.revoke("north").add("west", three.public["stranger"])
    assert list(three.nodes.to_ask({5, 6, 7})) == [5, 7]  # the revoked one, and the one that was refused
    assert three.nodes.clients() == {1, 2}
    assert three.admit("north", 5) == "site 'north' was revoked"
    assert three.admit("west", 7, "stranger") == ""
    assert three.nodes.clients() == {0, 1, 2}  # west has the client of north
    assert "roster: site north was revoked or removed" in three.lines
    assert "roster: site west was added" in three.lines


def test_site_with_a_new_key_must_prove_it(three, tmp_path):
    three.admit("north", 5)
    three.roster = three.roster.revoke("north").add("north", three.public["stranger"])
    assert list(three.nodes.to_ask({5})) == [5]
    assert three.admit("north", 5) == "its key is not that of site 'north' on the roster"
    assert three.admit("north", 6, "stranger") == ""


def test_site_beyond_the_clients_of_the_experiment_is_named_once_and_not_used(three):
    three.roster = three.roster.add("west", three.public["stranger"])  # while the run goes on
    three.nodes.reread()
    three.nodes.reread()
    beyond = "site west has client 4 on the roster, the experiment has clients 0 to 3; the run goes on without it"
    assert [beyond in line for line in three.lines] == [False, True]
    assert beyond in three.admit("west", 7, "stranger")
    assert three.admit("north", 5) == ""
    again, lines = admission(4, lambda: three.roster)  # after a restart
    assert [beyond in line for line in lines] == [True]
    assert "--clients 5" in lines[0]
    assert again.clients() == set()
