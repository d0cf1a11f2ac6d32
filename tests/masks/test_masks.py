"""Masks: which coordinates are trained, which are pruned, and messages without positions."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import thinwire as tw
from tests.federation import SIZES, Federation, digits_task, records_of
from thinwire.core.tree import flatten, same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.masks import nonzero_b
from thinwire.protocol.upload import as_received, decode_upload
from thinwire.runs.config import resolve, update
from thinwire.runs.presets import preset
from thinwire.schedules.base import Plan
from thinwire.training import Local
from thinwire.wire import message as wire

ALL_CLIENTS = range(len(SIZES))
SPARSE = ("sparse-adapter", "adapter-lth", "fedsparsify", "spdst")
PRESETS = (*SPARSE, "federated-select", "hetlora", "full", "lowest-tier", "highest-tier")


def named(name: str, **changes) -> tw.Method:
    return replace(update(tw.Method(), preset("methods", name).table["method"]), **changes)


def values(federation: Federation, data: bytes) -> int:
    """The number of values in a message."""
    schema = federation.contract.schema
    return len(wire.unpack_body(wire.unpack(data, schema.sent_by(0)).bodies[0], schema).fields[wire.COORDS]) // 4


def supports(method: tw.Method, rounds: int):
    """A federation after some rounds, and the nonzero coordinates after each."""
    federation = Federation(method, local=Local(1, batch=8))
    nonzero = []
    for _ in range(rounds):
        federation.round((0, 1, 2))
        nonzero.append(flatten(federation.server.public.coords) != 0)
    return federation, nonzero


@pytest.mark.parametrize("name", ["sparse-adapter", "spdst"])
def test_coordinates_pruned_once_stay_zero_in_weights_and_optimizer_state(name):
    federation, nonzero = supports(named(name), 4)
    size = federation.contract.coords.size
    assert int(nonzero[0].sum()) == int(0.25 * size)
    assert all(torch.equal(one, nonzero[0]) for one in nonzero)
    for slot in ("m", "v"):
        assert not bool((flatten(federation.server.opt[slot])[~nonzero[0]] != 0).any())
    # the next message has the values of the remaining coordinates and no positions
    federation.download(0)
    assert values(federation, federation.upload(0)) == int(0.25 * size)


def test_pruning_keeps_the_largest_trained_coordinates():
    dense, _ = supports(named("sparse-adapter", mask=tw.masks.NoMask(), up=tw.codecs.Raw(), down=tw.codecs.Raw()), 1)
    pruned, _ = supports(named("sparse-adapter"), 1)
    whole = flatten(dense.server.public.coords)
    chosen = whole.abs().topk(int(0.25 * len(whole))).indices
    expected = torch.zeros_like(whole).index_copy(0, chosen, whole[chosen])
    assert torch.equal(flatten(pruned.server.public.coords), expected)


@pytest.mark.parametrize("name", ["adapter-lth", "fedsparsify"])
def test_with_gradual_pruning_each_mask_is_a_subset_of_the_previous_one(name):
    federation, nonzero = supports(named(name, mask=tw.masks.PruneMask(1.0, keep=0.5)), 4)
    size = federation.contract.coords.size
    for v, (one, two) in enumerate(pairwise(nonzero), 2):
        assert int(two.sum()) == int(size * 0.5 ** (v - 1))
        assert not bool((two & ~one).any())


@pytest.mark.parametrize("name", ["adapter-lth", "fedsparsify"])
def test_round_s_of_lottery_tickets_trains_the_density_of_the_paper(name):
    """FLASC, Algorithm 5, with q = 1: before round s the density is reduced to d = 1, 0.98, 0.98^2, ..."""
    federation = Federation(named(name), local=Local(1, batch=8))
    size, densities, sent = federation.contract.coords.size, [], []
    for _ in range(5):
        mask = federation.contract.trained(federation.server.public)  # of the next round
        densities.append(int(flatten(mask).sum()) if mask else size)
        federation.download(0)
        data = federation.upload(0)
        sent.append(values(federation, data))
        federation.close(Plan(frozenset(federation.contract.coords.names)), {0: data})
    assert densities == sent == [int(size * 0.98 ** (s - 1)) for s in (1, 2, 3, 4, 5)]


def test_lottery_tickets_of_every_second_round():
    """q = 2: pruned before rounds 2 (at density 1), 4, 6."""
    federation, nonzero = supports(named("adapter-lth", mask=tw.masks.PruneMask(1.0, at=1, keep=0.5, every=2)), 6)
    size = federation.contract.coords.size
    before = [
        size,
        *(int(one.sum()) for one in nonzero[:5]),
    ]  # of rounds 1 to 6; training sets no coordinate to zero here
    assert [round(count / size, 2) for count in before[3:]] == [0.5, 0.5, 0.25]


def test_a_mask_of_density_one_changes_nothing():
    plain = named("full")
    for mask in (tw.masks.TopKMask(1.0), tw.masks.PruneMask(1.0)):
        one, _ = supports(plain, 2)
        two, _ = supports(replace(plain, mask=mask, up=tw.codecs.Masked()), 2)
        assert same(one.server.public.coords, two.server.public.coords)
        assert all(same(tree, two.server.opt[slot]) for slot, tree in one.server.opt.items())


def test_federated_select_trains_the_downloaded_coordinates_and_the_server_keeps_all():
    federation = Federation(named("federated-select"))
    size = federation.contract.coords.size
    before = flatten(federation.server.public.coords)
    federation.download(0)
    start = flatten(federation.public[0].coords)
    mask = federation.contract.trained(federation.public[0])
    assert int(flatten(mask).sum()) == int(0.25 * size)
    assert same(mask, federation.contract.trained(federation.server.public))  # the mask of P M is the mask of P
    data = federation.upload(0)
    assert values(federation, data) == int(0.25 * size)
    plan = Plan(frozenset(federation.contract.coords.names))
    uploaded = flatten(decode_upload(federation.contract, plan, 0, 0, data, mask).code)
    assert bool((uploaded != 0).any())
    assert not bool((uploaded[~flatten(mask)] != 0).any())
    federation.close(plan, {0: data})
    after = flatten(federation.server.public.coords)
    assert torch.equal(after[start == 0], before[start == 0])


def test_with_incremental_downloads_clients_prune_as_the_server():
    method = named(
        "spdst", download="incremental", down=tw.codecs.Threshold(0.0), mask=tw.masks.PruneMask(0.5, keep=0.5)
    )
    federation, nonzero = supports(method, 3)
    for client in ALL_CLIENTS:  # some missed all rounds
        federation.download(client)
        assert same(federation.public[client].coords, federation.server.public.coords)
    assert int(nonzero[-1].sum()) == int(0.125 * federation.contract.coords.size)


def test_vmap_loop_and_graph_train_the_same_coordinates():
    for name in ("sparse-adapter", "federated-select"):
        runs = {}
        for backend in ("vmap", "loop", "graph"):
            job = Job(digits_task(), named(name), 3, 3, Local(1, batch=8))
            simulation = make_simulation(Engine(backend=backend), job)
            state = simulation.start()
            for _ in range(3):
                state, _ = simulation.round(state)
            runs[backend] = flatten(state.server.public.coords)
        assert torch.equal(runs["vmap"], runs["graph"])
        assert torch.equal(runs["vmap"] != 0, runs["loop"] != 0)
        assert torch.allclose(runs["vmap"], runs["loop"], atol=2e-3)


def test_hetlora_with_equal_ranks_is_lora():
    all_ranks = tw.codecs.RankSlice(8)
    one, _ = supports(named("hetlora", budget=tw.Budget((tw.Tier(up=all_ranks, down=all_ranks), tw.Tier()))), 2)
    two, _ = supports(named("hetlora", budget=tw.Budget()), 2)
    assert same(one.server.public.coords, two.server.public.coords)


def test_only_tiers_that_are_sampled_participate():
    tiers = (tw.Tier(sampled=False), tw.Tier())
    budget = tw.Budget(tiers, clients=tuple(i % 2 for i in ALL_CLIENTS))
    participants = set()
    job = Job(digits_task(), tw.Method(budget=budget), 3, 2)
    records_of(Engine(), job, lambda *message: participants.add(message[2]))
    assert participants == {1, 3, 5}
    with pytest.raises(ConfigError, match="no tier of the budget is sampled"):
        tw.Budget(tiers[:1])
    budget = tw.Budget(tiers, clients=(0,) * len(SIZES))
    with pytest.raises(ConfigError, match="no client is in a tier that takes part"):
        make_simulation(Engine(), Job(digits_task(), tw.Method(budget=budget), 1, 2))


@pytest.mark.parametrize("task", ["digits", "20newsgroups", "text-classification"])
def test_adapters_of_all_tiers_have_one_scale(task):
    """The scale of an adapter is alpha / rank: presets that are compared differ only in rank."""
    for names in (
        ("flasc", "hetlora", "lowest-tier", "highest-tier", "sparse-adapter", "adapter-lth"),
        ("lora", "ffa-lora", "fedsa-lora", "fedloru"),
    ):
        scales = {name: resolve(name, task).method.space.scale for name in names}
        assert len(set(scales.values())) == 1, scales
    assert resolve("lowest-tier", task).method.space.rank == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sketch": tw.sketches.EvoFed(population=8)}, "the identity sketch"),
        ({"upload": "weights"}, "Write upload = 'delta'"),
        ({"space": tw.spaces.LoRA(rank=2, redraw_every=1), "download": "incremental"}, "Write redraw_every = 0"),
        ({"schedule": tw.schedules.FedLAMA(phi=2)}, "Write schedule = 'all-blocks'"),
        ({"download": "incremental", "down": tw.codecs.Quantize(8)}, "down = 'raw' or download = 'full'"),
    ],
)
def test_methods_that_cannot_be_masked_are_refused(changes, message):
    with pytest.raises(IncompatibleParts, match=message):
        Federation(named("spdst", **changes))


def test_an_adapter_whose_b_is_pruned_learns_nothing():
    """After Adam's first step the largest quarter of A and B contains no B: nothing is learned afterwards."""
    federation, _ = supports(named("sparse-adapter", server_opt=tw.optimizers.Adam(0.003)), 3)
    end = federation.server.public.coords
    assert not any(bool(block.any()) for name, block in end.items() if name.endswith("/b"))
    assert nonzero_b(end) == 0
    late, _ = supports(named("sparse-adapter", mask=tw.masks.PruneMask(0.9)), 2)  # this density keeps some of B
    assert nonzero_b(late.server.public.coords) > 0
    weights = federation.weights(), federation.weights(federation.first)
    assert same(*({name: w[name] for name in ("0.weight", "2.weight")} for w in weights))


def test_invalid_settings_are_refused():
    for make in (lambda: tw.masks.TopKMask(0.0), lambda: tw.masks.PruneMask(1.5), lambda: tw.masks.PruneMask(keep=0.0)):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            make()
    with pytest.raises(ConfigError, match="every must be 1 or more"):
        tw.masks.PruneMask(every=0)
    for make in (lambda: tw.masks.TopKMask(by="layer"), lambda: tw.masks.PruneMask(by="layer")):
        with pytest.raises(ConfigError, match="by must be one of tree, block, not 'layer'"):
            make()
    with pytest.raises(ConfigError, match="at must be 0 or more, not -1"):
        tw.masks.TopKMask(at=-1)


RIVALS = ("sparse-adapter", "adapter-lth", "federated-select")


@pytest.mark.parametrize("name", RIVALS)
def test_masks_by_block_keep_the_same_share_of_a_and_b_and_a_live_adapter(name):
    """In the setting in which a mask over A and B together leaves nothing of B."""
    method = {
        "sparse-adapter": tw.methods.sparse_adapter(by="block"),
        "adapter-lth": tw.methods.adapter_lth(keep=0.5, by="block"),
        "federated-select": tw.methods.federated_select(by="block", at=1).replace(space=tw.spaces.LoRA(rank=8)),
    }[name]
    federation = Federation(method.replace(server_opt=tw.optimizers.Adam(0.003)), local=Local(1, batch=8))
    for _ in range(2):
        federation.round((0, 1, 2))
    contract, public = federation.contract, federation.server.public
    received = as_received(contract, public, method.down)
    trained = contract.trained(received)
    for block in trained.values():
        assert int(block.sum()) == max(1, int(0.25 * block.numel()))
    assert nonzero_b(received.coords) == pytest.approx(0.25, abs=0.02)
    assert not same(federation.weights(), federation.weights(federation.first))


def test_by_and_at_are_left_out_of_names_while_they_have_their_defaults():
    assert repr(tw.masks.TopKMask(0.5)) == "TopKMask(density=0.5)"
    assert repr(tw.masks.PruneMask(0.5)) == "PruneMask(density=0.5, at=1, keep=1.0, every=1)"
    assert "by='block'" in repr(tw.masks.PruneMask(by="block"))
    mask = resolve("federated-select", "digits", {"method.mask.by": "block", "method.mask.at": 1}).method.mask
    assert mask == tw.masks.TopKMask(by="block", at=1)


def test_a_top_k_mask_trains_everything_before_version_at():
    coords = {"a": torch.ones(4), "b": torch.zeros(4)}
    mask = tw.masks.TopKMask(0.5, by="block", at=2)
    assert mask.trained(coords, 0) == mask.trained(coords, 1) == {}
    assert {name: int(block.sum()) for name, block in mask.trained(coords, 2).items()} == {"a": 2, "b": 2}
