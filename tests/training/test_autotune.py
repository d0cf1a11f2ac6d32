"""The race between ways of training: it picks what is fast, is kept, and is left out where it could change results."""

import threading
import time

import pytest
from tests.simulation.test_local import bits, job, play
from torch import nn

from tests.federation import digits_task, same_public
from thinwire.simulation import LocalEngine
from thinwire.training import autotune as probe
from thinwire.training.autotune import Choice, Way, choose
from thinwire.training.inputs import UnsupportedModel


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("THINWIRE_PROBE", "on")
    monkeypatch.setattr(probe, "_known", {})


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes only when told to."""
    now = [0.0]
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])
    return now


def test_the_fastest_wins_and_slow_ones_are_asked_once(clock):
    asked = []

    def run(way, clients):
        asked.append((way, clients))
        each = {"threads": 0.02, "vmap": 0.1, "loop": 0.03}[way.backend] * (0.5 if way.onednn else 1)
        clock[0] += each * clients

    choice = choose(["a"], ["threads", "vmap", "loop"], False, 10, run)
    assert choice.way == Way("threads", True)
    assert "fastest of threads" in choice.why
    assert {clients for way, clients in asked if way.backend == "vmap"} == {2}
    assert {clients for way, clients in asked if way.backend == "loop"} == {2, 10}
    asked.clear()
    assert choose(["a"], ["threads", "vmap", "loop"], False, 10, run) == choice
    probe._known.clear()  # as another process
    assert choose(["a"], ["threads", "vmap", "loop"], False, 10, run) == choice
    assert not asked


def test_among_equals_the_first_wins_and_failures_are_told(clock):
    def run(way, clients):
        if way.backend == "threads":
            raise RuntimeError("no threads here")
        clock[0] += 0.1

    choice = choose(["b"], ["threads", "vmap", "loop"], True, 4, run)
    assert choice.way == Way("vmap", True)
    assert choice.why.startswith("threads failed: no threads here; fastest of vmap")


def test_what_draws_random_numbers_is_not_decided_by_a_race():
    def run(way, clients):
        raise UnsupportedModel("it draws")

    assert choose(["c"], ["threads", "vmap"], True, 4, run) == Choice(Way("vmap", True), "threads failed: it draws")


def test_a_damaged_memory_is_made_anew(clock, tmp_path):
    def run(way, clients):
        clock[0] += 0.1

    choose(["d"], ["threads"], True, 4, run)
    (file,) = tmp_path.glob("*.npz")
    file.write_bytes(b"damaged")
    probe._known.clear()
    assert choose(["d"], ["threads"], True, 4, run).way.backend == "threads"


def test_processes_that_start_together_with_an_empty_cache_go_one_way(monkeypatch):
    class Forgetful(dict):
        """What another process knows: nothing."""

        def __contains__(self, name):
            return False

    monkeypatch.setattr(probe, "_known", Forgetful())
    together, raced, found = threading.Barrier(2), [], {}

    def process(fast):
        def run(way, clients):
            raced.append(fast)
            time.sleep(0.001 if way.backend == fast else 0.004)

        together.wait()
        found[fast] = choose(["e"], ["threads", "vmap"], True, 2, run)

    threads = [threading.Thread(target=process, args=(fast,)) for fast in ("threads", "vmap")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["threads"].way.backend == found["vmap"].way.backend == raced[0]
    assert len(set(raced)) == 1, "the other one waited, and took what was found"


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_where_nothing_can_be_kept_there_is_no_race(monkeypatch, tmp_path, place):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("THINWIRE_CACHE", str(file if place == "a file" else file / "below"))

    def run(way, clients):
        raise AssertionError("the next run might go another way")

    choice = choose(["f"], ["threads", "vmap", "loop"], False, 4, run)
    assert choice.way == Way("vmap", False)
    assert choice.why.startswith("no race, since its outcome cannot be kept in the cache folder: ")


def test_a_run_is_settled_before_its_first_round_and_again_the_same():
    (_, first, records), (_, second, again) = (play(job()) for _ in range(2))
    assert first[0].why == ""
    assert first[1].why.startswith("fastest of ")
    assert {state[4:6] for state in (*first[1:], *second[1:])} == {(first[-1].backend, first[-1].why)}
    assert isinstance(first[-1].onednn, bool)
    assert bits(records) == bits(again)
    assert same_public(first[-1].server.public, second[-1].server.public)
    _, asked, _ = play(job(), LocalEngine(backend="loop"))
    assert (asked[-1].backend, asked[-1].why, asked[-1].onednn) == ("loop", "asked for", None)


def test_dropout_goes_the_way_that_it_always_goes():
    task = digits_task(nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10)))
    _, states, _ = play(job(task=task))
    assert (states[-1].backend, states[-1].why) == (
        "vmap",
        "threads failed: the model draws random numbers while it trains",
    )
