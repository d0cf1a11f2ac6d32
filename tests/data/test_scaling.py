"""Standardized inputs: constants of datasets, and estimates from sums that clients send."""

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.core.key import Key
from thinwire.data.examples import Arrays, AugmentedImages, Images, Source
from thinwire.data.partition import Assignment
from thinwire.data.scaling import (
    estimate,
    mean_and_std,
    pack_scale,
    pack_sums,
    schema_of,
    standardized,
    sums_of,
    unpack_scale,
    unpack_sums,
)
from thinwire.errors import ConfigError, WireError
from thinwire.experiments.build import build_job, build_task, prepared
from thinwire.experiments.config import resolve
from thinwire.experiments.execute import execute
from thinwire.flower.apps import deployable
from thinwire.wire import message as wire

QUICK = {"rounds": 2, "local.steps": 1, "task.clients": 5, "cohort.size": 2, "engine.backend": "loop"}


def images(n: int = 60) -> Images:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, 8, 8), np.uint8))
    pixels[:, 1] //= 3  # channels differ
    return Images(pixels, torch.arange(n) % 2)


def floats(n: int = 60) -> Arrays:
    source = images(n)
    return Arrays(source.pixels.float() / 255, source.targets)


CLIENTS = Assignment(np.arange(1, 60), np.array([0, 9, 30, 59]))  # no client has example 0


@pytest.mark.parametrize("make", [images, floats])
@pytest.mark.parametrize("scale", ["standard", "estimated"])
def test_inputs_have_mean_0_and_standard_deviation_1(make, scale):
    choice = resolve("fedavg", "cifar10", {"task.scale": scale}).task
    pixels = images().pixels[CLIENTS.order].double() / 255
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), correction=0)
    constants = {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())} if scale == "standard" else {}
    train, test, before = prepared(choice, Source(make(), make(3), 2, **constants), CLIENTS)
    x, _ = train.gather(torch.from_numpy(CLIENTS.order))
    assert x.dtype == torch.float32
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    y, _ = test.gather(torch.arange(3))
    expected = (images(3).pixels.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool(before.up) == (scale == "estimated")


def test_the_sums_are_those_of_numpy_and_add_up():
    stored = images().pixels
    x = stored.double().numpy() / 255
    whole, parts = sums_of(stored), sums_of(stored[:7]) + sums_of(stored[7:])
    for sums in (whole, parts):
        expected = [60 * 64, *x.sum((0, 2, 3)), *(x * x).sum((0, 2, 3))]
        np.testing.assert_allclose(sums, expected, rtol=1e-12)
        mean, std = mean_and_std(sums)
        np.testing.assert_allclose(mean, x.mean((0, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(std, x.std((0, 2, 3)), rtol=1e-12)
    assert mean_and_std(np.array([5.0, 5.0, 5.0])) == ((1.0,), (1e-6,))  # a constant channel


def test_an_augmented_image_is_scaled_after_its_border_is_added():
    choice = resolve("fedavg", "cifar10", {"task.augment": "shift-flip"}).task
    source = Source(images(), images(3), 2, mean=(0.5, 0.25, 0.5), std=(0.25, 0.125, 0.25))
    train, _, _ = prepared(choice, source, CLIENTS)
    assert isinstance(train, AugmentedImages)
    plain = AugmentedImages(images())
    index = torch.arange(60) + 60 * torch.arange(60)
    mean, std = torch.tensor(source.mean).view(3, 1, 1), torch.tensor(source.std).view(3, 1, 1)
    assert torch.equal(train.gather(index)[0], (plain.gather(index)[0] - mean) / std)


def test_a_dataset_without_constants_is_refused_with_what_to_write():
    choice = resolve("fedavg", "cifar10").task
    assert choice.scale == "standard"
    wanted = r"needs 3 values of mean and std .* cifar10 states 0 and 0; write task\.scale = 'estimated'$"
    with pytest.raises(ConfigError, match=wanted):
        prepared(choice, Source(images(), images(3), 2), CLIENTS)
    with pytest.raises(ConfigError, match="states 1 and 3"):
        prepared(choice, Source(images(), images(3), 2, mean=(0.5,), std=(1.0, 1.0, 1.0)), CLIENTS)


@pytest.mark.parametrize("task", ["mnist", "fashion-mnist", "cifar10", "cifar100", "femnist", "digits"])
def test_tasks_of_images_are_standardized_by_default_and_values_of_files_stay(task):
    assert resolve("fedavg", task).task.scale == "standard"
    assert tw.experiments.experiment.TaskChoice.__dataclass_fields__["scale"].default == "unit"


def test_digits_are_standardized_by_their_constants():
    task = build_task(resolve("fedavg").task, Key(0))
    mean, std = mean_and_std(sums_of(task.train.inputs))
    assert abs(mean[0]) < 1e-6
    assert std[0] == pytest.approx(1.0, abs=1e-6)
    unit = build_task(resolve("fedavg", overrides={"task.scale": "unit"}).task, Key(0))
    assert torch.equal(standardized(unit.train, (0.30538223,), (0.37601014,)).inputs, task.train.inputs)


def test_the_bytes_of_an_estimate_are_those_of_its_messages_and_count_in_the_first_round(tmp_path):
    runs = {}
    for scale in ("estimated", "standard"):
        chosen, messages = resolve("fedavg", overrides={**QUICK, "task.scale": scale}), []
        summary = execute(chosen, tmp_path / scale, on_message=lambda *one, into=messages: into.append(one))
        runs[scale] = summary, messages
    summary, messages = runs["estimated"]
    for way in ("up", "down"):
        sent = [len(data) for _, direction, _, data in messages if direction == way]
        assert summary[f"bytes_{way}"] + (summary["bytes_catchup"] if way == "down" else 0) == sum(sent)
    job = build_job(resolve("fedavg", overrides={**QUICK, "task.scale": "estimated"}))
    before = job.task.before
    assert list(before.up) == list(before.down) == list(range(5))
    more = {way: summary[f"bytes_{way}"] - runs["standard"][0][f"bytes_{way}"] for way in ("up", "down")}
    assert more == {"up": before.bytes_up, "down": before.bytes_down}
    assert [one for one in messages if one[0] == 1][:10] == [
        *((1, "down", i, before.down[i]) for i in range(5)),
        *((1, "up", i, before.up[i]) for i in range(5)),
    ]
    assert all(24 < len(data) < 24 + 20 for data in before.up.values())  # three float64
    assert all(8 < len(data) < 8 + 20 for data in before.down.values())  # two float32
    # each client's sums are of its own training examples
    schema, unit = schema_of("digits", 1), build_job(resolve("fedavg", overrides={**QUICK, "task.scale": "unit"})).task
    for i, data in before.up.items():
        own = unit.train.inputs[torch.from_numpy(unit.clients.client(i))]
        assert np.array_equal(unpack_sums(data, schema, i), sums_of(own))
    mean, std = unpack_scale(before.down[0], schema)
    everyone = unit.train.inputs[torch.from_numpy(np.concatenate([unit.clients.client(i) for i in range(5)]))]
    assert mean[0] == pytest.approx(everyone.double().mean().item(), abs=1e-6)
    assert std[0] == pytest.approx(everyone.double().std(correction=0).item(), abs=1e-6)
    assert torch.equal(job.task.train.inputs, standardized(unit.train, mean, std).inputs)


def test_a_resumed_run_counts_an_estimate_once(tmp_path):
    chosen = resolve("fedavg", overrides={**QUICK, "rounds": 3, "checkpoint.every": 1, "task.scale": "estimated"})
    whole = execute(chosen, tmp_path / "whole")

    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(chosen, tmp_path / "cut", on_round=stop)
    cut = execute(chosen, tmp_path / "cut", resume=True)
    assert (cut["bytes_up"], cut["bytes_down"]) == (whole["bytes_up"], whole["bytes_down"])
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1]


def test_bad_messages_are_refused():
    schema = schema_of("cifar10", 3)
    scale, exchange = estimate("cifar10", images().pixels, CLIENTS)
    good = exchange.up[1]
    sums = unpack_sums(good, schema, 1)
    assert np.array_equal(sums, sums_of(images().pixels[torch.from_numpy(CLIENTS.client(1))]))
    for bad, why in (
        (sums_with(sums, count=0), "sums over 0.0 values"),
        (sums_with(sums, count=2**60), "expected an integer from 1"),
        (sums_with(sums, count=float("nan")), "sums over nan values"),
        (sums_with(sums, count=1.5), "sums over 1.5 values"),
        (sums_with(sums, total=(float("inf"), 0.0, 0.0)), "have the sum inf"),
        (sums_with(sums, squares=(-1.0, 1e9, 1e9)), "sum of squares -1.0"),
        (sums_with(sums, total=(1e6, 0.0, 0.0)), "values have the sum 1000000.0"),
        (sums_with(sums, total=(1e300, 0.0, 0.0), squares=(1e300, 1.0, 1.0)), "values have the sum 1e"),
    ):
        with pytest.raises(WireError, match=why):
            unpack_sums(pack_sums(bad, schema, 1), schema, 1)
    for at in range(len(good)):
        with pytest.raises(WireError):
            unpack_sums(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], schema, 1)
        with pytest.raises(WireError):
            unpack_sums(good[:at], schema, 1)
    with pytest.raises(WireError, match="another client"):
        unpack_sums(good, schema, 2)
    with pytest.raises(WireError, match="another method or model"):
        unpack_sums(good, schema_of("mnist", 3), 1)
    with pytest.raises(WireError, match="expected at most"):
        unpack_sums(good + bytes(1000), schema, 1)
    with pytest.raises(WireError):
        unpack_sums(scale, schema, 1)
    with pytest.raises(WireError):
        unpack_scale(good, schema)
    lost = wire.pack(wire.LOST, 0, (), schema.sent_by(1))
    with pytest.raises(WireError, match="expected one field 7 of 56 bytes"):
        unpack_sums(lost, schema, 1)
    for mean, std in (((0.0,) * 3, (1.0, 0.0, 1.0)), ((float("nan"), 0.0, 0.0), (1.0,) * 3)):
        with pytest.raises(WireError, match="expected finite values and std above 0"):
            unpack_scale(pack_scale(mean, std, schema), schema)


def sums_with(sums: np.ndarray, count=None, total=None, squares=None) -> np.ndarray:
    parts = sums[:1] if count is None else [count], total or sums[1:4], squares or sums[4:]
    return np.concatenate(parts)


def test_a_deployment_refuses_estimates():
    with pytest.raises(ConfigError, match=r"a deployment does not do yet; write task\.scale = 'standard'"):
        deployable(resolve("fedavg", overrides={"task.scale": "estimated"}))
    assert deployable(resolve("fedavg")).task.scale == "standard"
