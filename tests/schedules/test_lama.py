"""FedLAMA: which layers wait, what clients keep meanwhile, what it costs, what it goes together with."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.federation import SIZES, Federation, digits, perceptron, same_public, workload
from thinwire.aggregators import Uniform
from thinwire.codecs import ErrorFeedback, Quantize, TopK
from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.experiments.build import build_job
from thinwire.experiments.config import resolve
from thinwire.models import build
from thinwire.optimizers import SGD, Adam, FedDyn, FedProx, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.round import Group, initial_client_state, plan_round
from thinwire.schedules import AllBlocks, FedLAMA
from thinwire.simulation.engine import LocalEngine
from thinwire.spaces import MAPO, FedPara, Full, LoRA, Route
from thinwire.testing import check_schedule
from thinwire.training import Local
from thinwire.training.loop import LoopTrainer
from thinwire.training.vmap import VmapTrainer
from thinwire.wire import message as wire

STEPS = Local(batch=8, steps=3)
SMALL = Spec.of(dict(perceptron().named_parameters()))
D = SMALL.size


def numbers(federation: Federation, data: bytes, client: int = 0) -> int:
    """Bytes of trained numbers in a client's message."""
    schema = federation.contract.schema
    return len(wire.unpack_body(wire.unpack(data, schema.sent_by(client)).bodies[0], schema).fields[wire.COORDS])


def play(schedule: FedLAMA, spec: Spec, apart: dict[str, float], rounds: int) -> list[frozenset[str]]:
    """The plans of some rounds in which the clients' mean stands still and they always differ alike, a number."""
    state, plans = schedule.init(spec), []
    for version in range(rounds):
        plan = schedule.plan(state, spec, version)
        plans.append(plan.names)
        went = {}
        for block in spec.restrict(plan.names):
            group = next(iter(schedule.report({block.name: torch.zeros(1)}, plan)))
            went[group] = went.get(group, 0.0) + apart[block.name] * block.numel
        report = {group: torch.tensor(value) for group, value in went.items()}
        state = schedule.observe(state, plan, spec.restrict(plan.names).zeros(), report)
    return plans


# -- the contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        FedLAMA(1),
        FedLAMA(2),
        FedLAMA(4, rules="public"),
        FedLAMA(3, include_crossing=False),
        FedLAMA(3, accelerate=True),
        FedLAMA(3, private=("fc.*",)),
    ],
    ids=repr,
)
def test_the_contract_of_a_schedule(schedule):
    check_schedule(schedule)


def test_a_window_of_one_round_is_fedavg_to_the_bit():
    runs = []
    for schedule in (AllBlocks(), FedLAMA(phi=1)):
        federation = Federation(Method(schedule=schedule, client_opt=SGD(0.1, momentum=0.9)), local=STEPS)
        lengths = []
        for cohort in ((0, 1, 2), (2, 4), (5, 3, 0)):
            lengths.append([len(data) for data in federation.round(cohort).values()])
        runs.append((federation, lengths))
    (mine, my_bytes), (theirs, their_bytes) = runs
    assert same_public(mine.server.public, theirs.server.public)
    assert my_bytes == their_bytes
    assert all(state.blank for state in mine.states.values())


def test_so_it_is_in_the_engine():
    quick = {"rounds": 3, "local.steps": 2, "cohort.size": 5, "method.client_opt.momentum": 0.5}
    finals, records = [], []
    for method, phi in (("fedavg", {}), ("fedlama", {"method.schedule.phi": 1})):
        simulation = LocalEngine().prepare(build_job(resolve(method, "digits", {**quick, **phi})))
        state = simulation.start()
        for _ in range(3):
            state, record = simulation.round(state)
            records.append(record._replace(seconds=0.0))
        finals.append(state.server.public)
    assert same_public(*finals)
    assert records[:3] == records[3:]


# -- what a window computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["paper", "public"])
def test_fedlama_equals_a_loop_written_by_hand(rules):
    """Torch models that keep their layers and their momentum within a window; discrepancies by the formula itself."""
    phi, windows = 3, ((0, 3, 4), (1, 2, 3), (5, 0, 1), (2, 4, 5))
    method = Method(schedule=FedLAMA(phi, rules=rules), client_opt=SGD(0.05, momentum=0.9))
    federation = Federation(method, local=STEPS)
    x, y = digits()
    common = {name: p.detach().clone() for name, p in perceptron().named_parameters()}
    groups = {"paper": [("0.weight", "0.bias"), ("2.weight", "2.bias")]}.get(rules, [(name,) for name in common])
    dims = [sum(common[name].numel() for name in group) for group in groups]
    interval = [1] * len(groups)
    version, waited = 0, []
    for cohort in windows:
        models = {i: perceptron() for i in cohort}
        for model in models.values():
            model.load_state_dict(common)
        opts = {i: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for i, model in models.items()}
        weight = {i: SIZES[i] / sum(SIZES[j] for j in cohort) for i in cohort}
        for turn in range(1, phi + 1):
            federation.round(cohort)
            for i, model in models.items():
                work = workload(federation.task, [i], [federation.key.fold("batches", version, i)], STEPS)
                for step in range(work.rows.shape[1]):
                    rows = work.index[0, step, : work.rows[0, step]]
                    opts[i].zero_grad()
                    F.cross_entropy(model(x[rows]), y[rows]).backward()
                    opts[i].step()
            version += 1
            apart = [0.0] * len(groups)
            for place, group in enumerate(groups):
                if turn % interval[place]:
                    continue
                for name in group:
                    mine = {i: dict(model.named_parameters())[name].data for i, model in models.items()}
                    mean = sum(weight[i] * mine[i] for i in cohort)
                    apart[place] += sum(weight[i] * float((mean - mine[i]).square().sum()) for i in cohort)
                    common[name] = mean.clone()
                    for i in cohort:
                        mine[i].copy_(mean)
                apart[place] /= interval[place] * dims[place]
        if rules == "paper" or version >= 7:
            may = [i for i, group in enumerate(groups) if rules == "paper" or common[group[0]].dim() > 1]
            total, size = sum(d * n for d, n in zip(apart, dims, strict=True)), sum(dims[i] for i in may)
            interval, long, delta, share = [1] * len(groups), [], 0.0, 0.0
            for i in sorted(may, key=lambda i: apart[i]):
                delta, share = delta + apart[i] * dims[i] / total, share + dims[i] / size
                long.append(i)
                if delta >= 1 - share:
                    break
            for i in long:
                interval[i] = phi
        waited.append(interval.count(phi))
        for name, block in federation.weights().items():
            torch.testing.assert_close(block, common[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        often = federation.server.schedule["often"].tolist()
        assert [1 if now else phi for now in often] == interval
    assert waited[-1], "some layer waits in the end, or nothing was tested"


def test_all_clients_agree_at_the_end_of_a_window_and_only_then():
    phi, cohort = 3, (0, 1, 4)
    federation = Federation(Method(schedule=FedLAMA(phi), client_opt=SGD(0.1, momentum=0.9)), local=STEPS)
    for number in range(1, 4 * phi + 1):
        plan = plan_round(federation.contract, federation.server)
        federation.round(cohort)
        states = [federation.states[i] for i in cohort]
        if number % phi:
            silent = frozenset(SMALL.names) - plan.names
            assert all(set(state.unsent) == silent for state in states)
            assert all(set(state.opt) == {f"momentum/{name}" for name in SMALL.names} for state in states)
            assert bool(silent) == (number > phi), "the first window has no long interval yet"
            for name in silent:
                assert not torch.equal(states[0].unsent[name], states[1].unsent[name])
        else:
            assert plan.names == frozenset(SMALL.names)
            assert not any(state.unsent or state.opt or state.codec or state.correction for state in states)
            for i in cohort:
                federation.download(i)
                assert same_public(federation.public[i], federation.server.public)


def test_training_together_is_training_one_after_another():
    method = Method(schedule=FedLAMA(2), client_opt=SGD(0.1, momentum=0.9))
    federations = [Federation(method, local=STEPS) for _ in range(2)]
    for version in range(4):
        for federation, trainer in zip(federations, (LoopTrainer(), VmapTrainer()), strict=True):
            plan = plan_round(federation.contract, federation.server)
            for i in (0, 1, 2):
                federation.download(i)
            states = tuple(federation.states[i] for i in (0, 1, 2))
            keys = [federation.key.fold("batches", version, i) for i in (0, 1, 2)]
            work = workload(federation.task, (0, 1, 2), keys, STEPS)
            group = Group(federation.server.public, plan, (0, 1, 2), states)
            messages, after = federation.train(group, work, trainer)
            federation.states.update(zip((0, 1, 2), after, strict=True))
            federation.close(plan, dict(zip((0, 1, 2), messages, strict=True)))
    for name, block in federations[0].weights().items():
        torch.testing.assert_close(block, federations[1].weights()[name], rtol=1e-5, atol=1e-5)


# -- which layers wait -------------------------------------------------------------------------------------------------

THREE = Spec.of({f"{n}.weight": torch.zeros(size) for n, size in (("a", (10, 1)), ("b", (30, 2)), ("c", (30, 1)))})


@pytest.mark.parametrize(("include", "long"), [(True, {"b.weight", "c.weight"}), (False, {"b.weight"})])
def test_layers_wait_up_to_the_crossing(include, long):
    """b, c, a with d dim = 60, 90, 60 of 210: delta .29, .71, 1 crosses 1 - lambda = .4, .1, 0 at c."""
    schedule = FedLAMA(2, include_crossing=include)
    plans = play(schedule, THREE, {"a.weight": 6.0, "b.weight": 1.0, "c.weight": 3.0}, 3)
    assert plans[:2] == [frozenset(THREE.names)] * 2
    assert frozenset(THREE.names) - plans[2] == long


def test_accelerated_the_few_numbers_that_differ_most_speak_in_every_round():
    schedule = FedLAMA(2, accelerate=True, include_crossing=False)
    plans = play(schedule, THREE, {"a.weight": 6.0, "b.weight": 1.0, "c.weight": 3.0}, 4)
    everything = frozenset(THREE.names)
    assert plans == [frozenset(), everything, {"a.weight"}, everything]


def test_accelerated_without_disagreement_is_fedavg_over_the_window():
    """One client, whole batches: a window of two rounds of one step is one round of two, momentum and all."""
    slow = Federation(Method(client_opt=SGD(0.1, momentum=0.9)), local=Local(batch=0, steps=2))
    fast = Federation(
        Method(client_opt=SGD(0.1, momentum=0.9), schedule=FedLAMA(2, accelerate=True)), local=Local(batch=0, steps=1)
    )
    for _ in range(3):
        slow.round((0,))
        assert {numbers(fast, data) for data in fast.round((0,)).values()} == {0}
        assert {numbers(fast, data) for data in fast.round((0,)).values()} == {4 * D}
    for name, block in fast.weights().items():
        torch.testing.assert_close(block, slow.weights()[name], rtol=1e-5, atol=1e-6)


def test_clients_that_do_not_differ_never_wait():
    """The same client three times over: d is rounding only, and every layer keeps tau0."""
    federation = Federation(Method(schedule=FedLAMA(2), client_weight=Uniform(), client_opt=SGD(0.1)), local=STEPS)
    for version in range(6):
        plan = plan_round(federation.contract, federation.server)
        assert plan.names == frozenset(SMALL.names), version
        federation.download(0)
        once = federation.upload(0)
        body, schema = wire.unpack(once, federation.contract.schema.sent_by(0)).bodies[0], federation.contract.schema
        federation.close(plan, {i: wire.pack(wire.UP, version, [body], schema.sent_by(i)) for i in range(3)})


def test_layers_are_modules_whatever_the_coordinates():
    lenet = Spec.of(dict(build("cnn2").named_parameters()))
    zeros = lenet.zeros()
    spaces = {
        Full(): {"conv1": 2, "conv2": 2, "head": 2},
        FedPara(gamma=0.1): None,
        LoRA(rank=2): None,
        MAPO(k=4, redraw_every=0): {"model": 1},
    }
    for space, expected in spaces.items():
        coords = Spec.of(space.init(zeros, space.basis(lenet, Key(0), "cpu"), Key(1)))
        layers = FedLAMA()._layers(coords)
        sizes = {group: len(layer.names) for group, layer in layers.items()}
        assert sum(layer.size for layer in layers.values()) == coords.size
        modules = {name.rpartition(".")[0] for name in lenet.names}
        assert set(sizes) <= modules or sizes == {"model": 1}, space
        if expected and space != Full():
            assert sizes == expected
        for layer in FedLAMA(rules="public")._layers(coords).values():
            assert len({name.split("/")[0] for name in layer.names}) == 1


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phi", "share"), [(2, 53.317), (4, 29.975), (8, 18.305)])
def test_femnist_costs_what_the_paper_says(phi, share):
    """Table 3 (53.32 %, 29.98 %): 200 rounds, the wide kernel is the one on which clients differ least."""
    with torch.device("meta"):
        spec = Spec.of(dict(build("femnist-cnn").named_parameters()))
    assert spec.size == 6_603_710
    wide = max(spec, key=lambda block: block.numel).name
    # one zero stands for all the numbers of a block: the mean does not move here
    small = {block.name: torch.zeros(()).expand(block.shape) for block in spec}
    schedule = FedLAMA(phi, rules="public")
    state, sent = schedule.init(spec), 0
    for version in range(200):
        plan = schedule.plan(state, spec, version)
        sent += spec.restrict(plan.names).size
        mean = {name: block for name, block in small.items() if name in plan.names}
        apart = {name: torch.tensor((0.1 if name == wide else 1.0) * block.numel()) for name, block in mean.items()}
        state = schedule.observe(state, plan, mean, apart)
    assert 100 * sent / (200 * spec.size) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("phi", [2, 4])
def test_a_steady_window_costs_what_the_formula_says(phi):
    """Real messages: cost = 1 - Lambda_long (1 - 1 / phi), between 1 / phi and 1."""
    federation = Federation(Method(schedule=FedLAMA(phi), client_opt=SGD(0.1)), local=STEPS)
    for window in range(4):
        often = federation.server.schedule["often"].tolist()
        long = sum(
            layer.size for layer, now in zip(FedLAMA(phi)._layers(SMALL).values(), often, strict=True) if not now
        )
        sent = sum(numbers(federation, federation.round((0, 1, 2))[1], 1) for _ in range(phi))
        cost = sent / (phi * 4 * D)
        assert cost == pytest.approx(1 - long / D * (1 - 1 / phi))
        assert 1 / phi <= cost <= 1
        assert bool(long) == (window > 0)


def test_on_digits_fedlama_learns_with_fewer_bytes_than_fedavg():
    sent, accuracy = {}, {}
    for method in ("fedavg", "fedlama"):
        quick = {"rounds": 12, "local.steps": 6, "cohort.size": 5, "eval.every": 12}
        job = build_job(resolve(method, "digits", quick))
        records = list(LocalEngine().run(job))
        sent[method] = sum(r.bytes_up + r.bytes_down + r.bytes_catchup for r in records)
        accuracy[method] = records[-1].accuracy
    assert sent["fedlama"] < 0.8 * sent["fedavg"]
    assert accuracy["fedlama"] > 0.7
    assert accuracy["fedlama"] > accuracy["fedavg"] - 0.15


# -- who was away ------------------------------------------------------------------------------------------------------


def answers(federation: Federation, client: int, state) -> bytes:
    """What a client in that state would say now."""
    version = federation.server.public.version
    work = workload(federation.task, [client], [Key(9)], STEPS)
    plan = federation.requested[client]
    group = Group(federation.public[client], plan, (client,), (state,))
    return bytes(federation.train(group, work)[0][0]) + version.to_bytes(2, "little")


def drifting() -> Federation:
    """Client 0 is in the middle of a window and holds a layer, and momentum, that nobody else knows."""
    federation = Federation(Method(schedule=FedLAMA(3), client_opt=SGD(0.1, momentum=0.9)), local=STEPS)
    for _ in range(4):
        federation.round((0, 1, 2))
    assert federation.states[0].unsent
    assert federation.states[0].opt
    return federation


def test_who_returns_after_missed_windows_starts_like_anybody_else():
    federation = drifting()
    for _ in range(6):
        federation.round((1, 2))
    assert federation.server.public.version == 10
    federation.download(0)
    assert same_public(federation.public[0], federation.server.public)
    assert federation.states[0].unsent == {}
    new = initial_client_state(federation.contract, federation.first)
    assert answers(federation, 0, federation.states[0]) == answers(federation, 0, new)
    assert answers(federation, 1, federation.states[1]) != answers(
        federation, 1, initial_client_state(federation.contract, federation.first)
    )


def test_who_misses_a_round_within_the_window_keeps_what_still_waits_but_not_the_momentum():
    federation = drifting()
    federation.round((1, 2))
    held = federation.states[0].unsent
    federation.download(0)
    assert same(federation.states[0].unsent, held), "its layer was not synchronised meanwhile"
    without = replace(federation.states[0], opt={})
    assert answers(federation, 0, federation.states[0]) == answers(federation, 0, without)


def test_the_cohort_is_drawn_anew_at_full_synchronisation_only():
    job = build_job(resolve("fedlama", "digits", {"rounds": 8, "local.steps": 1, "cohort.size": 5}))
    simulation = LocalEngine().prepare(job)
    state, cohorts = simulation.start(), []
    for _ in range(8):
        state, _ = simulation.round(state)
        cohorts.append(state.cohort)
    assert len(set(cohorts[:4])) == len(set(cohorts[4:])) == 1
    assert cohorts[3] != cohorts[4]


# -- what it goes together with ----------------------------------------------------------------------------------------

TOGETHER = {
    "top-k both ways": {"up": TopK(0.2), "down": TopK(0.2)},
    "eight bits": {"up": Quantize(8), "down": Quantize(8)},
    "error feedback": {"up": ErrorFeedback(TopK(0.2)), "down": ErrorFeedback(TopK(0.2))},
    "scaffold": {"correction": Scaffold(), "client_opt": SGD(0.05)},
    "feddyn": {"correction": FedDyn(), "client_opt": SGD(0.05)},
    "fedprox": {"correction": FedProx(0.1)},
    "adam at the server": {"server_opt": Adam(0.01)},
    "momentum at the server": {"server_opt": SGD(0.8, momentum=0.9)},
    "adam at the client": {"client_opt": Adam(0.01)},
    "fedpara": {"space": FedPara(gamma=0.1)},
    "lora": {"space": LoRA(rank=2), "client_opt": SGD(0.01, momentum=0.9)},
    "a fixed random subspace": {"space": Route((("0.*", MAPO(k=8, redraw_every=0)), ("*", Full())))},
    "values": {"upload": "weights"},
    "snapshots": {"download": "full"},
    "a private head": {"schedule": FedLAMA(2, private=("2.*",))},
    "public rules": {"schedule": FedLAMA(2, rules="public"), "client_weight": Uniform()},
    "accelerated": {"schedule": FedLAMA(2, accelerate=True)},
}


@pytest.mark.parametrize("case", TOGETHER)
def test_it_goes_together_with(case):
    method = Method(**{"schedule": FedLAMA(2), "client_opt": SGD(0.1, momentum=0.9), **TOGETHER[case]})
    federation = Federation(method, local=STEPS)
    held = set()
    for number, cohort in enumerate(((0, 1, 4), (2, 3), (1, 5, 2), (4, 0), (3, 5, 1), (0, 2))):
        for _ in range(2 if number < 5 else 1):  # the last window is cut short
            plan = plan_round(federation.contract, federation.server)
            before = federation.server
            federation.round(cohort)
            silent = frozenset(federation.contract.sendable.names) - plan.names
            held |= {name for i in cohort for name in federation.states[i].unsent}
            for tree, after in ((before.opt, federation.server.opt), (before.correction, federation.server.correction)):
                for name in tree:
                    if {name, name.split("/", 1)[-1]} & silent:
                        assert torch.equal(tree[name], after[name]), f"{name} was silent, its memory moved"
        federation.download(number)
    assert held, "something waited, or nothing was tested"
    assert all(torch.isfinite(torch.tensor(federation.losses)))
    for client in federation.public:
        federation.download(client)
        assert same_public(federation.public[client], federation.server.public)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_frame_that_is_redrawn_is_refused_before_anything_is_trained():
    with pytest.raises(IncompatibleParts, match="Write redraw_every = 0"):
        Federation(Method(space=MAPO(k=8, redraw_every=1), schedule=FedLAMA(2)))
    Federation(Method(space=MAPO(k=8, redraw_every=1), schedule=FedLAMA(1)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedLAMA(0), "phi must be 1"),
        (lambda: FedLAMA(2, rules="papers"), "rules must be one of paper, public"),
        (lambda: FedLAMA(2, rules="public").init(Spec.of({"b": torch.zeros(3)})), "write rules = 'paper'"),
        (lambda: FedLAMA(2, private=("nothing*",)).init(SMALL), "matches no block"),
    ],
)
def test_bad_settings_are_refused_in_one_line(make, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)
