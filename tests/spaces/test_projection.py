"""MAPA, MAPAX and MAPO: exact identities, and identities in expectation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.core.key import Key
from thinwire.core.tree import Spec, flatten, same
from thinwire.errors import ConfigError
from thinwire.kernels import projection as generated
from thinwire.spaces import projection

SGD = tw.optimizers.SGD


def clients(n=6, rows=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(3, 5, generator=generator)
    out = []
    for i in range(n):
        y = torch.randint(0, 3, (rows + 3 * i,), generator=generator)
        out.append((center[y] + 0.5 * torch.randn(len(y), 5, generator=generator), y))
    return out


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))  # 57 weights


D = 57


def train(space, lr=0.5, rounds=4, momentum=0.0, seed=0, **settings):
    method = tw.Method(space=space, client_opt=SGD(lr, momentum=momentum), **settings.pop("method", {}))
    settings.setdefault("cohort", 3)
    return tw.simulate(model(), clients(), method, rounds=rounds, seed=seed, local=tw.Local(batch=8), **settings)


def vector(run):
    return flatten(run.weights)


SPACES = [
    tw.spaces.MAPO(k=8),
    tw.spaces.MAPO(k=8, entries="gaussian", layout="contiguous"),
    tw.spaces.MAPO(k=8, layout="strided", redraw_every=3),
    tw.spaces.MAPA(p=6),
    tw.spaces.MAPA(p=6, entries="gaussian", normalize="orthonormal"),
    tw.spaces.MAPAX(k=5, p=3),
    tw.spaces.MAPAX(k=5, p=3, entries="gaussian", normalize="none", redraw_every=0),
    tw.spaces.MAPAX(segment=8, budget=20),
    tw.spaces.MAPAX(k=5, p=3, scale="unit"),
]


@pytest.mark.parametrize(("entries", "layout"), [("gaussian", "strided"), ("sign", "permuted")])
def test_mapax_with_one_segment_is_mapa_and_with_one_direction_is_mapo(entries, layout):
    common = {"entries": entries, "layout": layout}
    for general, special in (
        (tw.spaces.MAPAX(k=1, p=4, **common), tw.spaces.MAPA(p=4, **common)),
        (tw.spaces.MAPAX(k=8, p=1, **common), tw.spaces.MAPO(k=8, **common)),
    ):
        a, b = train(general), train(special)
        assert same(a.weights, b.weights)
        # messages differ only in the schema: the same number of bytes
        assert [r.bytes_up for r in a.history] == [r.bytes_up for r in b.history]


@pytest.mark.parametrize(("entries", "momentum"), [("sign", 0.9), ("gaussian", 0.0)])
def test_a_segment_for_each_weight_is_fedavg(entries, momentum):
    mine = train(tw.spaces.MAPO(k=D, entries=entries), lr=0.1, momentum=momentum)
    theirs = train(tw.spaces.Full(), lr=0.1, momentum=momentum)
    assert torch.allclose(vector(mine), vector(theirs), atol=1e-5)


def test_a_segment_for_each_weight_with_an_unscaled_gaussian_is_fedavg_with_a_random_learning_rate():
    mine = train(tw.spaces.MAPO(k=D, entries="gaussian", normalize="none"), lr=0.1, rounds=1)
    basis = tw.spaces.MAPO(k=D, entries="gaussian", normalize="none").basis(
        Spec.of(dict(model().named_parameters())), Key(0).fold("run").fold("frame", 0), "cpu"
    )
    a = float(basis["a"])
    assert a not in (1.0, -1.0)
    theirs = train(tw.spaces.Full(), lr=0.1 * a * a, rounds=1)
    assert torch.allclose(vector(mine), vector(theirs), atol=1e-5)


def test_a_square_orthonormal_basis_is_fedavg():
    e = -(-D // 7)
    mine = train(tw.spaces.MAPAX(k=7, p=e, normalize="orthonormal"), lr=0.1, momentum=0.9)
    theirs = train(tw.spaces.Full(), lr=0.1, momentum=0.9)
    assert torch.allclose(vector(mine), vector(theirs), atol=1e-5)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_averaging_coordinates_is_averaging_updates(space):
    base = dict(model().named_parameters())
    base = {name: block.detach() for name, block in base.items()}
    basis = space.basis(Spec.of(base), Key(3), "cpu")
    shape = space.init(base, basis, Key(0))["model/b"].shape
    several = [Key(i).normal(*shape) for i in range(4)]
    shares = (0.1, 0.2, 0.3, 0.4)
    of_mean = flatten(space.expand(base, basis, {"model/b": sum(p * b for p, b in zip(shares, several, strict=True))}))
    mean_of = sum(p * flatten(space.expand(base, basis, {"model/b": b})) for p, b in zip(shares, several, strict=True))
    assert torch.allclose(of_mean, mean_of, atol=1e-5)


@pytest.mark.parametrize(
    "space", [tw.spaces.MAPO(k=8), tw.spaces.MAPA(p=6), tw.spaces.MAPAX(k=5, p=3, layout="contiguous")], ids=repr
)
def test_one_full_batch_step_of_all_clients_is_a_projected_gradient_step(space):
    method = tw.Method(space=space, client_opt=SGD(0.7))
    run = tw.simulate(model(), clients(), method, rounds=1, local=tw.Local(batch=0))
    inputs, targets = (torch.cat(part) for part in zip(*clients(), strict=True))
    net = model()
    nn.functional.cross_entropy(net(inputs), targets).backward()
    base = {name: p.detach() for name, p in net.named_parameters()}
    gradient = {name: p.grad for name, p in net.named_parameters()}
    basis = space.basis(Spec.of(base), Key(0).fold("run").fold("frame", 0), "cpu")
    # P g = U(gradient of <U(B), g> in B): the adjoint of U by autograd, U by expand
    b = space.init(base, basis, Key(0))["model/b"].requires_grad_()
    (flatten(space.expand(base, basis, {"model/b": b})) @ flatten(gradient)).backward()
    wanted = flatten(space.expand(base, basis, {"model/b": -0.7 * b.grad}))
    assert torch.allclose(vector(run), wanted, atol=1e-6)


@pytest.mark.parametrize(("k", "p"), [(1, 12), (12, 1), (4, 3)])
def test_the_projection_error_has_its_theoretical_mean(k, p):
    """E |x - P x|^2 / |x|^2 = 1 - k p / d; for one segment also Var = 2 p (d - p) / (d^2 (d + 2))."""
    d = 60
    x = Key(99).normal(d).double()
    errors = []
    for trial in range(500):
        a = Key(trial).normal(p, d // k).double()
        rows = x.view(k, d // k)
        best = torch.linalg.lstsq(a.T, rows.T).solution.T @ a
        errors.append(float((rows - best).square().sum() / x.square().sum()))
    errors = torch.tensor(errors)
    assert float(errors.mean()) == pytest.approx(1 - k * p / d, abs=0.012)
    if k == 1:
        assert float(errors.var()) == pytest.approx(2 * p * (d - p) / (d * d * (d + 2)), rel=0.3)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "permuted"])
@pytest.mark.parametrize(("d", "k"), [(57, 10), (57, 56), (11_274, 8_192)])
def test_segment_lengths_differ_by_at_most_one_and_every_coordinate_has_an_effect(layout, d, k):
    space, base = tw.spaces.MAPO(k=k, layout=layout), {"w": torch.zeros(d)}
    basis = space.basis(Spec.of(base), Key(3), "cpu")
    assert space.sizes(d) == (k, 1, -(-d // k))
    # each weight moves by the index of its segment, up to the sign
    indices = torch.arange(1.0, k + 1)[:, None]
    moved = space.expand(base, basis, {"model/b": indices})["w"].abs()
    counts = torch.bincount((moved.round().long() - 1), minlength=k)
    assert counts.tolist().count(0) == 0
    assert int(counts.max() - counts.min()) <= 1
    assert int(counts.sum()) == d


@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
def test_segments_of_equal_length_are_the_rows_of_b_a(layout):
    space, base = tw.spaces.MAPAX(k=6, p=2, layout=layout), {"w": torch.zeros(60)}
    basis = space.basis(Spec.of(base), Key(3), "cpu")
    b = Key(1).normal(6, 2)
    expected = (b @ basis["a"]).flatten()
    expected = expected[basis["place"]] if layout == "permuted" else expected
    assert torch.equal(space.expand(base, basis, {"model/b": b})["w"], expected)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_initial_coordinates_make_the_base_bit_for_bit(space):
    base = {name: p.detach() for name, p in model().named_parameters()}
    basis = space.basis(Spec.of(base), Key(3), "cpu")
    assert same(space.expand(base, basis, space.init(base, basis, Key(0))), base)


def test_scaling_the_basis_by_c_scales_the_learning_rate_by_c_squared():
    e = -(-D // 8)
    isometric = train(tw.spaces.MAPO(k=8), lr=0.5 / e, momentum=0.9)
    unscaled = train(tw.spaces.MAPO(k=8, normalize="none", scale="unit"), lr=0.5 / e, momentum=0.9)
    unit = train(tw.spaces.MAPO(k=8, scale="unit"), lr=0.5, momentum=0.9)
    assert same(isometric.weights, unscaled.weights)  # both have entries of exactly 1 and -1
    assert torch.allclose(vector(isometric), vector(unit), atol=1e-5)


def linear_map(space, d, key):
    """P, the matrix of U: vec(U(B)) = P vec(B)."""
    base = {"w": torch.zeros(d)}
    basis = space.basis(Spec.of(base), key, "cpu")
    shape = space.init(base, basis, Key(0))["model/b"].shape
    units = torch.eye(shape.numel()).view(-1, *shape)
    return torch.func.vmap(lambda b: space.expand(base, basis, {"model/b": b})["w"])(units).T


NORMALIZED = [
    {"entries": entries, "normalize": normalize}
    for entries in ("sign", "gaussian")
    for normalize in ("row", "orthonormal", "none")
]


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        ({}, True),
        ({}, False),
        ({"layout": "strided"}, True),
        ({"layout": "contiguous", "normalize": "none"}, False),
        ({"entries": "gaussian"}, False),
        ({"entries": "gaussian", "normalize": "none"}, True),
        ({"entries": "gaussian", "normalize": "orthonormal"}, True),
    ],
)
@pytest.mark.parametrize(
    ("k", "p"), [(6, 3), pytest.param(6, 1, marks=pytest.mark.slow), pytest.param(1, 7, marks=pytest.mark.slow)]
)
def test_an_isometric_basis_keeps_the_mean_of_a_step_and_the_norm_of_the_gradient(k, p, settings, stored, monkeypatch):
    """E[P P^T] = I and E |P^T g|^2 = |g|^2 also where k does not divide d, here 20 weights in 6 segments of 4 or 3."""
    if not stored:
        monkeypatch.setattr(projection, "STORED", 0)
    d, draws, g = 20, 120, Key(9).normal(20)
    space = tw.spaces.MAPAX(k=k, p=p, **settings)
    maps = torch.stack([linear_map(space, d, Key(i)) for i in range(draws)])
    products = maps @ maps.mT
    assert bool(((products.mean(0) - torch.eye(d)).abs() <= 5 * products.std(0) / draws**0.5 + 1e-5).all())
    squares = (maps.mT @ g).square().sum(1) / g.square().sum()
    assert abs(float(squares.mean()) - 1) <= 4 * float(squares.std()) / draws**0.5 + 1e-5


@pytest.mark.parametrize("settings", NORMALIZED, ids=lambda s: "-".join(s.values()))
def test_unit_scale_is_the_drawn_basis_bit_for_bit(settings):
    """A as before there was a scale: signs times e^-1/2, Gaussian rows over their norms, Q of a QR, or entries."""
    k, p, e = 5, 3, 12
    key, spec = Key(7), Spec.of({"w": torch.zeros(k * e)})
    entries, normalize = settings["entries"], settings["normalize"]
    drawn = key.signs(p, e) if entries == "sign" else key.normal(p, e)
    if normalize == "orthonormal":
        drawn = torch.linalg.qr(drawn.double().T).Q.T.to(torch.float32)
    elif (entries, normalize) == ("sign", "row"):
        drawn = drawn * torch.tensor(e**-0.5)
    elif normalize == "row":
        integers = key.normal_integers(p, e)
        scales = torch.tensor([1 / sum(v * v for v in row) ** 0.5 for row in integers.tolist()], dtype=torch.float32)
        drawn = integers.to(torch.float32) * scales[:, None]
    made = tw.spaces.MAPAX(k=k, p=p, scale="unit", **settings).basis(spec, key, "cpu")["a"]
    assert torch.equal(made, drawn)
    isometric = tw.spaces.MAPAX(k=k, p=p, **settings).basis(spec, key, "cpu")["a"]
    factor = (1 / p) ** 0.5 if normalize == "none" else (e / p) ** 0.5
    assert torch.allclose(isometric, drawn * factor, rtol=3e-7)


def test_entries_of_isometric_mapo_are_exact(monkeypatch):
    """Signs that are not rounded: U(B) repeats the values of B, in a stored basis and in a generated one."""
    space, base, b = tw.spaces.MAPO(k=7), {"w": torch.zeros(57)}, Key(2).normal(7, 1)
    for _ in range(2):
        basis = space.basis(Spec.of(base), Key(3), "cpu")
        moved = space.expand(base, basis, {"model/b": b})["w"]
        assert set(moved.abs().tolist()) == set(b.abs().flatten().tolist())
        monkeypatch.setattr(projection, "STORED", 0)
    assert "a" not in basis


@pytest.mark.parametrize("d", [1, 32, 57, 243, 11_274, 10**15 - 1, 10**15])
def test_k_is_derived_from_the_number_of_weights(d):
    k = tw.spaces.MAPO(k=0).sizes(d).k
    assert k == d if 8 * d**2 >= d**3 else k**3 <= 8 * d**2 < (k + 1) ** 3
    assert tw.spaces.MAPO().sizes(d) == tw.spaces.MAPO(k=k).sizes(d)


def test_derived_k_trains_as_the_same_k_given_and_is_printed_by_check():
    from typer.testing import CliRunner

    from thinwire.cli.app import app

    assert same(train(tw.spaces.MAPO(k=0)).weights, train(tw.spaces.MAPO(k=29)).weights)  # floor(2 * 57^(2/3))
    shown = CliRunner().invoke(app, ["check", "mapo", "--rounds", "1"]).output
    assert "MAPO has k = 569, floor(2 d^(2/3)) for d = 4,810." in " ".join(shown.split())


@pytest.mark.parametrize("layout", ["contiguous", "strided", "permuted"])
@pytest.mark.parametrize(("d", "k", "p"), [(57, 10, 3), (57, 29, 1), (57, 28, 3)])
def test_every_value_of_b_moves_a_weight(layout, d, k, p):
    map_ = linear_map(tw.spaces.MAPAX(k=k, p=p, layout=layout), d, Key(3))
    assert map_.shape == (d, k * p)
    assert bool(map_.ne(0).any(0).all())
    assert bool(map_.ne(0).any(1).all())


def test_the_basis_is_redrawn_after_the_given_number_of_rounds():
    spec = Spec.of({"w": torch.zeros(D)})
    for every, expected in ((1, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (0, [0, 0, 0, 0])):
        space = tw.spaces.MAPO(k=4, redraw_every=every)
        contract, _ = _agree(space)
        bases = [contract.basis(version, "cpu")["a"] for version in range(4)]
        indices = [next(i for i, f in enumerate(bases) if torch.equal(f, basis)) for basis in bases]
        assert [indices.index(n) for n in indices] == [expected.index(n) for n in expected]
        assert torch.equal(space.basis(spec, Key(1), "cpu")["a"], space.basis(spec, Key(1), "cpu")["a"])


def _agree(space):
    from thinwire.protocol.setup import make_contract

    weights = {name: p.detach() for name, p in model().named_parameters()}
    return make_contract(tw.Method(space=space), weights, {}, Key(0))


def test_mapax_by_columns_is_lora_with_a_fixed_factor():
    """One matrix W of d1 x d2, divided into columns: U = B A is a rank-p update with a shared, fixed A."""
    d1, d2, p = 6, 4, 2
    space = tw.spaces.MAPAX(k=d2, p=p, layout="strided")  # segment j holds the weights j, j + d2, ...: column j
    base = {"w": torch.zeros(d1, d2)}
    basis = space.basis(Spec.of(base), Key(5), "cpu")
    b = Key(6).normal(d2, p)
    change = space.expand(base, basis, {"model/b": b})["w"]
    assert torch.allclose(change, (b @ basis["a"]).T, atol=1e-6)
    assert int(torch.linalg.matrix_rank(change)) == p


@pytest.mark.parametrize("entries", ["sign", "gaussian"])
def test_a_generated_basis_gives_the_same_training_as_a_stored_one(monkeypatch, entries):
    space = tw.spaces.MAPA(p=6, entries=entries, normalize="none")
    stored = train(space, lr=0.01)
    monkeypatch.setattr(projection, "STORED", 0)
    monkeypatch.setattr(generated, "BLOCK", 100)
    assert "a" not in space.basis(Spec.of({"w": torch.zeros(D)}), Key(0), "cpu")
    for backend in ("vmap", "loop"):
        drawn = train(space, lr=0.01, backend=backend)
        assert drawn.backend == backend
        assert torch.allclose(vector(stored), vector(drawn), atol=1e-5)


@pytest.mark.parametrize("entries", ["sign", "gaussian"])
def test_rows_have_norm_one(entries):
    basis = tw.spaces.MAPAX(k=3, p=4, entries=entries, scale="unit").basis(
        Spec.of({"w": torch.zeros(300)}), Key(1), "cpu"
    )
    assert torch.allclose(basis["a"].norm(dim=1), torch.ones(4), atol=1e-6)
    q = tw.spaces.MAPAX(k=3, p=4, entries=entries, normalize="orthonormal", scale="unit").basis(
        Spec.of({"w": torch.zeros(300)}), Key(1), "cpu"
    )
    assert torch.allclose(q["a"] @ q["a"].T, torch.eye(4), atol=1e-6)


@pytest.mark.parametrize("entries", ["sign", "gaussian"])
@pytest.mark.parametrize("block", [100, 1 << 22])
def test_generated_rows_have_the_norm_of_stored_ones(monkeypatch, entries, block):
    space, base = tw.spaces.MAPA(p=6, entries=entries, scale="unit"), {"w": torch.zeros(301)}
    spec, units = Spec.of(base), torch.eye(6)[:, None]
    stored = space.basis(spec, Key(4), "cpu")

    def rows(basis):
        return torch.stack([space.expand(base, basis, {"model/b": b})["w"] for b in units])

    expected = rows(stored)
    monkeypatch.setattr(projection, "STORED", 0)
    monkeypatch.setattr(generated, "BLOCK", block)
    basis = space.basis(spec, Key(4), "cpu")
    assert "a" not in basis
    torch.testing.assert_close(rows(basis).norm(dim=1), torch.ones(6), rtol=1e-6, atol=0)
    torch.testing.assert_close(rows(basis), expected, rtol=1e-6, atol=1e-8)


def test_training_in_a_generated_gaussian_basis_equals_training_in_a_stored_one(monkeypatch):
    space = tw.spaces.MAPAX(k=3, p=4, entries="gaussian")
    stored = train(space)
    monkeypatch.setattr(projection, "STORED", 0)
    for backend in ("vmap", "loop"):
        assert torch.allclose(vector(stored), vector(train(space, backend=backend)), atol=1e-5)


def test_a_message_is_k_p_values_and_a_header():
    run = train(tw.spaces.MAPO(k=8), rounds=2, cohort=3)
    assert all(record.bytes_up <= 3 * (4 * 8 + 64) for record in run.history)
    run = train(tw.spaces.MAPAX(k=5, p=3), rounds=1, cohort=3)
    assert run.bytes_up <= 3 * (4 * 15 + 64)


def test_a_client_that_missed_rounds_of_one_basis_downloads_one_vector():
    fixed = train(tw.spaces.MAPO(k=8, redraw_every=0), rounds=12, cohort=1)
    redrawn = train(tw.spaces.MAPO(k=8, redraw_every=1), rounds=12, cohort=1)
    assert fixed.bytes_catchup <= 12 * 8  # a state is some bytes longer than one ledger entry
    assert redrawn.bytes_catchup > 10 * fixed.bytes_catchup


@pytest.mark.parametrize("preset", ["mapax", "mapo"])
def test_the_presets_learn_digits(preset, tmp_path):
    from thinwire.runs.config import resolve
    from thinwire.runs.execute import execute

    summary = execute(resolve(preset, overrides={"rounds": 8}), tmp_path / preset)
    assert summary["final_loss"] < 2.0
    assert summary["trainable"] <= 600


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (lambda: tw.spaces.MAPO(k=-1), "k must be from 1 to the number of weights, 57, not -1"),
        (lambda: tw.spaces.MAPO(k=58), "k must be from 1 to the number of weights, 57, not 58"),
        (lambda: tw.spaces.MAPA(p=0), "p must be from 1"),
        (lambda: tw.spaces.MAPA(p=58), "p must be from 1 to the length of a segment, 57, not 58"),
        (lambda: tw.spaces.MAPAX(k=3, segment=3), "either k or segment"),
        (lambda: tw.spaces.MAPAX(p=3, budget=3), "either p or budget"),
        (lambda: tw.spaces.MAPAX(segment=99), "segment must be from 1"),
        (lambda: tw.spaces.MAPO(k=4, entries="uniform"), "entries must be one of gaussian, sign"),
        (lambda: tw.spaces.MAPO(k=4, layout="random"), "layout must be one of"),
        (lambda: tw.spaces.MAPO(k=4, scale="paper"), "scale must be one of isometric, unit, not 'paper'"),
        (lambda: tw.spaces.MAPO(k=4, redraw_every=-2), "redraw_every must be -1 or more"),
    ],
)
def test_invalid_sizes_are_refused_in_one_line(space, message):
    with pytest.raises(ConfigError, match=message) as error:
        train(space())
    assert "\n" not in str(error.value)
