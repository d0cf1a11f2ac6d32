"""SuperNodes with low latency: short waits while there is work, Flower's options, and the versions of Flower."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from thinwire.errors import ConfigError
from thinwire.flower.node import AdaptiveTime, Bell, _shorten_waits, node, why_not


class Clock:
    """The time of a test: only waits advance it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("thinwire.flower.node.time", clock)
    return clock


def slept(adaptive: AdaptiveTime, seconds: float) -> float:
    began = adaptive.monotonic()
    adaptive.sleep(seconds)
    return pytest.approx(adaptive.monotonic() - began)


def test_waits_are_short_after_work_and_grow_when_idle(clock):
    adaptive = AdaptiveTime(clock, Bell())
    assert slept(adaptive, 0.5) == 0.5 / 20
    adaptive.last_work = clock.now - 1.0  # idle for a second
    assert slept(adaptive, 0.5) == 0.2
    adaptive.last_work -= 1000.0
    assert slept(adaptive, 0.3) == 0.3 / 20  # a wait of another length: there was work
    adaptive.last_work -= 1000.0
    assert slept(adaptive, 0.3) == 0.3  # never longer than Flower's wait
    adaptive.last_work = clock.now
    assert slept(adaptive, 0.3) == 0.3 / 20


def test_polls_that_take_long_are_repeated_less_often(clock):
    adaptive = AdaptiveTime(clock, Bell())
    adaptive.sleep(0.8)
    adaptive.last_work = clock.now
    adaptive.woke -= 5.0  # the poll after the last wait took five seconds
    assert slept(adaptive, 0.8) == 0.2  # a quarter of Flower's wait


def test_a_wait_ends_when_the_other_process_has_something_to_do():
    has_come = Bell()
    worker, supernode = AdaptiveTime(has_come), AdaptiveTime(Bell(), has_come)
    supernode.sleep(0.01)  # a wait of another length than the last one: there was work
    worker.sleep(600.0)  # does not last
    assert not has_come.wait(0.0)  # one call ends one wait
    supernode.sleep(0.01)
    assert not has_come.wait(0.0)  # there was no more work
    for _ in range(100_000):  # a full pipe does not block
        has_come.ring()


def test_the_clock_of_a_module_is_replaced(monkeypatch):
    module = type(sys)("flower_module")
    module.time = time
    monkeypatch.setitem(sys.modules, "flower_module", module)
    assert _shorten_waits("flower_module", adaptive := AdaptiveTime(Bell())).time is adaptive


def test_worker_process_ends_with_its_parent():
    """A process that only sleeps exits soon after its parent."""
    code = (
        "import os, time\nfrom thinwire.flower.node import _exit_with\n"
        "if os.fork() == 0:\n    _exit_with(os.getppid())\n    print(os.getpid(), flush=True)\n    time.sleep(3600)\n"
        "time.sleep(0.5)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=1200)
    assert done.stdout  # it ran, and its end of the pipe is closed, so it has ended


def test_node_without_flower_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[flower\]'"):
        node([])


def test_only_known_versions_of_flower_are_used():
    assert why_not("1.43.0") == "flwr 1.43.0 is not a version known to work (1.40, 1.41, 1.42)"
    pytest.importorskip("flwr")
    assert why_not() == ""


def test_with_another_version_of_flower_its_own_node_is_started(monkeypatch, tmp_path, capsys):
    pytest.importorskip("flwr")
    started = []
    monkeypatch.setattr("thinwire.flower.node.KNOWN", ("0.1",))
    monkeypatch.setattr("thinwire.flower.node.with_path", lambda command: ["/bin/" + command[0], *command[1:]])
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command) or sys.exit(0))
    with pytest.raises(SystemExit):
        node(["--superlink", "here:1"])
    assert started == [("/bin/flower-supernode", ["/bin/flower-supernode", "--superlink", "here:1"])]
    assert "is not a version known to work (0.1); running flower-supernode instead" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--app cannot be kept here: .* install one of these versions"):
        node([], tmp_path)
