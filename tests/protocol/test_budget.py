"""Tiers of clients with different codecs."""

import pytest
import torch

import thinwire as tw
from tests.federation import SIZES, Federation, digits_task, perceptron, same_public
from thinwire.codecs import ErrorFeedback, Quantize, RankSlice, Raw, TopK
from thinwire.core.key import Key
from thinwire.core.tree import same
from thinwire.errors import ConfigError, IncompatibleParts, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.protocol import Budget, Method, Tier
from thinwire.protocol.client import initial_client_state
from thinwire.protocol.receive import receive
from thinwire.protocol.round import Round
from thinwire.runs.check import check
from thinwire.runs.config import from_table, resolve, to_table
from thinwire.runs.toml import dumps, loads
from thinwire.training import Local

ALL_CLIENTS = range(len(SIZES))
D = sum(p.numel() for p in perceptron().parameters())
ALTERNATE = tuple(i % 2 for i in ALL_CLIENTS)


def same_states(a, b):
    return all(same(x, y) for x, y in ((a.unsent, b.unsent), (a.correction, b.correction), (a.codec, b.codec)))


def test_tiers_are_drawn_by_their_shares_and_from_the_seed():
    budget = Budget((Tier(1.0), Tier(2.0), Tier(5.0)))
    n = 1500
    drawn = [budget.tier(i, Key(3)) for i in range(n)]
    for tier, p in enumerate((1 / 8, 2 / 8, 5 / 8)):
        assert abs(drawn.count(tier) / n - p) < 5 * (p * (1 - p) / n) ** 0.5  # five standard deviations
    assert drawn[:50] == [budget.tier(i, Key(3)) for i in range(50)]
    assert drawn[:50] != [budget.tier(i, Key(4)) for i in range(50)]


def test_tiers_without_codecs_change_nothing():
    plain, tiered = Federation(Method()), Federation(Method(budget=Budget((Tier(), Tier()))))
    for cohort in ([0, 1, 2], [3, 4], [0, 5]):
        plain.round(cohort)
        tiered.round(cohort)
    assert same(plain.weights(), tiered.weights())


def test_uploads_are_encoded_and_decoded_by_the_codec_of_the_tier():
    rich, poor = Tier(up=Raw()), Tier(up=TopK(0.01))
    federation = Federation(Method(budget=Budget((rich, poor), ALTERNATE)))
    for _ in range(3):
        up = federation.round(ALL_CLIENTS)
        for client, data in up.items():
            sent = 4 * D if ALTERNATE[client] == 0 else 4 * (D // 100)
            assert sent < len(data) < sent + 100
    # each upload is as long as without tiers
    one, two = Federation(Method(up=Raw())), Federation(Method(up=TopK(0.01)))
    both = Federation(Method(budget=Budget((rich, poor), ALTERNATE)))
    for part in (one, two, both):
        for client in (0, 1):
            part.download(client)
    lone = [one.upload(0), two.upload(1)]
    mixed = [both.upload(0), both.upload(1)]
    assert [len(a) for a in lone] == [len(a) for a in mixed]


def test_codec_states_are_separate_and_of_the_tier():
    method = Method(budget=Budget((Tier(), Tier(up=ErrorFeedback(TopK(0.05)))), ALTERNATE))
    federation = Federation(method)
    for _ in range(2):
        federation.round(ALL_CLIENTS)
    for client in ALL_CLIENTS:
        state = federation.states[client].codec
        assert bool(state) == (ALTERNATE[client] == 1)
        assert all(float(block.abs().sum()) > 0 for block in state.values())
    assert not same(federation.states[1].codec, federation.states[3].codec)


def full_download(**options) -> Method:
    tiers = (Tier(up=Raw(), down=Raw()), Tier(up=TopK(0.2), down=TopK(0.5)))
    return Method(download="full", budget=Budget(tiers, ALTERNATE), **options)


def test_full_downloads_are_encoded_by_the_codec_of_the_tier():
    federation = Federation(full_download())
    federation.round(ALL_CLIENTS)
    rich, poor = federation.download(0), federation.download(1)
    assert len(poor) < 0.6 * len(rich)
    assert same_public(federation.public[0], federation.server.public)
    received = torch.cat([block.reshape(-1) for block in federation.public[1].coords.values()])
    assert int(received.count_nonzero()) == D // 2
    with pytest.raises((ConfigError, WireError)):  # without the number of the client its codec is not known
        receive(federation.contract, federation.first, poor)
    with pytest.raises(ConfigError, match="has no tier"):
        initial_client_state(federation.contract, federation.first)


@pytest.mark.parametrize(("chunk", "backend"), [(0, "vmap"), (2, "vmap"), (1, "loop")])
def test_the_simulation_trains_clients_from_the_download_of_their_tier(chunk, backend):
    method = full_download()
    job = Job(digits_task(), method, rounds=3, cohort=len(SIZES), local=Local(epochs=1, batch=16))
    simulation = make_simulation(Engine(backend=backend, chunk=chunk), job)
    seen = []
    state = simulation.start()
    for _ in range(3):
        before = state
        state, record = simulation.round(state, lambda *message: seen.append(message))
    sizes = {(direction, ALTERNATE[client]): len(data) for _, direction, client, data in seen}
    assert sizes["down", 1] < 0.6 * sizes["down", 0]
    assert sizes["up", 1] < 0.3 * sizes["up", 0]
    assert record.bytes_up == sum(len(d) for r, direction, _, d in seen if r == 3 and direction == "up")
    # the same bytes as from `open_round`
    down = Round.open(simulation.contract, before.server).downloads.messages(
        {i: before.clients[i].version for i in ALL_CLIENTS}
    )
    assert {client: data for r, direction, client, data in seen if r == 3 and direction == "down"} == down


def test_one_round_opens_for_clients_of_all_versions_and_tiers():
    federation = Federation(full_download())
    for cohort in ([0, 1], [0, 2, 3]):
        federation.round(cohort)
    versions = {client: federation.public[client].version for client in ALL_CLIENTS}
    made = federation.opened.downloads.messages(versions)
    for client in ALL_CLIENTS:
        alone = federation.opened.downloads.messages({client: versions[client]})
        assert made[client] == alone[client]
        received = receive(federation.contract, federation.public[client], made[client], client)
        assert received.public.version == 2
    assert len(set(made.values())) == 4  # clients at version 0 and at version 1, of two tiers each


def test_codec_states_of_a_tier_are_reset_with_the_basis():
    feedback = ErrorFeedback(TopK(0.1))
    budget = Budget((Tier(up=feedback), Tier()), ALTERNATE)
    federation = Federation(Method(space=tw.spaces.MAPO(k=64, redraw_every=2), budget=budget))
    alone = Federation(Method(space=tw.spaces.MAPO(k=64, redraw_every=2), up=feedback))
    for cohort in ([0, 2], [2, 4], [0, 2, 4]):
        federation.round(cohort)
        alone.round(cohort)
    assert same(federation.weights(), alone.weights())
    assert federation.states[0].codec


def test_different_codecs_of_incremental_downloads_are_refused():
    with pytest.raises(IncompatibleParts, match="Write download = 'full'"):
        Federation(Method(budget=Budget((Tier(), Tier(down=Quantize(4))))))
    Federation(Method(down=Raw(), budget=Budget((Tier(), Tier(down=Raw())))))  # equal codecs are accepted
    with pytest.raises(IncompatibleParts, match="every message is complete"):
        Federation(Method(download="full", budget=Budget((Tier(), Tier(down=ErrorFeedback(TopK(0.1)))))))


@pytest.mark.parametrize(
    ("make", "message"),
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
def test_invalid_budgets_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


FILE = """
rounds = 2
[method]
up = { kind = "topk", density = 0.25 }
download = "full"
[method.budget]
tiers = [
  { share = 0.5, up = { kind = "topk", density = 0.0625 }, down = { kind = "topk", density = 0.25 } },
  { share = 0.5 },
]
"""


def test_tiers_in_a_method_file(tmp_path):
    file = tmp_path / "tiers.toml"
    file.write_text(FILE)
    experiment = resolve(str(file))
    assert experiment.method.ups == (TopK(0.0625), TopK(0.25))
    assert experiment.method.downs == (TopK(0.25), Raw())
    assert from_table(loads(dumps(to_table(experiment)), "again")) == experiment
    check(experiment)
    with pytest.raises(ConfigError, match="density must be above 0 and at most 1"):
        resolve(str(file), overrides={"method.budget.tiers": [{"up": {"kind": "topk", "density": 1.5}}]})
    with pytest.raises(ConfigError, match="did you mean 'share'"):
        resolve(str(file), overrides={"method.budget.tiers": [{"shares": 1.0}]})


def test_a_run_with_tiers_resumes_to_the_same_bits(tmp_path):
    from thinwire.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

    method = Method(budget=Budget((Tier(), Tier(up=ErrorFeedback(TopK(0.05)))), ALTERNATE))
    simulation = make_simulation(Engine(backend="loop"), Job(digits_task(), method, rounds=4, cohort=4))
    state = simulation.start()
    for _ in range(2):
        state, _ = simulation.round(state)
    save_checkpoint(tmp_path, Checkpoint(state), "test")
    again = load_checkpoint(tmp_path, "test").state
    for _ in range(2):
        (state, a), (again, b) = simulation.round(state), simulation.round(again)
        assert a._replace(seconds=0) == b._replace(seconds=0)
    assert same_public(state.server.public, again.server.public)
    assert all(same_states(state.clients[i], again.clients[i]) for i in state.clients)


# -- ranks -------------------------------------------------------------------------------------------------------------

LORA = tw.spaces.LoRA(rank=4, target_modules=("*.weight",))


def test_clients_of_small_rank_train_the_first_ranks_only():
    tiers = tuple(Tier(up=RankSlice(r), down=RankSlice(r)) for r in (1, 4))
    method = Method(
        space=LORA, download="full", budget=Budget(tiers, ALTERNATE), client_opt=tw.optimizers.SGD(0.3, momentum=0.9)
    )
    federation = Federation(method)
    for _ in range(3):
        up = federation.round(ALL_CLIENTS)
        assert len(up[0]) < len(up[1])
    federation.download(0)
    small = federation.public[0].coords
    assert int(small["0.weight/a"].count_nonzero(dim=1).bool().sum()) == 1
    # a cohort of small clients changes nothing beyond their rank
    before = federation.server.public.coords
    federation.round([0, 2, 4])
    after = federation.server.public.coords
    assert torch.equal(before["0.weight/a"][1:], after["0.weight/a"][1:])
    assert not torch.equal(before["0.weight/a"][:1], after["0.weight/a"][:1])
    assert torch.equal(before["2.weight/b"][:, 1:], after["2.weight/b"][:, 1:])


def test_equal_ranks_equal_lora_bit_for_bit():
    plain = Federation(Method(space=LORA, download="full"))
    tiers = Budget((Tier(up=RankSlice(4), down=RankSlice(9)), Tier()))
    sliced = Federation(Method(space=LORA, download="full", budget=tiers))
    for cohort in ([0, 1, 2], [3, 4, 5]):
        plain.round(cohort)
        sliced.round(cohort)
    assert same(plain.weights(), sliced.weights())
