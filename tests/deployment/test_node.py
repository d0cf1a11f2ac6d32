"""SuperNodes with low latency: short waits while there is work, and Flower's options."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from thinwire.deployment.node import AdaptiveTime, _shorten_waits, node
from thinwire.errors import ConfigError


def slept(adaptive: AdaptiveTime, seconds: float) -> float:
    began = time.perf_counter()
    adaptive.sleep(seconds)
    return time.perf_counter() - began


def test_waits_are_short_after_work_and_grow_when_idle():
    adaptive = AdaptiveTime()
    assert slept(adaptive, 0.5) < 0.2
    adaptive.last_work -= 1.0  # idle for a second
    assert 0.2 <= slept(adaptive, 0.5) < 0.4
    adaptive.last_work -= 1000.0
    assert slept(adaptive, 0.3) < 0.2  # a wait of another length: there was work
    adaptive.last_work -= 1000.0
    assert 0.3 <= slept(adaptive, 0.3) < 0.6  # never longer than Flower's wait
    adaptive.busy()
    assert slept(adaptive, 0.3) < 0.2
    assert adaptive.monotonic is time.monotonic


def test_only_modules_that_import_time_are_changed():
    module = type(sys)("module")
    _shorten_waits(module, AdaptiveTime())
    assert not hasattr(module, "time")
    module.time = time
    _shorten_waits(module, adaptive := AdaptiveTime())
    assert module.time is adaptive


def test_worker_process_ends_with_its_parent():
    """A process that only sleeps exits soon after its parent."""
    code = (
        "import os, time\nfrom thinwire.deployment.node import _exit_with\n"
        "if os.fork() == 0:\n    _exit_with(os.getppid())\n    print(os.getpid(), flush=True)\n    time.sleep(60)\n"
        "time.sleep(0.5)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=30)
    assert done.stdout  # it ran, and its end of the pipe is closed, so it has ended
    assert time.monotonic() - began < 20


def test_node_without_flower_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[flower\]'"):
        node([])


def test_isolation_cannot_be_set():
    pytest.importorskip("flwr")
    with pytest.raises(ConfigError, match="sets --isolation"):
        node(["--isolation=subprocess"])
