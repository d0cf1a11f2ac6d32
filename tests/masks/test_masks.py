"""Sparse training: which numbers move, which are left, and that nobody has to say where they are."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import thinwire as tw
from tests.federation import SIZES, Federation, digits_task
from thinwire.core.tree import flatten, same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.experiments.config import from_table, method_from, resolve, to_table
from thinwire.experiments.presets import preset
from thinwire.experiments.toml import dumps, loads
from thinwire.masks import dead_adapters
from thinwire.protocol.upload import decode_upload
from thinwire.runtime.job import Job
from thinwire.schedules.base import Plan
from thinwire.simulation.engine import LocalEngine
from thinwire.training import Local
from thinwire.wire import message as wire

EVERYBODY = range(len(SIZES))
SPARSE = ("sparse-adapter", "adapter-lth", "fedsparsify", "spdst")
RIVALS = (*SPARSE, "federated-select", "hetlora", "full", "lowest-tier", "highest-tier")


def named(name: str, **changes) -> tw.Method:
    return replace(method_from(preset("methods", name).table["method"]), **changes)


def values(federation: Federation, data: bytes) -> int:
    """How many numbers a message carries."""
    schema = federation.contract.schema
    return len(wire.unpack_body(wire.unpack(data, schema.sent_by(0)).bodies[0], schema).fields[wire.COORDS]) // 4


def supports(method: tw.Method, rounds: int):
    """A federation, and what is not zero at each version."""
    federation = Federation(method, local=Local(1, batch=8))
    seen = []
    for _ in range(rounds):
        federation.round((0, 1, 2))
        seen.append(flatten(federation.server.public.coords) != 0)
    return federation, seen


@pytest.mark.parametrize("name", ["sparse-adapter", "spdst"])
def test_pruned_once_numbers_stay_zero_with_all_that_remembers_them(name):
    federation, seen = supports(named(name), 4)
    size = federation.contract.coords.size
    assert int(seen[0].sum()) == int(0.25 * size)
    assert all(torch.equal(one, seen[0]) for one in seen)
    for memory in ("m", "v"):
        state = {k: v for k, v in federation.server.opt.items() if k.startswith(f"{memory}/")}
        assert not bool((flatten(state)[~seen[0]] != 0).any())
    # the next message holds the numbers that are left and no positions
    federation.download(0)
    assert values(federation, federation.upload(0)) == int(0.25 * size)


def test_the_largest_of_the_trained_numbers_are_left():
    dense, _ = supports(named("sparse-adapter", mask=tw.NoMask(), up=tw.Raw(), down=tw.Raw()), 1)
    pruned, _ = supports(named("sparse-adapter"), 1)
    whole = flatten(dense.server.public.coords)
    chosen = whole.abs().topk(int(0.25 * len(whole))).indices
    expected = torch.zeros_like(whole).index_copy(0, chosen, whole[chosen])
    assert torch.equal(flatten(pruned.server.public.coords), expected)


@pytest.mark.parametrize("name", ["adapter-lth", "fedsparsify"])
def test_pruned_slowly_each_mask_lies_in_the_one_before(name):
    federation, seen = supports(named(name, mask=tw.PruneMask(1.0, keep=0.5)), 4)
    size = federation.contract.coords.size
    for v, (one, two) in enumerate(pairwise(seen), 2):
        assert int(two.sum()) == int(size * 0.5 ** (v - 1))
        assert not bool((two & ~one).any())


@pytest.mark.parametrize("name", ["adapter-lth", "fedsparsify"])
def test_round_s_of_the_lottery_trains_the_share_that_the_paper_says(name):
    """FLASC, Algorithm 5, with q = 1: before round s the largest d numbers are left, d = 1, 0.98, 0.98^2, ..."""
    federation = Federation(named(name), local=Local(1, batch=8))
    size, densities, sent = federation.contract.coords.size, [], []
    for _ in range(5):
        mask = federation.contract.trained(federation.server.public)  # of the round that begins now
        densities.append(int(flatten(mask).sum()) if mask else size)
        federation.download(0)
        data = federation.upload(0)
        sent.append(values(federation, data))
        federation.close(Plan(frozenset(federation.contract.coords.names)), {0: data})
    assert densities == sent == [int(size * 0.98 ** (s - 1)) for s in (1, 2, 3, 4, 5)]


def test_lottery_tickets_of_every_second_round():
    """q = 2: pruned before rounds 2 (by nothing), 4, 6."""
    federation, seen = supports(named("adapter-lth", mask=tw.PruneMask(1.0, at=1, keep=0.5, every=2)), 6)
    size = federation.contract.coords.size
    before = [size, *(int(one.sum()) for one in seen[:5])]  # of rounds 1 to 6; what training makes zero is none here
    assert [round(count / size, 2) for count in before[3:]] == [0.5, 0.5, 0.25]


def test_a_mask_that_masks_nothing_changes_nothing():
    plain = named("full")
    for mask in (tw.TopKMask(1.0), tw.PruneMask(1.0)):
        one, _ = supports(plain, 2)
        two, _ = supports(replace(plain, mask=mask, up=tw.Masked()), 2)
        assert same(one.server.public.coords, two.server.public.coords)
        assert same(one.server.opt, two.server.opt)


def test_federated_select_trains_what_it_received_and_the_server_keeps_all():
    federation = Federation(named("federated-select"))
    size = federation.contract.coords.size
    before = flatten(federation.server.public.coords)
    federation.download(0)
    start = flatten(federation.public[0].coords)
    mask = federation.contract.trained(federation.public[0])
    assert int(flatten(mask).sum()) == int(0.25 * size)
    assert same(mask, federation.contract.trained(federation.server.public))  # of P M and of P the same
    data = federation.upload(0)
    assert values(federation, data) == int(0.25 * size)
    plan = Plan(frozenset(federation.contract.coords.names))
    said = flatten(decode_upload(federation.contract, plan, 0, 0, data, mask).code)
    assert bool((said != 0).any())
    assert not bool((said[~flatten(mask)] != 0).any())
    federation.close(plan, {0: data})
    after = flatten(federation.server.public.coords)
    assert torch.equal(after[start == 0], before[start == 0])


def test_on_a_ledger_clients_prune_as_the_server_does():
    method = named("spdst", download="incremental", down=tw.Threshold(0.0), mask=tw.PruneMask(0.5, keep=0.5))
    federation, seen = supports(method, 3)
    for client in EVERYBODY:  # some missed all of it
        federation.download(client)
        assert same(federation.public[client].coords, federation.server.public.coords)
    assert int(seen[-1].sum()) == int(0.125 * federation.contract.coords.size)


def test_all_clients_of_a_chunk_or_one_after_another_is_the_same():
    for name in ("sparse-adapter", "federated-select"):
        runs = {}
        for how in ("vmap", "loop", "graph"):
            job = Job(digits_task(), named(name), 3, 3, Local(1, batch=8))
            simulation = LocalEngine(backend=how).prepare(job)
            state = simulation.start()
            for _ in range(3):
                state, _ = simulation.round(state)
            runs[how] = flatten(state.server.public.coords)
        assert torch.equal(runs["vmap"], runs["graph"])
        assert torch.equal(runs["vmap"] != 0, runs["loop"] != 0)
        assert torch.allclose(runs["vmap"], runs["loop"], atol=2e-3)


def test_hetlora_with_equal_ranks_is_lora():
    whole = tw.RankSlice(8)
    one, _ = supports(named("hetlora", budget=tw.Budget((tw.Tier(up=whole, down=whole), tw.Tier()))), 2)
    two, _ = supports(named("hetlora", budget=tw.Budget()), 2)
    assert same(one.server.public.coords, two.server.public.coords)


def test_hetlora_may_weigh_clients_by_the_size_of_their_adapters():
    changes = {"upload": "weights", "aggregator": tw.ByNorm(), "server_opt": tw.SGD(1.0)}
    federation = Federation(named("hetlora", **changes, budget=named("hetlora").budget))
    federation.round((0, 1, 2))  # so that B is not zero
    before, contract = federation.server.public.coords, federation.contract
    for client in (0, 1, 2):
        federation.download(client)
    up = {client: federation.upload(client) for client in (0, 1, 2)}
    plan = Plan(frozenset(contract.coords.names))
    said = [decode_upload(contract, plan, 1, client, data).code for client, data in up.items()]
    products = [
        torch.cat([(one[f"{n}/b"] @ one[f"{n}/a"]).flatten() for n in ("0.weight", "2.weight")]) for one in said
    ]
    norms = [float(product.norm()) for product in products]
    federation.close(plan, up)
    for name, block in federation.server.public.coords.items():
        wanted = sum(norm * one[name] for norm, one in zip(norms, said, strict=True)) / sum(norms)
        assert torch.allclose(block, wanted, atol=1e-6)
    assert not same(before, federation.server.public.coords)
    assert tw.ByNorm().admit([{"w": torch.ones(2)}] * 2, [1.0, 3.0])[1] == [1.0, 3.0]  # no adapter: as they were


def test_only_tiers_that_are_asked_take_part():
    tiers = (tw.Tier(asked=False), tw.Tier())
    budget = tw.Budget(tiers, clients=tuple(i % 2 for i in EVERYBODY))
    heard = set()
    for _ in LocalEngine().run(Job(digits_task(), tw.Method(budget=budget), 3, 2), lambda *a: heard.add(a[2])):
        pass
    assert heard == {1, 3, 5}
    with pytest.raises(ConfigError, match="no tier of the budget is asked"):
        tw.Budget(tiers[:1])
    budget = tw.Budget(tiers, clients=(0,) * len(SIZES))
    with pytest.raises(ConfigError, match="no client is in a tier that is asked"):
        LocalEngine().prepare(Job(digits_task(), tw.Method(budget=budget), 1, 2))


@pytest.mark.parametrize("task", ["digits", "20newsgroups", "text-classification"])
def test_adapters_of_all_tiers_have_one_scale(task):
    """alpha / rank is what a correction is multiplied by: presets that are compared differ in rank alone."""
    names = ("lora", "flasc", "hetlora", "lowest-tier", "highest-tier", "sparse-adapter", "adapter-lth", "ffa-lora")
    spaces = {name: resolve(name, task).method.space for name in names}
    assert spaces["lowest-tier"].rank == 1
    scales = {name: space.alpha / space.rank for name, space in spaces.items()}
    assert len(set(scales.values())) == 1, scales


@pytest.mark.parametrize("name", RIVALS)
def test_every_preset_trains_and_is_written_and_read_again(name):
    experiment = resolve(name, "digits")
    assert from_table(loads(dumps(to_table(experiment)), "again")) == experiment
    records = list(LocalEngine().run(Job(digits_task(), experiment.method, 3, 3, Local(1, batch=8))))
    assert records[-1].loss < 2.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sketch": tw.EvoFed(population=8)}, "the identity sketch"),
        ({"upload": "weights"}, "Write upload = 'delta'"),
        ({"space": tw.LoRA(rank=2, redraw_every=1), "download": "incremental"}, "Write redraw_every = 0"),
        ({"schedule": tw.FedLAMA(phi=2)}, "Write schedule = 'all-blocks'"),
        ({"download": "incremental", "down": tw.Quantize(8)}, "down = 'raw' or download = 'full'"),
    ],
)
def test_what_cannot_be_masked_is_refused(changes, words):
    with pytest.raises(IncompatibleParts, match=words):
        Federation(named("spdst", **changes))


def test_an_adapter_without_b_is_dead_and_said_to_be():
    """Of A and B together the largest quarter holds no B after Adam's first step: nothing is ever learnt again."""
    federation, _ = supports(named("sparse-adapter", server_opt=tw.Adam(0.003)), 3)
    start, end = federation.first.coords, federation.server.public.coords
    assert not any(bool(block.any()) for name, block in end.items() if name.endswith("/b"))
    trained = federation.contract.trained(federation.server.public)
    assert dead_adapters(end, trained) == ("0.weight", "2.weight")
    assert dead_adapters(start, {}) == ()
    late, _ = supports(named("sparse-adapter", mask=tw.PruneMask(0.9)), 2)  # here there is room for both
    public = late.server.public
    assert dead_adapters(public.coords, late.contract.trained(public)) == ()
    weights = federation.weights(), federation.weights(federation.first)
    assert same(*({name: w[name] for name in ("0.weight", "2.weight")} for w in weights))


def test_selecting_the_largest_of_an_adapter_selects_a_dead_one():
    method = named("federated-select", space=tw.LoRA(rank=4))
    federation = Federation(method, local=Local(1, batch=8))
    federation.download(0)
    heard = federation.public[0]
    assert dead_adapters(heard.coords, federation.contract.trained(heard)) == ("0.weight", "2.weight")


@pytest.mark.parametrize("part", ["a", "b"])
def test_an_adapter_dies_rank_by_rank(part):
    coords = {"w/a": torch.ones(2, 3), "w/b": torch.ones(4, 2), "head": torch.zeros(3)}
    trained = {name: torch.ones_like(block, dtype=torch.bool) for name, block in coords.items()}
    rows, other = ("w/a", "w/b") if part == "a" else ("w/b", "w/a")

    def leave_out(name, rank):
        at = (rank,) if name == "w/a" else (slice(None), rank)
        coords[name][at], trained[name][at] = 0, False

    leave_out(rows, 0)
    assert dead_adapters(coords, trained) == ()
    leave_out(other, 1)  # the rank that is left on one side is gone on the other
    assert dead_adapters(coords, trained) == ("w",)
    coords["w/a"], coords["w/b"] = torch.ones(2, 3), torch.ones(4, 2)  # standing still, but not at zero
    assert dead_adapters(coords, trained) == ()


def test_a_frozen_a_leaves_it_to_b():
    coords, none = {"w/b": torch.zeros(4, 2)}, {"w/b": torch.zeros(4, 2, dtype=torch.bool)}
    assert dead_adapters(coords, none) == ("w",)
    assert dead_adapters(coords, {}) == dead_adapters({"w/b": torch.ones(4, 2)}, none) == ()


def test_settings_that_make_no_sense_are_refused():
    for make in (lambda: tw.TopKMask(0.0), lambda: tw.PruneMask(1.5), lambda: tw.PruneMask(keep=0.0)):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            make()
    with pytest.raises(ConfigError, match="every must be 1 or more rounds"):
        tw.PruneMask(every=0)
