"""Choice of the training backend: the fastest, cached; not measured where the choice could change results."""

import threading
import time

import pytest
from torch import nn

from tests.federation import digits_task, same_public
from tests.simulation.test_engine import bits, job, play
from thinwire.federation.local_engine import LocalEngine
from thinwire.training import autotune
from thinwire.training.autotune import Choice, Configuration, choose
from thinwire.training.inputs import UnsupportedModel


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("THINWIRE_PROBE", "on")
    monkeypatch.setattr(autotune, "_known", {})


@pytest.fixture
def clock(monkeypatch):
    """A clock that is advanced by hand."""
    now = [0.0]
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: now[0])
    return now


def test_the_fastest_backend_is_chosen_and_slow_ones_are_measured_once(clock):
    measured = []

    def run(one, clients):
        measured.append((one, clients))
        seconds = {"threads": 0.02, "vmap": 0.1, "loop": 0.03}[one.backend] * (0.5 if one.onednn else 1)
        clock[0] += seconds * clients

    choice = choose(["a"], ["threads", "vmap", "loop"], (False, True), 10, run)
    assert choice.configuration == Configuration("threads", True)
    assert "fastest of threads" in choice.reason
    assert {clients for one, clients in measured if one.backend == "vmap"} == {2}
    assert {clients for one, clients in measured if one.backend == "loop"} == {2, 10}
    measured.clear()
    assert choose(["a"], ["threads", "vmap", "loop"], (False, True), 10, run) == choice
    autotune._known.clear()  # as another process
    assert choose(["a"], ["threads", "vmap", "loop"], (False, True), 10, run) == choice
    assert not measured


def test_of_equally_fast_backends_the_first_is_chosen_and_failures_are_in_the_reason(clock):
    def run(one, clients):
        if one.backend == "threads":
            raise RuntimeError("no threads here")
        clock[0] += 0.1

    choice = choose(["b"], ["threads", "vmap", "loop"], (True, False), 4, run)
    assert choice.configuration == Configuration("vmap", True)
    assert choice.reason.startswith("threads failed: no threads here; fastest of vmap")


def test_speed_does_not_decide_for_models_that_draw_random_numbers():
    def run(one, clients):
        raise UnsupportedModel("it draws")

    assert choose(["c"], ["threads", "vmap"], (True, False), 4, run) == Choice(
        Configuration("vmap", True), "threads failed: it draws"
    )


def test_a_damaged_cache_is_written_again(clock, tmp_path):
    def run(one, clients):
        clock[0] += 0.1

    choose(["d"], ["threads"], (True, False), 4, run)
    (file,) = tmp_path.glob("*.npz")
    file.write_bytes(b"damaged")
    autotune._known.clear()
    assert choose(["d"], ["threads"], (True, False), 4, run).configuration.backend == "threads"


def test_processes_that_start_together_choose_the_same_backend(monkeypatch):
    class Empty(dict):
        """The cache of another process."""

        def __contains__(self, name):
            return False

    monkeypatch.setattr(autotune, "_known", Empty())
    together, measured, found = threading.Barrier(2), [], {}
    here = threading.local()  # a clock for each process, advanced by hand
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: getattr(here, "now", 0.0))

    def process(fast):
        def run(one, clients):
            measured.append(fast)
            time.sleep(0.001)  # the other process starts meanwhile
            here.now = getattr(here, "now", 0.0) + (0.001 if one.backend == fast else 0.004)

        together.wait()
        found[fast] = choose(["e"], ["threads", "vmap"], (True, False), 2, run)

    threads = [threading.Thread(target=process, args=(fast,)) for fast in ("threads", "vmap")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["threads"].configuration.backend == found["vmap"].configuration.backend == measured[0]
    assert len(set(measured)) == 1, "the other one waited for the result"


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_nothing_is_measured_if_the_result_cannot_be_stored(monkeypatch, tmp_path, place):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("THINWIRE_CACHE", str(file if place == "a file" else file / "below"))

    def run(one, clients):
        raise AssertionError("the next run might choose differently")

    choice = choose(["f"], ["threads", "vmap", "loop"], (False, True), 4, run)
    assert choice.configuration == Configuration("vmap", False)
    assert choice.reason.startswith("not measured, because the result cannot be stored in the cache folder: ")


def test_the_backend_is_chosen_before_the_first_round_and_the_same_again():
    (_, first, records), (_, second, again) = (play(job()) for _ in range(2))
    assert first[0].backend_reason == ""
    assert first[1].backend_reason.startswith("fastest of ")
    assert {state[4:6] for state in (*first[1:], *second[1:])} == {(first[-1].backend, first[-1].backend_reason)}
    assert isinstance(first[-1].onednn, bool)
    assert bits(records) == bits(again)
    assert same_public(first[-1].server.public, second[-1].server.public)
    _, given, _ = play(job(), LocalEngine(backend="loop"))
    assert (given[-1].backend, given[-1].backend_reason, given[-1].onednn) == ("loop", "given", None)


def test_a_model_with_dropout_is_trained_by_vmap():
    task = digits_task(nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10)))
    _, states, _ = play(job(task=task))
    assert (states[-1].backend, states[-1].backend_reason) == (
        "vmap",
        "threads failed: the model draws random numbers in training",
    )


def test_one_choice_of_onednn_is_not_tried_both_ways(tmp_path, monkeypatch):
    """Where oneDNN lacks the precision, torch would warn, and compute by other kernels."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "_known", {})
    seen = set()
    choice = choose(["g"], ["threads"], (False,), 2, lambda one, clients: seen.add(one.onednn))
    assert seen == {False}
    assert choice.configuration == Configuration("threads", False)
    assert "oneDNN" not in choice.reason
