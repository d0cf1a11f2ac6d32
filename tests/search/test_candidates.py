"""Settings to vary: short keys, dotted paths, values from the command line."""

import pytest

from thinwire.errors import ConfigError
from thinwire.runs.config import resolve
from thinwire.runs.toml import flat
from thinwire.search.candidates import changes, knobs_of, parse_over, points, start_of


@pytest.mark.parametrize(
    ("method", "key", "paths"),
    [
        ("fedavg", "lr", ("method.client_opt.lr",)),
        ("fedadam", "server_lr", ("method.server_opt.lr",)),
        ("mapo", "k", ("method.space.k",)),
        ("lora", "rank", ("method.space.rank",)),
        ("slora", "rank", ("method.next_stage.space.rank",)),
        ("sparse", "density", ("method.up.density", "method.down.density")),
        ("slora", "density", ("method.mask.density",)),
        ("topk+int8", "density", ("method.up.parts.1.density",)),
        ("topk+int8", "bits", ("method.up.parts.2.bits",)),
        ("fedavg", "cohort", ("cohort.size",)),
        ("fedavg", "epochs", ("local.epochs",)),
        ("fedavg", "batch", ("local.batch",)),
        ("fedavg", "rounds", ("rounds",)),
        ("fedprox", "mu", ("method.correction.mu",)),
        ("fedavg", "method.client_opt.momentum", ("method.client_opt.momentum",)),
        ("flasc", "method.up.density+rank", ("method.up.density", "method.space.rank")),
    ],
)
def test_a_key_stands_for_the_settings_of_the_method(method, key, paths):
    assert knobs_of(resolve(method, "digits"), {key: [1]})[0].paths == paths


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"k": [1]}, r"fedavg has no setting 'k'; write one of lr, server_lr, rounds, cohort, .* or a dotted path"),
        ({"lr": 0.1}, r"over\['lr'\] must be a list of values"),
        ({"lr": "0.1"}, r"over\['lr'\] must be a list of values"),
        ({"lr": [1, 1.0]}, "lr has 1.0 twice"),
        ({"lr": [1], "method.client_opt.lr": [2]}, "--over has method.client_opt.lr twice"),
        ({}, "name at least one setting"),
        ({"kind": [1]}, "fedavg has no setting 'kind'; it may be method.space.kind or"),
    ],
)
def test_what_cannot_be_varied_is_refused_in_one_line(over, message):
    with pytest.raises(ConfigError, match=message) as error:
        knobs_of(resolve("fedavg", "digits"), over)
    assert "\n" not in str(error.value)


def test_values_of_the_command_line():
    assert parse_over(["lr=.1,1/4, 1", "method.up=raw,{ kind = 'topk', density = 0.1 }"]) == {
        "lr": [0.1, 0.25, 1],
        "method.up": ["raw", {"kind": "topk", "density": 0.1}],
    }
    for wrong in (["lr"], ["lr="], ["=1"], ["lr= "], ["lr=1", "lr=2"]):
        with pytest.raises(ConfigError, match="--over takes a key once, with all its values"):
            parse_over(wrong)


def test_points_become_overrides():
    pretrained = {"method.down": {"kind": "topk", "density": 0.25}}
    experiment = resolve("flasc", "digits", pretrained)
    knobs = knobs_of(experiment, {"rank": [4], "lr": [1], "density": [0.5]})
    (point,) = points(knobs)
    assert point == (("rank", 4), ("lr", 1), ("density", 0.5))
    assert changes(experiment, knobs, (*point[:2], ("density", None))) == {
        "method.space.alpha": 8.0,
        "method.space.rank": 4,
        "method.client_opt.lr": 1,
    }
    assert [value for _, value in start_of(experiment, knobs)] == [8, 0.5, 0.25]
    other = start_of(resolve("flasc", "digits", {"method.down": {"kind": "topk", "density": 1.0}}), knobs)
    assert dict(other)["density"] is None, "two settings of a knob that differ are left as they are"


def test_a_part_of_a_chain_is_set_by_its_place():
    experiment = resolve("topk+int8", "digits", {"method.up.parts.2.bits": 4})
    assert [experiment.method.up.parts[2].bits, experiment.method.up.parts[1].density] == [4, 0.05]
    assert resolve("topk+int8", "digits").method.up.parts[2].bits == 8
    with pytest.raises(ConfigError, match=r"'3' names no part of the 3 of method\.up\.parts"):
        resolve("topk+int8", "digits", {"method.up.parts.3.bits": 4})
    assert flat({"parts": [{"bits": 4}], "at": [1, 2]}) == {"parts.0.bits": 4, "at": [1, 2]}
