"""Batches of local training: order of examples, short batches, number of steps."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thinwire.core.key import Key
from thinwire.errors import ConfigError
from thinwire.training.batches import Local, plan_batches, plan_rounds

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def keys(n: int, seed: int = 0) -> list[Key]:
    return [Key(seed).fold("client", i) for i in range(n)]


@given(sizes, st.integers(1, 3), st.integers(0, 17))
def test_every_example_counts_once_in_each_epoch(clients, epochs, batch):
    plan = plan_batches(clients, keys(len(clients)), Local(epochs=epochs, batch=batch))
    for i, n in enumerate(clients):
        per_epoch = -(-n // min(batch or n, n))
        seen = [plan.index[i, s, : plan.rows[i, s]].tolist() for s in range(epochs * per_epoch)]
        for epoch in range(epochs):
            once = chain(*seen[epoch * per_epoch : (epoch + 1) * per_epoch])
            assert sorted(once) == list(range(n))
        assert (plan.rows[i, epochs * per_epoch :] == 0).all()


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(1, 2), st.integers(0, 9), st.integers(0, 3))
def test_rounds_planned_together_have_the_batches_of_each(rounds, epochs, batch, steps):
    local = Local(epochs=epochs, batch=batch, steps=steps)
    given = [(clients, keys(len(clients), seed)) for seed, clients in enumerate(rounds)]
    for one, together in zip(given, plan_rounds(given, local), strict=True):
        alone = plan_batches(*one, local)
        assert np.array_equal(alone.index, together.index)
        assert np.array_equal(alone.rows, together.rows)


@given(sizes, st.integers(0, 17))
def test_a_short_batch_repeats_its_own_examples(clients, batch):
    plan = plan_batches(clients, keys(len(clients)), Local(batch=batch))
    for index, rows in zip(plan.index.reshape(-1, plan.index.shape[-1]), plan.rows.reshape(-1), strict=True):
        if rows:
            own = set(index[:rows].tolist())
            assert set(index.tolist()) == own
            assert index.tolist() == [index[j % rows] for j in range(len(index))]


def test_all_batches_have_the_width_of_the_widest():
    plan = plan_batches([3, 50], keys(2), Local(batch=8))
    assert plan.index.shape == (2, 7, 8)
    assert plan.rows.tolist() == [[3, 0, 0, 0, 0, 0, 0], [8, 8, 8, 8, 8, 8, 2]]
    assert plan_batches([3, 5], keys(2), Local(batch=100)).index.shape == (2, 1, 5)


def test_batch_zero_takes_all_examples_in_one_step():
    plan = plan_batches([3, 5], keys(2), Local(batch=0, epochs=2))
    assert plan.rows.tolist() == [[3, 3], [5, 5]]


@pytest.mark.parametrize("steps", [1, 4, 11])
def test_steps_replace_epochs(steps):
    plan = plan_batches([10, 3], keys(2), Local(epochs=7, batch=4, steps=steps))
    assert plan.rows.shape == (2, steps)
    assert (plan.rows > 0).all()
    assert plan.rows[0].tolist() == ([4, 4, 2] * 4)[:steps]
    assert plan.rows[1].tolist() == [3] * steps


def test_steps_continue_through_whole_epochs():
    plan = plan_batches([10], keys(1), Local(batch=4, steps=6))
    seen = [plan.index[0, s, : plan.rows[0, s]].tolist() for s in range(6)]
    assert sorted(chain(*seen[:3])) == sorted(chain(*seen[3:])) == list(range(10))
    assert seen[:3] != seen[3:], "each epoch has another order"


def test_the_order_depends_on_the_key_alone():
    local = Local(epochs=2, batch=4)
    first, again = (plan_batches([10, 7], keys(2), local) for _ in range(2))
    assert np.array_equal(first.index, again.index)
    alone = plan_batches([7], keys(2)[1:], local)
    assert np.array_equal(first.index[1, :4], alone.index[0]), "batches do not depend on other clients"
    assert not np.array_equal(first.index, plan_batches([10, 7], keys(2, seed=1), local).index)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"epochs": -1}, "epochs"), ({"batch": -1}, "batch"), ({"steps": -1}, "steps")],
)
def test_invalid_settings_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        Local(**settings)
