"""Methods as functions: their names, arguments and documentation."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import thinwire as tw
from thinwire.core.registry import entries
from thinwire.errors import UnknownName
from thinwire.methods.fedavg import arguments_on_tasks, on
from thinwire.runs.presets import presets

NAMES = [
    *(
        "adapter-lth",
        "ddg",
        "decomfl",
        "diloco",
        "dp-fedadam",
        "drive",
        "eden",
        "ef",
        "evofed",
        "fa-lora",
        "factorized-fl",
    ),
    *("factorized-fl-sparse", "factorized-fl-u", "fed-sb", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbuff"),
    *("feddyn", "federated-select", "fedex-lora", "fedkseed", "fedlama", "fedlama-accelerated", "fedlama-public"),
    *("fedloru", "fedmrn", "fedmud", "fednova", "fedpaq", "fedpaq-fp16", "fedpara", "fedpara-paper", "fedper", "fedpm"),
    *("fedprox", "fedsa-lora", "fedsgd", "fedsparsify", "fedsvd", "fedyogi", "ferret", "fetchsgd", "ffa-lora", "flasc"),
    *("flora", "flora-stack"),
    *("fp16", "full", "hetlora", "highest-tier", "int4", "int8", "lattice-topk", "local", "lora", "lowest-tier"),
    *("lowrank", "mapa", "mapa-paper", "mapax", "mapax-paper", "mapo", "mapo-paper", "muloco"),
    *("pfedpara", "powersgd", "pufferfish", "quantize", "rolora", "scaffold", "signsgd", "slora", "sparse"),
    *("sparse-adapter", "sparseloco", "spdst", "stc", "thin", "topk", "topk-plain"),
]
METHODS = {name: entry for name, entry in entries("method").items() if entry.make.__module__.startswith("thinwire.")}


def test_names_of_presets_stay():
    assert list(METHODS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_function_has_the_name_with_underscores_and_returns_a_method(name):
    make = METHODS[name].make
    assert getattr(tw.methods, name.replace("-", "_")) is make
    assert isinstance(make(), tw.Method)
    for task, arguments in arguments_on_tasks(make).items():
        assert isinstance(make(**arguments), tw.Method)
        assert task in presets("tasks")


def test_docstrings_have_a_sentence_every_argument_a_paper_and_an_example():
    for name, entry in METHODS.items():
        text = inspect.getdoc(entry.make)
        assert entry.doc.endswith("."), name
        assert len(entry.doc) <= 120, name
        assert re.search(r"^(Papers?:|Not from a paper:) ", text, re.M), name
        assert ">>> " in text, name
        documented = re.findall(r"^    (\w+): ", text.partition("Args:")[2], re.M)
        assert documented == list(inspect.signature(entry.make).parameters), name
        assert entry.paper, name


def test_replace_changes_slots_of_a_copy():
    method = tw.methods.mapo(k=64)
    quantized = method.replace(up=tw.codecs.Quantize(4))
    assert (quantized.up, quantized.space, method.up) == (tw.codecs.Quantize(4), tw.spaces.MAPO(k=64), tw.codecs.Raw())
    with pytest.raises(TypeError, match="upp"):
        method.replace(upp=tw.codecs.Quantize(4))


def test_arguments_reach_the_parts():
    assert tw.methods.fedlama(phi=3).schedule == tw.schedules.FedLAMA(phi=3)
    method = tw.methods.flasc(rank=4, density=0.5, download_density=0.25)
    assert (method.space.rank, method.up, method.down) == (4, tw.codecs.TopK(0.5), tw.codecs.TopK(0.25))
    assert tw.methods.flasc().down == tw.codecs.Raw()
    assert [tier.up for tier in tw.methods.hetlora(ranks=(2,)).budget.tiers] == [
        tw.codecs.RankSlice(2),
        tw.codecs.Raw(),
    ]


def test_a_part_is_given_by_the_name_of_a_method_or_by_its_own():
    method = tw.Method(up="topk", space="mapo", client_opt="adam", correction="scaffold")
    assert (method.up, method.space) == (tw.methods.topk().up, tw.methods.mapo().space)
    assert (method.client_opt, method.correction) == (tw.optimizers.Adam(), tw.optimizers.Scaffold())
    assert method.replace(up="int4").up == tw.codecs.Quantize(4)
    for slot, name in (("up", "top"), ("space", "topk")):
        with pytest.raises(UnknownName, match=f"unknown {'codec' if slot == 'up' else slot} '{name}'"):
            tw.Method(**{slot: name})


def test_thin_draws_bases_sooner_in_a_short_run():
    assert [tw.methods.thin().over(rounds).space.redraw_every for rounds in (5, 50, 200, 500)] == [1, 1, 4, 10]
    assert tw.methods.thin(redraw_every=10).over(50).space.redraw_every == 10
    route = tw.spaces.Route(((("*.weight",), tw.methods.thin().space), (("*",), tw.spaces.Full())))
    assert tw.Method(space=route).over(100).space.redraw_every == 2


def test_arguments_on_a_task_are_checked_when_the_function_is_defined():
    with pytest.raises(TypeError, match="kk"):

        @on("cifar10", kk=3)
        def wrong(k: int = 1) -> tw.Method:
            return tw.Method()


def test_on_can_be_stacked():
    @on("mnist", k=2)
    @on("cifar10", k=3)
    def example(k: int = 1) -> tw.Method:
        return tw.Method()

    assert arguments_on_tasks(example) == {"mnist": {"k": 2}, "cifar10": {"k": 3}}


def test_method_object_trains():
    clients = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
    run = tw.simulate(torch.nn.Linear(4, 2), clients, tw.methods.mapo(k=4).replace(up=tw.codecs.Quantize(8)), rounds=2)
    assert len(run.history) == 2
