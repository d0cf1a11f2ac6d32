"""Synchronizations and bytes by block equal those of the messages."""

from collections import Counter

from tests.federation import digits_task
from tests.parts import Pool, Turns
from thinwire.codecs import Raw, TopK
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.protocol import Budget, Method, Tier
from thinwire.schedules import AllBlocks, FedLAMA
from thinwire.sketches import Identity
from thinwire.training import Local
from thinwire.wire import message as wire


def run(method: Method, rounds: int = 6):
    """The counts of a run, and the same from its messages: rounds by block, bytes by block."""
    simulation = make_simulation(Engine(), Job(digits_task(), method, rounds, cohort=3, local=Local(batch=8, steps=2)))
    contract, messages = simulation.contract, []
    state = simulation.start()
    for _ in range(rounds):
        state, _ = simulation.round(state, lambda *message: messages.append(message))
    syncs, sizes = set(), Counter()
    for number, direction, client, data in messages:
        if direction == "up":
            body = wire.unpack_body(wire.unpack(data, contract.schema.sent_by(client)).bodies[0], contract.schema)
            spec = contract.coords.restrict(contract.coords.names if body.plan is None else body.plan)
            syncs |= {(number, name) for name in spec.names}
            if set(method.ups) == {Raw()} and method.sketch == Identity():
                for name, block in Raw().decode(body.fields[wire.COORDS], spec, None).items():
                    sizes[name] += len(block.numpy().tobytes())
    return state.sync_counts, Counter(name for _, name in syncs), sizes


def test_counts_equal_those_of_the_messages():
    for schedule in (AllBlocks(), AllBlocks(private=("2.*",)), Turns(2), FedLAMA(2)):
        sync_counts, syncs, sizes = run(Method(schedule=schedule))
        assert dict(sync_counts.syncs) == syncs
        assert dict(sync_counts.bytes_up) == sizes
        assert sizes


def test_counts_with_tiers():
    alike = Budget((Tier(), Tier(up=Raw())))
    assert run(Method(budget=alike))[0] == run(Method())[0]
    mixed = Budget((Tier(), Tier(up=TopK(0.5))), clients=(0, 1) * 3)
    assert run(Method(budget=mixed))[0].bytes_up is None


def test_bytes_by_block_are_unknown_where_a_codec_or_a_sketch_mixes_blocks():
    for method in (Method(up=TopK(0.5), schedule=FedLAMA(2)), Method(sketch=Pool())):
        sync_counts, syncs, _ = run(method, 4)
        assert dict(sync_counts.syncs) == syncs
        assert sync_counts.bytes_up is None
