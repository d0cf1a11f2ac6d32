"""Tests of thread pools."""

import threading

import pytest
import torch

from thinwire.core.parallel import PARALLEL_BYTES, each, half_the_cores, on_one_core, start


def test_each_keeps_the_order_and_raises_the_first_error(three_cores):
    assert each(lambda x: x * x, range(20), PARALLEL_BYTES) == [x * x for x in range(20)]
    with pytest.raises(ZeroDivisionError):
        each(lambda x: 1 / x, [2, 1, 0], PARALLEL_BYTES)


def test_nested_calls_do_not_deadlock(three_cores):
    def outer(x: int) -> int:
        return sum(each(lambda y: x * y, range(10), PARALLEL_BYTES))

    assert each(outer, range(8), PARALLEL_BYTES) == [45 * x for x in range(8)]


def test_on_one_core_restricts_torch_but_not_each(three_cores):
    with on_one_core(), on_one_core():
        assert torch.get_num_threads() == 1
        together = threading.Barrier(3, timeout=600)  # passed only if three calls run at the same time
        assert len({*each(lambda _: (together.wait(), threading.get_ident())[1], range(3), PARALLEL_BYTES)}) == 3
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), on_one_core():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def test_torch_may_use_half_the_cores_for_a_while():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        with on_one_core():
            with half_the_cores():
                assert torch.get_num_threads() == 4
            assert torch.get_num_threads() == 1
            with pytest.raises(ZeroDivisionError), half_the_cores():
                raise ZeroDivisionError
            assert torch.get_num_threads() == 1
        with half_the_cores():
            assert torch.get_num_threads() == 4
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)

    def in_a_pool() -> int:
        with half_the_cores():
            return torch.get_num_threads()

    assert start(1).submit(in_a_pool).result() == 1
