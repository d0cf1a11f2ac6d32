"""The roster: its file, its rules, its command, and a file that changes during a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.test_cli import error_line
from thinwire.errors import ConfigError, UnknownName
from thinwire.flower.sites import Roster, RosterFile, Site
from thinwire.secure.keys import fingerprint, public_key


@cache
def key(number: int, curve: str = "nistp384") -> str:
    """The public key of a private key that is this number."""
    curves = {"nistp256": ec.SECP256R1, "nistp384": ec.SECP384R1, "nistp521": ec.SECP521R1}
    public = ec.derive_private_key(number, curves[curve]()).public_key()
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def three() -> Roster:
    return Roster((Site("north", key(1), (0,)), Site("south", key(2), (1, 2)))).add("east", key(3))


def test_sites_get_the_lowest_free_clients():
    roster = three()
    assert [(site.name, site.clients) for site in roster.sites] == [("north", (0,)), ("south", (1, 2)), ("east", (3,))]
    assert {client: site.key for client, site in roster.by_client.items()} == {
        0: key(1),
        1: key(2),
        2: key(2),
        3: key(3),
    }
    after = roster.revoke("south").add("west", key(4))
    assert after.site("west").clients == (1,)
    assert after.site("south").revoked


def test_lost_key_is_replaced_and_never_returns():
    roster = three().revoke("south")
    again = roster.add("south", key(5))
    assert again.site("south").key == key(5)
    assert again.site("south").clients == (1, 2)
    assert len(again.sites) == 4  # the revoked key stays on record
    with pytest.raises(ConfigError, match="this key is or was that of site 'south'"):
        again.add("west", key(2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda roster: roster.add("north", key(9)),
            "'north' is on the roster; to change its key write: thinwire site",
        ),
        (lambda roster: roster.add("west", key(1)), "this key is or was that of site 'north'"),
        (lambda roster: roster.add("../west", key(9)), "name is '../west', expected 1 to 64 letters"),
        (lambda roster: roster.add("w" * 65, key(9)), "expected 1 to 64 letters"),
        (lambda roster: roster.add("west\n", key(9)), "expected 1 to 64 letters"),
        (lambda roster: roster.add("west", "ssh-ed25519 AAAA"), "expected a key such as ecdsa-sha2-nistp384"),
        (lambda roster: roster.add("west", key(9)[:-8]), "expected a key such as"),
        (lambda roster: roster.add("west", key(9).replace("AAAAE2V", "AAAAE2W")), "expected a key such as"),
        (lambda roster: roster.add("west", f"{key(9)[:-6]}AAAAAA"), "expected a key such as"),  # not on the curve
        (lambda roster: roster.add("west", f"{key(9)}\n{key(8)}"), "expected a key such as"),
        (lambda roster: roster.add("west", "-----BEGIN OPENSSH PRIVATE KEY-----"), "must stay at its site"),
        (lambda roster: roster.revoke("nroth"), "did you mean 'north'"),
        (lambda roster: roster.revoke("north").revoke("north"), "'north' was revoked before"),
    ],
)
def test_wrong_changes_are_one_line(change, words):
    with pytest.raises((ConfigError, UnknownName)) as error:
        change(three())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("curve", ["nistp256", "nistp384", "nistp521"])
def test_comment_of_a_key_is_dropped(curve):
    assert public_key(f" {key(1, curve)} me@north\n", "a key") == key(1, curve)


def test_file_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "roster.toml"
    three().revoke("east").write(file)
    assert Roster.read(file) == three().revoke("east")
    assert file.stat().st_mode & 0o777 == 0o644
    file.chmod(0o640)
    three().write(file)
    assert file.stat().st_mode & 0o777 == 0o640  # as the operator has set it
    file.write_text("")
    assert Roster.read(file) == Roster()


ENTRY = f'[[sites]]\nname = "north"\nkey = "{key(1)}"\nclients = [0]\n'
OTHER = f'[[sites]]\nname = "south"\nkey = "{key(2)}"\nclients = [1]\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[sites", "not valid TOML"),
        ("sites = 3", "expected tables [[sites]]"),
        ("sites = [3]", "expected tables [[sites]]"),
        ("others = []", "expected tables [[sites]]"),
        (f"{ENTRY}age = 3", "'age'"),
        ('[[sites]]\nname = "north"', "expected tables [[sites]] with name, key, clients = [0] and revoked = false"),
        (ENTRY.replace("[0]", "0"), "expected tables [[sites]]"),
        (ENTRY.replace("[0]", "[]"), "expected different numbers from 0"),
        (ENTRY.replace("[0]", "[0, 0]"), "expected different numbers"),
        (ENTRY.replace("[0]", "[-1]"), "it holds -1, expected int"),
        (ENTRY.replace("[0]", "[true]"), "it holds True, expected int"),
        (ENTRY.replace("[0]", "[0.0]"), "it holds 0.0, expected int"),
        (f'{ENTRY}revoked = "no"', "it holds 'no', expected bool"),
        (ENTRY + OTHER.replace("[1]", "[1, 0]"), "two sites of the roster have the same client, 0"),
        (ENTRY + OTHER.replace("south", "north"), "two sites of the roster have the same name, north"),
        (ENTRY + OTHER.replace(key(2), key(1)), "two sites of the roster have the same key, SHA256:"),
        (ENTRY + OTHER.replace(key(2), key(1)) + "revoked = true", "have the same key"),
    ],
)
def test_damaged_file_is_one_line(text, words, tmp_path):
    file = tmp_path / "roster.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        Roster.read(file)
    assert str(error.value).startswith(str(file))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_file_is_read_again_when_it_changes_and_a_damaged_one_changes_nothing(tmp_path):
    file, lines = tmp_path / "roster.toml", []
    three().write(file)
    current = RosterFile(file, lines.append)
    first = current()
    assert current() is first
    three().write(file)
    assert current() == first
    three().revoke("north").write(file)
    assert current() == three().revoke("north")
    kept = current()
    file.write_text("[[sites")
    assert current() is kept
    assert current() is kept
    file.unlink()
    assert current() is kept
    assert len(lines) == 2  # one for each change
    assert all("the old one stays" in line for line in lines)
    three().write(file)
    assert current() == three()


def test_a_run_without_its_roster_does_not_begin(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        RosterFile(tmp_path / "none.toml", print)


def test_sites_by_command(thinwire, tmp_path):
    for number, name in enumerate(("north", "south"), 1):
        (tmp_path / f"{name}.pub").write_text(f"{key(number)} {name}@example\n")
    assert thinwire("site", "add", "north", "north.pub")[0] == 0
    code, out, _ = thinwire("site", "add", "south", "south.pub")
    assert (code, out) == (0, f"south: clients [1], key {fingerprint(key(2))}\n")
    assert thinwire("site", "revoke", "north")[0] == 0
    code, out, _ = thinwire("site", "list")
    assert code == 0
    assert "revoked" in out
    assert fingerprint(key(2)) in out
    rows = json.loads(thinwire("site", "list", "--json")[1])
    assert [(row["name"], row["clients"], row["revoked"]) for row in rows] == [
        ("north", [0], True),
        ("south", [1], False),
    ]
    before = (tmp_path / "roster.toml").read_bytes()
    assert "is or was that of site" in error_line(thinwire("site", "add", "east", "north.pub"))
    assert "cannot be read" in error_line(thinwire("site", "add", "east", "none.pub"))
    assert (tmp_path / "roster.toml").read_bytes() == before
    assert "cannot be read" in error_line(thinwire("site", "list", "--roster", "none.toml"))
    assert not (tmp_path / "none.toml").exists()


def test_sites_added_at_the_same_time_are_all_kept(tmp_path):
    """Real processes, all waiting for the same moment."""
    code = (
        "import sys; from pathlib import Path; from thinwire.flower.sites import Roster, changing\n"
        "sys.stdin.read(); file = Path(sys.argv[1])\n"
        "with changing(file):\n"
        "    known = Roster.read(file) if file.exists() else Roster()\n"
        "    known.add(sys.argv[2], sys.argv[3]).write(file)\n"
    )
    file = tmp_path / "roster.toml"
    read, write = os.pipe()
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(file), f"site-{i}", key(1 + i)], stdin=read) for i in range(4)
    ]
    os.close(read)
    os.close(write)
    assert [process.wait(60) for process in started] == [0] * 4
    assert sorted(site.clients for site in Roster.read(file).sites) == [(0,), (1,), (2,), (3,)]


def test_key_of_a_site_is_written_once(thinwire, tmp_path):
    pytest.importorskip("cryptography")
    pytest.importorskip("flwr")
    code, out, _ = thinwire("site", "key", "site.north")
    assert (code, out.split()) == (0, ["site.north", "site.north.pub"])
    assert (tmp_path / "site.north").stat().st_mode & 0o777 == 0o600
    before = (tmp_path / "site.north").read_bytes()
    assert "site.north: File exists" in error_line(thinwire("site", "key", "site.north"))
    assert (tmp_path / "site.north").read_bytes() == before
    assert thinwire("site", "add", "north", "site.north.pub")[0] == 0
    assert "must stay at its site" in error_line(thinwire("site", "add", "south", "site.north"))
