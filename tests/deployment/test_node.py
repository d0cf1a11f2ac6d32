"""A node that stays awake: short waits while there is work, and options that are Flower's."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from thinwire.deployment.node import Eager, _be_eager, node
from thinwire.errors import ConfigError


def slept(waits: Eager, seconds: float) -> float:
    began = time.perf_counter()
    waits.sleep(seconds)
    return time.perf_counter() - began


def test_waits_are_short_after_work_and_grow_with_idleness():
    waits = Eager()
    assert slept(waits, 0.5) < 0.2
    waits.since -= 1.0  # nothing to do for a second
    assert 0.2 <= slept(waits, 0.5) < 0.4
    waits.since -= 1000.0
    assert slept(waits, 0.3) < 0.2  # a wait of another length: something has happened
    waits.since -= 1000.0
    assert 0.3 <= slept(waits, 0.3) < 0.6  # never longer than Flower's own
    waits.busy()
    assert slept(waits, 0.3) < 0.2
    assert waits.monotonic is time.monotonic


def test_only_what_sleeps_by_the_module_is_hurried():
    theirs = type(sys)("theirs")
    _be_eager(theirs, Eager())
    assert not hasattr(theirs, "time")
    theirs.time = time
    _be_eager(theirs, waits := Eager())
    assert theirs.time is waits


def test_the_process_beside_a_node_ends_with_it():
    """A process that never looks up is gone soon after its parent."""
    code = (
        "import os, time\nfrom thinwire.deployment.node import _leave_with\n"
        "if os.fork() == 0:\n    _leave_with(os.getppid())\n    print(os.getpid(), flush=True)\n    time.sleep(60)\n"
        "time.sleep(0.5)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=30)
    assert done.stdout  # it ran; and what it wrote to is closed, so it is gone
    assert time.monotonic() - began < 20


def test_a_node_without_flower_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[flower\]'"):
        node([])


def test_isolation_is_not_to_be_chosen():
    pytest.importorskip("flwr")
    with pytest.raises(ConfigError, match="chooses --isolation itself"):
        node(["--isolation=subprocess"])
