"""Methods joined by `+`."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import thinwire as tw
from thinwire.core.key import Key
from thinwire.errors import ConfigError, IncompatibleParts, UnknownName
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_task
from thinwire.runs.config import digest, from_table, resolve, to_table
from thinwire.runs.execute import execute
from thinwire.runs.presets import Preset, join, named_methods, presets
from thinwire.runs.toml import dumps, loads

NAMES = sorted(presets("methods"))


def test_methods_that_fill_different_slots_are_combined():
    method = resolve("fedpara+scaffold+fedadam+int8").method
    assert isinstance(method.space, tw.spaces.FedPara)
    assert (method.correction, method.client_weight) == (tw.optimizers.Scaffold(), tw.aggregators.Uniform())
    assert isinstance(method.server_opt, tw.optimizers.Adam)
    assert method.up == tw.codecs.Quantize(8)


def test_joined_method_survives_a_file():
    experiment = resolve("mapo+int8", on="fashion-mnist")
    again = from_table(loads(dumps(to_table(experiment)), "test"))
    assert (again, digest(again)) == (experiment, digest(experiment))
    assert experiment.name == "mapo+int8"
    assert experiment.method.space.redraw_every == 10  # the value of mapo on this task


def test_order_of_methods_with_different_slots_does_not_matter():
    one, other = resolve("mapo+int8"), resolve("int8+mapo")
    assert one.method == other.method


def test_codecs_chain_in_the_order_of_the_names():
    assert resolve("topk-plain+int8").method.up == tw.codecs.Chain((tw.codecs.TopK(0.05), tw.codecs.Quantize(8)))
    with_errors = (tw.codecs.ErrorFeedback(), tw.codecs.TopK(0.05), tw.codecs.Quantize(4))
    assert resolve("topk+int4").method.up == tw.codecs.Chain(with_errors)
    assert resolve("ef+topk+int4").method.up == resolve("topk+int4").method.up  # top-k has error feedback already
    assert resolve("ef+topk-plain").method.up == resolve("topk").method.up
    method = resolve("sparse+int8+fedavgm").method
    assert method.up == tw.codecs.Chain((tw.codecs.TopK(0.1, rounding="up"), tw.codecs.Quantize(8)))
    assert method.down == tw.codecs.TopK(0.1, rounding="up")
    assert method.server_opt.momentum == 0.9
    assert resolve("fp16+fedpaq-fp16").method.up == resolve("fp16").method.up  # the same value twice


def test_codecs_that_do_not_chain_are_refused_with_the_right_order():
    for wrong, right in (("int8+topk", "topk+int8"), ("mapo+int4+topk", "mapo+topk+int4")):
        with pytest.raises(IncompatibleParts, match=r"method\.up") as error:
            resolve(wrong)
        assert str(error.value).endswith(f"write {right}")
        resolve(right)
    with pytest.raises(IncompatibleParts, match=r"'int8' and 'int4' both fill method\.up"):
        resolve("int8+int4")


def test_conflict_names_the_slot_and_both_methods():
    for expression, slot in (("fedprox+scaffold", "correction"), ("mapo+fedavg+lora", "space")):
        with pytest.raises(IncompatibleParts) as error:
            resolve(expression)
        first, *_, last = expression.split("+")
        assert f"{first!r} and {last!r} both fill method.{slot}" in str(error.value)
        assert "\n" not in str(error.value)


def test_first_client_optimizer_wins():
    slow = Preset("slow", "", "", {"method": {"client_opt": tw.optimizers.Adam(0.5)}})
    (mapo,) = named_methods("mapo-paper")
    assert join([mapo, slow])["method"]["client_opt"] == mapo.table["method"]["client_opt"]
    assert join([slow, mapo])["method"]["client_opt"] == tw.optimizers.Adam(0.5)
    assert join([slow, mapo], "cifar10")["method"]["space"].k == 1024


def test_first_settings_of_one_server_optimizer_win_and_two_optimizers_are_refused():
    assert resolve("full+dp-fedadam", on="digits").method.server_opt == resolve("full", on="digits").method.server_opt
    assert resolve("dp-fedadam+full", on="digits").method.server_opt == resolve("dp-fedadam").method.server_opt
    with pytest.raises(IncompatibleParts, match=r"both fill method\.server_opt"):
        resolve("full+fedyogi")


def test_different_local_settings_are_refused():
    (fedsgd,) = named_methods("fedsgd")
    other = Preset("other", "", "", {"local": {"steps": 5}})
    with pytest.raises(IncompatibleParts, match=r"'fedsgd' and 'other' both fill local\.steps"):
        join([fedsgd, other])
    assert join([fedsgd, Preset("same", "", "", {"local": {"steps": 1}})])["local"]["steps"] == 1


def test_misspelled_name_gets_the_most_similar_one():
    few = r"unknown method 'int9': did you mean 'int\d'\? Known: (\w[\w+-]*, ){1,5}...; `thinwire list methods` prints"
    with pytest.raises(UnknownName, match=few):
        resolve("mapo+int9")
    for expression in ("mapo+", "+mapo", "mapo++int8"):
        with pytest.raises(ConfigError, match="no method on one side"):
            resolve(expression)
    with pytest.raises(ConfigError, match="names 'mapo' twice"):
        resolve("mapo+int8+mapo")


@pytest.mark.parametrize("text", ['method = "mapo+int8"\n', '[method]\nkind = "mapo+int8"\n'])
def test_file_builds_on_joined_methods(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(f"rounds = 7\n{text}")
    experiment = resolve(str(file))
    assert experiment.method == resolve("mapo+int8").method
    assert (experiment.name, experiment.rounds) == ("mine", 7)


def test_file_changes_slots_of_joined_methods(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[method]\nkind = "mapo+int8"\nspace = { k = 7 }\nclient_opt = { lr = 0.25 }\n')
    method = resolve(str(file)).method
    assert (method.space.k, method.client_opt.lr, method.up) == (7, 0.25, tw.codecs.Quantize(8))
    file.write_text('[method]\nkind = "mapo+lora"\n')
    with pytest.raises(IncompatibleParts, match=r"both fill method\.space"):
        resolve(str(file))


def test_simulate_accepts_joined_methods_with_local_settings():
    clients = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
    model = torch.nn.Linear(4, 2)
    plain, short = (tw.simulate(model, clients, method, rounds=1) for method in ("fedavg", "fedadam+fp16"))
    assert short.bytes_up < plain.bytes_up
    one = tw.simulate(model, clients, "fedsgd", rounds=1)
    explicit = tw.simulate(model, clients, tw.Method(), rounds=1, local=tw.Local(batch=0, steps=1))
    assert all(torch.equal(one.weights[name], explicit.weights[name]) for name in one.weights)


@pytest.mark.parametrize("every", [48, pytest.param(1, marks=pytest.mark.slow)])  # CI prepares some of the pairs
def test_every_pair_of_methods_is_ready_to_train_or_refused_in_one_line(every):
    task = build_task(resolve("fedavg").task, Key(0))
    outcomes: dict[tuple[str, str], str] = {}
    prepared = {pair for i, pair in enumerate(itertools.combinations(NAMES, 2)) if i % every == 0}
    prepared |= {("mapo", "int8"), ("mapo", "scaffold")}
    for i, pair in enumerate(itertools.permutations(NAMES, 2)):
        if i % every and pair not in prepared and pair not in (("mapo", "int8"), ("mapo", "scaffold")):
            continue
        try:
            experiment = resolve("+".join(pair))
            if pair in prepared:
                make_simulation(Engine(), Job(task, experiment.method)).start()
            outcomes[pair] = ""
        except (IncompatibleParts, ConfigError) as error:
            outcomes[pair] = str(error)
    assert not {pair: error for pair, error in outcomes.items() if "\n" in error or len(error) > 600}
    assert not outcomes["mapo", "int8"]
    assert outcomes["mapo", "scaffold"]


@pytest.mark.parametrize(
    "expression",
    [
        "mapo+fedadam",
        "fedpara+scaffold",
        "lora+feddyn+int8",
        "fedlama+topk+int8",
    ],
)
def test_joined_methods_train(expression, tmp_path):
    summary = execute(resolve(expression, overrides={"rounds": 2}), tmp_path / "run")
    assert summary["method"] == expression
    assert math.isfinite(summary["final_loss"])
