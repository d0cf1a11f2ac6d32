"""FedLAMA: which layers get the long interval, client state within a window, and cost."""

import pytest
import torch
import torch.nn.functional as F

from tests.federation import SIZES, Federation, digits, keeps_nothing, perceptron, records_of, same_public, workload
from thinwire.aggregators import Uniform
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.federation.engine import Engine
from thinwire.models import build
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.protocol.client import Group
from thinwire.protocol.round import Round
from thinwire.reports.report import report
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.run_directory import RunFolder
from thinwire.schedules import AllBlocks, FedLAMA, Plan
from thinwire.spaces import MAPO, FedPara, Full, LoRA
from thinwire.training import Local
from thinwire.training.backends import LoopTrainer, VmapTrainer
from thinwire.wire import message as wire

SLOW = pytest.mark.slow
STEPS = Local(batch=8, steps=3)
SMALL = Spec.of(dict(perceptron().named_parameters()))
D = SMALL.size
SIZE = {block.name: block.numel for block in SMALL}


def bytes_of_values(federation: Federation, data: bytes, client: int = 0) -> int:
    """Bytes of coordinates in a client's message."""
    schema = federation.contract.schema
    return len(wire.unpack_body(wire.unpack(data, schema.sent_by(client)).bodies[0], schema).fields[wire.COORDS])


def plans_of(schedule: FedLAMA, spec: Spec, discrepancy: dict[str, float], rounds: int) -> list[frozenset[str]]:
    """The plans of some rounds with a constant mean and a constant discrepancy for each parameter of a block."""
    state, plans = schedule.init(spec), []
    for version in range(rounds):
        plan = schedule.plan(state, spec, version)
        plans.append(plan.names)
        reported = {}
        for block in spec.restrict(plan.names):
            group = next(iter(schedule.report({block.name: torch.zeros(1)}, plan)))
            reported[group] = reported.get(group, 0.0) + discrepancy[block.name] * block.numel
        report = {group: torch.tensor(value) for group, value in reported.items()}
        state = schedule.observe(state, plan, spec.restrict(plan.names).zeros(), report)
    return plans


# -- the contract ------------------------------------------------------------------------------------------------------


def test_a_window_of_one_round_is_fedavg_bit_for_bit():
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
    assert all(keeps_nothing(state) for state in mine.states.values())


# -- the algorithm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["paper", "public"])
def test_fedlama_equals_a_reference_loop(rules):
    """Torch models that keep their layers and their momentum within a window; discrepancies by definition."""
    phi, windows = 3, ((0, 3, 4), (1, 2, 3), (5, 0, 1), (2, 4, 5))
    method = Method(schedule=FedLAMA(phi, rules=rules), client_opt=SGD(0.05, momentum=0.9))
    federation = Federation(method, local=STEPS)
    x, y = digits()
    common = {name: p.detach().clone() for name, p in perceptron().named_parameters()}
    groups = {"paper": [("0.weight", "0.bias"), ("2.weight", "2.bias")]}.get(rules, [(name,) for name in common])
    dims = [sum(common[name].numel() for name in group) for group in groups]
    interval = [1] * len(groups)
    version, delayed = 0, []
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
            discrepancy = [0.0] * len(groups)
            for place, group in enumerate(groups):
                if turn % interval[place]:
                    continue
                for name in group:
                    mine = {i: dict(model.named_parameters())[name].data for i, model in models.items()}
                    mean = sum(weight[i] * mine[i] for i in cohort)
                    discrepancy[place] += sum(weight[i] * float((mean - mine[i]).square().sum()) for i in cohort)
                    common[name] = mean.clone()
                    for i in cohort:
                        mine[i].copy_(mean)
                discrepancy[place] /= interval[place] * dims[place]
        if rules == "paper" or version >= 7:
            candidates = [i for i, group in enumerate(groups) if rules == "paper" or common[group[0]].dim() > 1]
            total, size = sum(d * n for d, n in zip(discrepancy, dims, strict=True)), sum(dims[i] for i in candidates)
            interval, long, delta, share = [1] * len(groups), [], 0.0, 0.0
            for i in sorted(candidates, key=lambda i: discrepancy[i]):
                delta, share = delta + discrepancy[i] * dims[i] / total, share + dims[i] / size
                long.append(i)
                if delta >= 1 - share:
                    break
            for i in long:
                interval[i] = phi
        delayed.append(interval.count(phi))
        for name, block in federation.weights().items():
            torch.testing.assert_close(block, common[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        often = federation.server.schedule["often"].tolist()
        assert [1 if now else phi for now in often] == interval
    assert delayed[-1], "no layer got the long interval"


def test_clients_have_equal_weights_only_at_the_end_of_a_window():
    phi, cohort = 3, (0, 1, 4)
    federation = Federation(Method(schedule=FedLAMA(phi), client_opt=SGD(0.1, momentum=0.9)), local=STEPS)
    for number in range(1, 4 * phi + 1):
        plan = Round.open(federation.contract, federation.server).plan
        federation.round(cohort)
        states = [federation.states[i] for i in cohort]
        if number % phi:
            absent = frozenset(SMALL.names) - plan.names
            assert all(set(state.unsent) == absent for state in states)
            assert all(set(state.opt["momentum"]) == set(SMALL.names) for state in states)
            assert bool(absent) == (number > phi), "the first window has no long interval"
            for name in absent:
                assert not torch.equal(states[0].unsent[name], states[1].unsent[name])
        else:
            assert plan.names == frozenset(SMALL.names)
            assert not any(state.unsent or state.opt or state.codec or state.correction for state in states)
            for i in cohort:
                federation.download(i)
                assert same_public(federation.public[i], federation.server.public)


def test_vmap_and_loop_train_the_same():
    method = Method(schedule=FedLAMA(2), client_opt=SGD(0.1, momentum=0.9))
    federations = [Federation(method, local=STEPS) for _ in range(2)]
    for version in range(4):
        for federation, backend in zip(federations, (LoopTrainer(), VmapTrainer()), strict=True):
            plan = Round.open(federation.contract, federation.server).plan
            for i in (0, 1, 2):
                federation.download(i)
            states = tuple(federation.states[i] for i in (0, 1, 2))
            keys = [federation.key.fold("batches", version, i) for i in (0, 1, 2)]
            work = workload(federation.task, (0, 1, 2), keys, STEPS)
            group = Group(federation.server.public, plan, (0, 1, 2), states)
            messages, after = zip(*federation.train(group, work, backend), strict=True)
            federation.states.update(zip((0, 1, 2), after, strict=True))
            federation.close(plan, dict(zip((0, 1, 2), messages, strict=True)))
    for name, block in federations[0].weights().items():
        torch.testing.assert_close(block, federations[1].weights()[name], rtol=1e-5, atol=1e-5)


# -- choice of intervals -----------------------------------------------------------------------------------------------

THREE = Spec.of({f"{n}.weight": torch.zeros(size) for n, size in (("a", (10, 1)), ("b", (30, 2)), ("c", (30, 1)))})


@pytest.mark.parametrize(("include", "long"), [(True, {"b.weight", "c.weight"}), (False, {"b.weight"})])
def test_layers_up_to_the_crossing_get_the_long_interval(include, long):
    """b, c, a with d dim = 60, 90, 60 of 210: delta .29, .71, 1 crosses 1 - lambda = .4, .1, 0 at c."""
    schedule = FedLAMA(2, include_crossing=include)
    plans = plans_of(schedule, THREE, {"a.weight": 6.0, "b.weight": 1.0, "c.weight": 3.0}, 3)
    assert plans[:2] == [frozenset(THREE.names)] * 2
    assert frozenset(THREE.names) - plans[2] == long


def test_accelerated_layers_with_the_largest_discrepancy_are_synchronized_in_every_round():
    schedule = FedLAMA(2, accelerate=True, include_crossing=False)
    plans = plans_of(schedule, THREE, {"a.weight": 6.0, "b.weight": 1.0, "c.weight": 3.0}, 4)
    everything = frozenset(THREE.names)
    assert plans == [frozenset(), everything, {"a.weight"}, everything]


def test_accelerated_without_discrepancy_is_fedavg_over_the_window():
    """One client, full batches: a window of two rounds of one step equals one round of two steps, with momentum."""
    slow = Federation(Method(client_opt=SGD(0.1, momentum=0.9)), local=Local(batch=0, steps=2))
    fast = Federation(
        Method(client_opt=SGD(0.1, momentum=0.9), schedule=FedLAMA(2, accelerate=True)), local=Local(batch=0, steps=1)
    )
    for _ in range(3):
        slow.round((0,))
        assert {bytes_of_values(fast, data) for data in fast.round((0,)).values()} == {0}
        assert {bytes_of_values(fast, data) for data in fast.round((0,)).values()} == {4 * D}
    for name, block in fast.weights().items():
        torch.testing.assert_close(block, slow.weights()[name], rtol=1e-5, atol=1e-6)


def test_without_discrepancy_all_layers_keep_the_short_interval():
    """Three equal clients: the discrepancy is only rounding, and every layer keeps tau0."""
    federation = Federation(Method(schedule=FedLAMA(2), client_weight=Uniform(), client_opt=SGD(0.1)), local=STEPS)
    for version in range(6):
        plan = Round.open(federation.contract, federation.server).plan
        assert plan.names == frozenset(SMALL.names), version
        federation.download(0)
        once = federation.upload(0)
        body, schema = wire.unpack(once, federation.contract.schema.sent_by(0)).bodies[0], federation.contract.schema
        federation.close(plan, {i: wire.pack(wire.UP, version, [body], schema.sent_by(i)) for i in range(3)})


def test_layers_are_modules_in_every_space():
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


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phi", "share"), [(4, 29.975), pytest.param(2, 53.317, marks=SLOW), pytest.param(8, 18.305, marks=SLOW)]
)
def test_cost_on_femnist_equals_that_of_the_paper(phi, share):
    """Table 3 (53.32 %, 29.98 %): 200 rounds, the wide kernel has the smallest discrepancy."""
    with torch.device("meta"):
        spec = Spec.of(dict(build("femnist-cnn").named_parameters()))
    assert spec.size == 6_603_710
    wide = max(spec, key=lambda block: block.numel).name
    # expanded zeros need no memory: the mean is constant here
    small = {block.name: torch.zeros(()).expand(block.shape) for block in spec}
    schedule = FedLAMA(phi, rules="public")
    state, sent = schedule.init(spec), 0
    for version in range(200):
        plan = schedule.plan(state, spec, version)
        sent += spec.restrict(plan.names).size
        mean = {name: block for name, block in small.items() if name in plan.names}
        report = {name: torch.tensor((0.1 if name == wide else 1.0) * block.numel()) for name, block in mean.items()}
        state = schedule.observe(state, plan, mean, report)
    assert 100 * sent / (200 * spec.size) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("phi", [2, 4])
def test_cost_of_a_window_equals_the_formula(phi):
    """Real messages: cost = 1 - Lambda_long (1 - 1 / phi), between 1 / phi and 1."""
    federation = Federation(Method(schedule=FedLAMA(phi), client_opt=SGD(0.1)), local=STEPS)
    for window in range(4):
        often = federation.server.schedule["often"].tolist()
        long = sum(
            layer.size for layer, now in zip(FedLAMA(phi)._layers(SMALL).values(), often, strict=True) if not now
        )
        sent = sum(bytes_of_values(federation, federation.round((0, 1, 2))[1], 1) for _ in range(phi))
        cost = sent / (phi * 4 * D)
        assert cost == pytest.approx(1 - long / D * (1 - 1 / phi))
        assert 1 / phi <= cost <= 1
        assert bool(long) == (window > 0)


def test_fedlama_learns_digits_with_fewer_bytes_than_fedavg():
    sent, accuracy = {}, {}
    for method in ("fedavg", "fedlama"):
        quick = {"rounds": 12, "local.steps": 6, "cohort.size": 5, "eval.every": 12}
        job = build_job(resolve(method, "digits", quick))
        records = records_of(Engine(), job)
        sent[method] = sum(r.bytes_up + r.bytes_down + r.bytes_catchup for r in records)
        accuracy[method] = records[-1].accuracy
    assert sent["fedlama"] < 0.8 * sent["fedavg"]
    assert accuracy["fedlama"] > 0.7
    assert accuracy["fedlama"] > accuracy["fedavg"] - 0.15


# -- records of windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["paper", "public"])
def test_the_record_of_a_window_has_discrepancy_and_shares_of_each_layer(rules):
    """Against the definition, with discrepancies that are set: d of a bias is 4, of kernels 1 and 2."""
    set_to = {"0.weight": 1.0, "0.bias": 4.0, "2.weight": 2.0, "2.bias": 4.0}
    schedule = FedLAMA(2, rules=rules)
    state = schedule.init(SMALL)
    assert schedule.measured(state, SMALL) == {}
    for version in range(8):
        plan = schedule.plan(state, SMALL, version)
        groups = schedule._groups(sorted(plan.names))
        last = schedule.resamples(version + 1)
        often = dict(zip(schedule._layers(SMALL), state["often"].tolist(), strict=True))
        report = {
            group: torch.tensor(
                sum(set_to[n] * SIZE[n] * (1 if often[group] else 2) for n in names), dtype=torch.float64
            )
            for group, names in groups.items()
        }
        state = schedule.observe(state, plan, SMALL.restrict(plan.names).zeros(), report)
        assert bool(schedule.measured(state, SMALL)) == (last and (rules == "paper" or version >= 6))
    found = schedule.measured(state, SMALL)
    layers = {"paper": {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}}.get(
        rules, {name: (name,) for name in SMALL.names}
    )
    size = {layer: sum(SIZE[n] for n in names) for layer, names in layers.items()}
    total = {layer: sum(set_to[n] * SIZE[n] for n in names) for layer, names in layers.items()}
    assert {layer: facts["discrepancy"] for layer, facts in found.items()} == {
        layer: pytest.approx(total[layer] / size[layer], rel=1e-5) for layer in found
    }
    taken = [layer for layer in found if "delta" in found[layer]]
    assert taken == {"paper": ["0", "2"], "public": ["0.weight", "2.weight"]}[rules]
    candidates = sum(size[layer] for layer in taken)
    for count, layer in enumerate(taken, 1):
        delta = sum(total[one] for one in taken[:count]) / sum(total.values())
        left = 1 - sum(size[one] for one in taken[:count]) / candidates
        assert (found[layer]["delta"], found[layer]["left"]) == pytest.approx((delta, left), abs=1e-5)
    assert [facts["interval"] for facts in found.values()] == [
        1 if name in schedule.plan(state, SMALL, 8).names else 2 for name in (layers[layer][0] for layer in found)
    ]


def test_a_checkpoint_without_discrepancies_continues():
    schedule = FedLAMA(2)
    old = {name: value for name, value in schedule.init(SMALL).items() if name != "discrepancy"}
    assert schedule.measured(old, SMALL) == {}
    plan = schedule.plan(old, SMALL, 0)
    report = schedule.report(SMALL.zeros(), plan)
    assert schedule.observe(old, plan, SMALL.zeros(), report)["discrepancy"].tolist() == [-1.0, -1.0]


def test_windows_are_in_the_metrics_and_layers_are_drawn(tmp_path):
    small = {"rounds": 6, "task.clients": 4, "cohort.size": 2, "local.steps": 1, "engine.backend": "loop"}
    execute(resolve("fedlama", "digits", {**small, "method.schedule.phi": 2}), tmp_path / "run")
    records = RunFolder.open(tmp_path / "run").history()
    assert [bool(record.layers) for record in records] == [False, True] * 3
    windows = [record.layers for record in records if record.layers]
    for window in windows:
        assert set(window) == {"fc1", "head"}
        assert [facts["delta"] for facts in window.values()][-1] == pytest.approx(1, abs=1e-5)
        assert [facts["left"] for facts in window.values()][-1] == 0
        assert 1 <= sum(facts["interval"] == 2 for facts in window.values()) <= 2
    report([tmp_path / "run"], tmp_path / "page.html")
    assert "Bytes up by layer" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("rules", ["paper", "public"])
def test_reports_of_many_clients_together_equal_those_of_each(rules):
    """The operations of a GPU, here on a CPU: each client's report but for rounding."""
    schedule = FedLAMA(phi=2, rules=rules)
    draw = torch.Generator().manual_seed(0)
    shapes = {"conv.weight": (4, 3, 3, 3), "conv.bias": (4,), "scale": (), "fc.weight": (10, 36)}
    deltas = {name: torch.randn(5, *shape, generator=draw) for name, shape in shapes.items()}
    plan = Plan(frozenset(shapes))
    together, each = schedule._reports_together(deltas), schedule.reports(deltas, plan)
    assert list(together) == list(each)
    for name, block in each.items():
        assert block.dtype == together[name].dtype == torch.float32
        torch.testing.assert_close(together[name], block, rtol=1e-6, atol=0)
