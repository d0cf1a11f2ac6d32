"""Clients that can afford different things."""

import pytest
import torch

import thinwire as tw
from tests.federation import SIZES, Federation, digits_task, perceptron, same_public
from thinwire.codecs import ErrorFeedback, Quantize, RankSlice, Raw, TopK
from thinwire.core.key import Key
from thinwire.core.tree import same
from thinwire.errors import ConfigError, IncompatibleParts, WireError
from thinwire.experiments.check import check
from thinwire.experiments.config import from_table, resolve, to_table
from thinwire.experiments.toml import dumps, loads
from thinwire.protocol import Budget, Method, Tier
from thinwire.protocol.receive import receive
from thinwire.protocol.round import initial_client_state
from thinwire.protocol.server import open_round
from thinwire.runtime.job import Job
from thinwire.simulation.engine import LocalEngine
from thinwire.training import Local

EVERYBODY = range(len(SIZES))
D = sum(p.numel() for p in perceptron().parameters())
ALTERNATE = tuple(i % 2 for i in EVERYBODY)


def same_states(a, b):
    return all(same(x, y) for x, y in ((a.unsent, b.unsent), (a.correction, b.correction), (a.codec, b.codec)))


def test_drawn_tiers_have_their_shares_and_never_change():
    budget = Budget((Tier(1.0), Tier(2.0), Tier(5.0)))
    n = 4000
    drawn = [budget.tier(i, Key(3)) for i in range(n)]
    for tier, p in enumerate((1 / 8, 2 / 8, 5 / 8)):
        assert abs(drawn.count(tier) / n - p) < 5 * (p * (1 - p) / n) ** 0.5  # five deviations
    assert drawn[:50] == [budget.tier(i, Key(3)) for i in range(50)]
    assert drawn[:50] != [budget.tier(i, Key(4)) for i in range(50)]


def test_tiers_that_say_nothing_change_nothing():
    plain, tiered = Federation(Method()), Federation(Method(budget=Budget((Tier(), Tier()))))
    for cohort in ([0, 1, 2], [3, 4], [0, 5]):
        plain.round(cohort)
        tiered.round(cohort)
    assert same(plain.weights(), tiered.weights())


def test_each_message_is_made_and_read_by_the_codec_of_its_sender():
    rich, poor = Tier(up=Raw()), Tier(up=TopK(0.01))
    federation = Federation(Method(budget=Budget((rich, poor), ALTERNATE)))
    for _ in range(3):
        up = federation.round(EVERYBODY)
        for client, data in up.items():
            sent = 4 * D if ALTERNATE[client] == 0 else 4 * (D // 100)
            assert sent < len(data) < sent + 100
    # the server read every message as its sender meant it: one round by hand
    one, two = Federation(Method(up=Raw())), Federation(Method(up=TopK(0.01)))
    both = Federation(Method(budget=Budget((rich, poor), ALTERNATE)))
    for part in (one, two, both):
        for client in (0, 1):
            part.download(client)
    lone = [one.upload(0), two.upload(1)]
    mixed = [both.answer(0), both.answer(1)]
    assert [len(a) for a in lone] == [len(a) for a in mixed]


def test_memory_is_each_clients_own_and_of_its_tier():
    method = Method(budget=Budget((Tier(), Tier(up=ErrorFeedback(TopK(0.05)))), ALTERNATE))
    federation = Federation(method)
    for _ in range(2):
        federation.round(EVERYBODY)
    for client in EVERYBODY:
        memory = federation.states[client].codec
        assert bool(memory) == (ALTERNATE[client] == 1)
        assert all(float(block.abs().sum()) > 0 for block in memory.values())
    assert not same(federation.states[1].codec, federation.states[3].codec)


def snapshot(**options) -> Method:
    tiers = (Tier(up=Raw(), down=Raw()), Tier(up=TopK(0.2), down=TopK(0.5)))
    return Method(download="full", budget=Budget(tiers, ALTERNATE), **options)


def test_on_snapshots_each_tier_hears_what_it_can_afford():
    federation = Federation(snapshot())
    federation.round(EVERYBODY)
    rich, poor = federation.download(0), federation.download(1)
    assert len(poor) < 0.6 * len(rich)
    assert same_public(federation.public[0], federation.server.public)
    heard = torch.cat([block.reshape(-1) for block in federation.public[1].coords.values()])
    assert int(heard.count_nonzero()) == D // 2
    with pytest.raises((ConfigError, WireError)):  # who does not say which client it is cannot read it
        receive(federation.contract, federation.first, poor)
    with pytest.raises(ConfigError, match="has no tier"):
        initial_client_state(federation.contract, federation.first)


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_the_engine_trains_each_client_from_what_its_tier_heard(chunk, how):
    method = snapshot()
    job = Job(digits_task(), method, rounds=3, cohort=len(SIZES), local=Local(epochs=1, batch=16))
    simulation = LocalEngine(backend=how, chunk=chunk).prepare(job)
    seen = []
    state = simulation.start()
    for _ in range(3):
        before = state
        state, record = simulation.round(state, lambda *what: seen.append(what))
    sizes = {(way, ALTERNATE[client]): len(data) for _, way, client, data in seen}
    assert sizes["down", 1] < 0.6 * sizes["down", 0]
    assert sizes["up", 1] < 0.3 * sizes["up", 0]
    assert record.bytes_up == sum(len(d) for r, way, _, d in seen if r == 3 and way == "up")
    # a federation of messages only, in the same state, hears the same bytes
    down = open_round(simulation.contract, before.server, {i: before.clients[i].version for i in EVERYBODY})
    assert {client: data for r, way, client, data in seen if r == 3 and way == "down"} == down


def test_clients_of_all_versions_and_tiers_are_heard_at_once():
    federation = Federation(snapshot())
    for cohort in ([0, 1], [0, 2, 3]):
        federation.round(cohort)
    versions = {client: federation.public[client].version for client in EVERYBODY}
    made = open_round(federation.contract, federation.server, versions)
    for client in EVERYBODY:
        alone = open_round(federation.contract, federation.server, {client: versions[client]})
        assert made[client] == alone[client]
        heard = receive(federation.contract, federation.public[client], made[client], client)
        assert heard.public.version == 2
    assert len(set(made.values())) == 4  # clients at version 0 and at version 1, of two tiers each


def test_memory_of_a_tier_starts_anew_with_a_new_frame():
    feedback = ErrorFeedback(TopK(0.1))
    budget = Budget((Tier(up=feedback), Tier()), ALTERNATE)
    federation = Federation(Method(space=tw.MAPO(k=64, redraw_every=2), budget=budget))
    alone = Federation(Method(space=tw.MAPO(k=64, redraw_every=2), up=feedback))
    for cohort in ([0, 2], [2, 4], [0, 2, 4]):
        federation.round(cohort)
        alone.round(cohort)
    assert same(federation.weights(), alone.weights())
    assert federation.states[0].codec


def test_different_down_codecs_on_a_ledger_are_refused():
    with pytest.raises(IncompatibleParts, match="Write download = 'full'"):
        Federation(Method(budget=Budget((Tier(), Tier(down=Quantize(4))))))
    Federation(Method(down=Raw(), budget=Budget((Tier(), Tier(down=Raw())))))  # the same is not different
    with pytest.raises(IncompatibleParts, match="every message stands for itself"):
        Federation(Method(download="full", budget=Budget((Tier(), Tier(down=ErrorFeedback(TopK(0.1)))))))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Budget((Tier(0.0),)), "share of tier 0 must be above 0"),
        (lambda: Budget((Tier(),), (0, 1)), "client 1 into tier 1; write one from 0 to 0"),
        (lambda: Budget((), (0,)), "there are no budget.tiers"),
        (
            lambda: Job(digits_task(), Method(budget=Budget((Tier(),), (0, 0))), cohort=2),
            "gives 2 clients a tier, but the task has 6",
        ),
    ],
)
def test_budgets_that_make_no_sense_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


FILE = """
rounds = 2
[method]
up = { kind = "topk", density = 0.25 }
link = "snapshot"
[method.budget]
tiers = [
  { share = 0.5, up = { kind = "topk", density = 0.0625 }, down = { kind = "topk", density = 0.25 } },
  { share = 0.5 },
]
"""


def test_a_method_file_may_have_tiers(tmp_path):
    file = tmp_path / "tiers.toml"
    file.write_text(FILE)
    experiment = resolve(str(file))
    assert experiment.method.ups == (TopK(0.0625), TopK(0.25))
    assert experiment.method.downs == (TopK(0.25), Raw())
    assert from_table(loads(dumps(to_table(experiment)), "again")) == experiment
    facts = check(experiment)
    assert sum(facts["tiers"].values()) == 20
    with pytest.raises(ConfigError, match="density must be above 0 and at most 1"):
        resolve(str(file), overrides={"method.budget.tiers": [{"up": {"kind": "topk", "density": 1.5}}]})
    with pytest.raises(ConfigError, match="did you mean 'share'"):
        resolve(str(file), overrides={"method.budget.tiers": [{"shares": 1.0}]})


def test_a_run_with_tiers_resumes_to_the_same_bits(tmp_path):
    from thinwire.experiments.checkpoint import load_checkpoint, save_checkpoint

    method = Method(budget=Budget((Tier(), Tier(up=ErrorFeedback(TopK(0.05)))), ALTERNATE))
    simulation = LocalEngine(backend="loop").prepare(Job(digits_task(), method, rounds=4, cohort=4))
    state = simulation.start()
    for _ in range(2):
        state, _ = simulation.round(state)
    save_checkpoint(tmp_path, state, "test")
    again = load_checkpoint(tmp_path, "test")
    for _ in range(2):
        (state, a), (again, b) = simulation.round(state), simulation.round(again)
        assert a._replace(seconds=0) == b._replace(seconds=0)
    assert same_public(state.server.public, again.server.public)
    assert all(same_states(state.clients[i], again.clients[i]) for i in state.clients)


# -- ranks -------------------------------------------------------------------------------------------------------------

LORA = tw.LoRA(rank=4, target_modules=("*.weight",))


def test_clients_of_small_rank_train_the_leading_ranks_only():
    tiers = tuple(Tier(up=RankSlice(r), down=RankSlice(r)) for r in (1, 4))
    method = Method(space=LORA, download="full", budget=Budget(tiers, ALTERNATE), client_opt=tw.SGD(0.3, momentum=0.9))
    federation = Federation(method)
    for _ in range(3):
        up = federation.round(EVERYBODY)
        assert len(up[0]) < len(up[1])
    federation.download(0)
    small = federation.public[0].coords
    assert int(small["0.weight/a"].count_nonzero(dim=1).bool().sum()) == 1
    # only the small clients speak: nothing beyond their rank moves
    before = federation.server.public.coords
    federation.round([0, 2, 4])
    after = federation.server.public.coords
    assert torch.equal(before["0.weight/a"][1:], after["0.weight/a"][1:])
    assert not torch.equal(before["0.weight/a"][:1], after["0.weight/a"][:1])
    assert torch.equal(before["2.weight/b"][:, 1:], after["2.weight/b"][:, 1:])


def test_equal_ranks_are_lora_bit_for_bit():
    plain = Federation(Method(space=LORA, download="full"))
    tiers = Budget((Tier(up=RankSlice(4), down=RankSlice(9)), Tier()))
    sliced = Federation(Method(space=LORA, download="full", budget=tiers))
    for cohort in ([0, 1, 2], [3, 4, 5]):
        plain.round(cohort)
        sliced.round(cohort)
    assert same(plain.weights(), sliced.weights())
