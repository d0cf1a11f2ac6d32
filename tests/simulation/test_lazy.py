"""Tests of values that are computed when they are first needed."""

import threading

import pytest
from thinwire.federation.lazy import Lazy

from thinwire.core.parallel import start


def test_a_value_that_another_thread_began_is_computed_once():
    pool, threads, go = start(1), list[int](), threading.Event()

    def work() -> int:
        go.wait(600)
        threads.append(threading.get_ident())
        return 2

    lazy = Lazy(work)
    lazy.begin(pool)
    lazy.begin(pool)
    go.set()
    assert lazy() + lazy() == 4
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_an_error_of_the_other_thread_is_raised_where_the_value_is_used():
    lazy = Lazy(lambda: 1 // 0)
    lazy.begin(start(1))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            lazy()


def test_a_value_that_is_there_is_not_computed_again():
    calls = list[int]()
    lazy = Lazy(lambda: calls.append(1) or 3)
    assert lazy() == 3
    lazy.begin(start(1))
    assert lazy() == 3
    assert calls == [1]
