"""EvoFed: fitness of shared random perturbations."""

import math

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits, perceptron, same_public
from thinwire.core.key import Key
from thinwire.core.tree import Spec, add, flatten, restrict, same, scale, weighted_mean
from thinwire.errors import ConfigError
from thinwire.runs.config import resolve
from thinwire.sketches import EvoFed, evofed as module

DELTA = {"w": Key(1).normal(7, 5), "b": Key(2).normal(6)}
COORDS = Spec.of(DELTA)
D = COORDS.size


def perturbations(sketch: EvoFed, key: Key, coords: Spec = COORDS) -> torch.Tensor:
    """(partitions, population / 2, values), by decoding one fitness value at a time."""
    pairs, rows = sketch.population // 2, []
    for part in range(sketch.partitions):
        for j in range(pairs):
            code = torch.zeros(sketch.partitions, sketch.population)
            code[part, j] = sketch.population * sketch.sigma
            rows.append(flatten(sketch.decode({"fitness": code}, coords, key)))
    return torch.stack(rows).view(sketch.partitions, pairs, -1)


@pytest.mark.parametrize("partitions", [1, 4, 41, 50])
def test_fitness_is_the_negated_distance_to_each_perturbation(partitions):
    sketch, key = EvoFed(10, 0.3, partitions, shaping="none"), Key(5)
    code = sketch.encode(DELTA, key)["fitness"]
    z, delta = perturbations(sketch, key), flatten(DELTA)
    e = math.ceil(D / partitions)
    for part in range(partitions):
        inside = slice(part * e, min(D, (part + 1) * e))
        assert (z[part, :, : inside.start] == 0).all()  # the population of a part changes only that part
        assert (z[part, :, inside.stop :] == 0).all()
        for sign, half in ((1, code[part, :5]), (-1, code[part, 5:])):
            distance = (0.3 * sign * z[part] - delta)[:, inside].norm(dim=1)
            assert torch.allclose(half, -distance, atol=1e-5)


def test_perturbations_are_gaussian_and_differ_between_rounds():
    z = perturbations(EvoFed(400), Key(3))[0]
    n = z.numel()
    assert abs(float(z.mean())) < 5 / n**0.5  # five standard deviations
    assert abs(float(z.var()) - 1) < 5 * (2 / n) ** 0.5
    assert not torch.equal(z, perturbations(EvoFed(400), Key(4))[0])


def test_orthonormal_perturbations_with_square_fitness_give_the_projection(monkeypatch):
    pairs = 6
    q, _ = torch.linalg.qr(Key(8).normal(D, pairs))
    monkeypatch.setattr(module, "_drawn", lambda key, sides, start, device: q.T.reshape(sides))
    sketch = EvoFed(2 * pairs, shaping="none", fitness="square")
    back = flatten(sketch.decode(sketch.encode(DELTA, Key(0)), COORDS, Key(0)))
    projection = q @ (q.T @ flatten(DELTA))
    assert torch.allclose(back * pairs, projection, atol=1e-5)  # (2 / n) sum z z' delta


def test_square_fitness_is_unbiased():
    sketch, delta = EvoFed(64, shaping="none", fitness="square"), flatten(DELTA)
    runs = 300
    made = torch.stack([flatten(sketch.decode(sketch.encode(DELTA, Key(i)), COORDS, Key(i))) for i in range(runs)])
    # Var[(z . delta) z_i] <= |delta|^2 + delta_i^2 for Gaussian z; 32 independent z a run
    deviation = ((delta.square().sum() + delta.square()) / (32 * runs)).sqrt()
    assert ((made.mean(0) - delta).abs() < 5 * deviation).all()


@pytest.mark.parametrize("shaping", ["rank", "zscore"])
@pytest.mark.parametrize("partitions", [1, 5])
def test_larger_fitness_is_closer_and_the_decoded_update_has_a_positive_inner_product(shaping, partitions):
    sketch = EvoFed(64, partitions=partitions, shaping=shaping)
    plain = EvoFed(64, partitions=partitions, shaping="none").encode(DELTA, Key(1))["fitness"]
    shaped = sketch.encode(DELTA, Key(1))
    assert torch.equal(plain.argsort(1), shaped["fitness"].argsort(1))
    assert (flatten(sketch.decode(shaped, COORDS, Key(1))) * flatten(DELTA)).sum() > 0
    assert shaped["fitness"].sum(1).abs().max() < 1e-4
    if shaping == "rank":
        assert shaped["fitness"].min() == -0.5
        assert shaped["fitness"].max() == 0.5
        assert torch.allclose(shaped["fitness"].sort(1).values, torch.linspace(-0.5, 0.5, 64).expand(partitions, 64))
    else:
        assert torch.allclose(shaped["fitness"].std(1, correction=0), torch.ones(partitions), atol=1e-4)


@pytest.mark.parametrize("shaping", ["rank", "zscore", "none"])
def test_a_zero_update_decodes_to_zero(shaping):
    sketch, zero = EvoFed(16, partitions=2, shaping=shaping), scale(DELTA, 0.0)
    assert (flatten(sketch.decode(sketch.encode(zero, Key(0)), COORDS, Key(0))) == 0).all()


def test_paired_codes_give_the_same_update_with_half_the_values():
    full, half = EvoFed(32, partitions=3), EvoFed(32, partitions=3, paired=True)
    others = [scale(DELTA, 0.5), add(DELTA, DELTA), {"w": -DELTA["w"], "b": DELTA["b"]}]
    made = []
    for sketch in (full, half):
        mean = weighted_mean([sketch.encode(delta, Key(7)) for delta in others], [1.0, 2.0, 3.0])
        made.append(flatten(sketch.decode(mean, COORDS, Key(7))))
    assert torch.allclose(*made, atol=1e-6)
    assert half.spec(COORDS).size * 2 == full.spec(COORDS).size == 3 * 32


@pytest.mark.parametrize("block", [1, 7, 30, 200])
@pytest.mark.parametrize("partitions", [1, 3])
def test_results_do_not_depend_on_the_block_size_up_to_rounding(monkeypatch, block, partitions):
    sketch = EvoFed(12, partitions=partitions, shaping="none")
    whole = sketch.encode(DELTA, Key(1))
    back = sketch.decode(whole, COORDS, Key(1))
    monkeypatch.setattr(module, "BLOCK", block)
    sizes = []
    draw = module._drawn
    monkeypatch.setattr(
        module, "_drawn", lambda key, sides, *rest: sizes.append(math.prod(sides)) or draw(key, sides, *rest)
    )
    assert torch.allclose(sketch.encode(DELTA, Key(1))["fitness"], whole["fitness"], atol=1e-5)
    assert torch.allclose(flatten(sketch.decode(whole, COORDS, Key(1))), flatten(back), atol=1e-5)
    assert max(sizes) <= block


def test_codes_of_some_blocks():
    sketch, some = EvoFed(8), restrict(DELTA, ("b",))
    code = sketch.encode(some, Key(0))
    assert Spec.of(code) == sketch.spec(COORDS)
    assert list(sketch.decode(code, Spec.of(some), Key(0))) == ["b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"population": 7}, "even"),
        ({"population": 0}, "even"),
        ({"sigma": 0.0}, "sigma"),
        ({"partitions": 0}, "partitions"),
        ({"shaping": "ranks"}, "rank, zscore, none"),
        ({"fitness": "cosine"}, "distance, square"),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EvoFed(**options)


def test_clients_decode_the_fitness_to_the_weights_of_the_server():
    federation = Federation(tw.Method(sketch=EvoFed(16, partitions=3), server_opt=tw.optimizers.SGD(1.0)))
    for cohort in ([0, 1, 2], [3], [0, 4, 5]):
        messages = federation.round(cohort)
    assert all(len(data) < 4 * 16 * 3 + 40 for data in messages.values())
    for client in federation.public:
        federation.download(client)
        assert same_public(federation.public[client], federation.server.public)
        assert same(federation.weights(federation.public[client]), federation.weights())


def test_evofed_learns_digits_with_small_uploads():
    x, y = digits()
    clients = [(x[i : i + 60], y[i : i + 60]) for i in range(0, 480, 60)]
    method = resolve("evofed", on="digits").method
    run = tw.simulate(
        perceptron(hidden=16),
        clients,
        method,
        rounds=25,
        cohort=8,
        test=(x[-300:], y[-300:]),
        local=tw.Local(epochs=2, batch=16),
    )
    # ten classes: chance is 0.1, and 0.19 is five standard deviations of 300 samples above it
    assert run.accuracy > 0.19 + 0.2
    assert run.history[0].bytes_up < 8 * (128 * 4 + 40)
