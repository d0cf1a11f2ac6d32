"""Recipes: which layer wins, how they are named, and that old tables resolve to the runs they were made of."""

import math
import tomllib
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire.errors import ConfigError, UnknownName
from thinwire.optimizers import SGD, Adam, ConstantLR, CosineLR
from thinwire.protocol.method import Method
from thinwire.runs.config import digest, resolve, to_table
from thinwire.runs.presets import preset, presets
from thinwire.runs.toml import dumps

DEFAULT = preset("recipes", "default").table["method"]
CLIP = DEFAULT["client_opt"]["clip_norm"]


def schedule(method: Method) -> tuple[str, float]:
    return type(method.lr_schedule).__name__, method.client_opt.clip_norm


def write(folder: Path, text: str) -> str:
    file = folder / "mine.toml"
    file.write_text(text)
    return str(file)


# -- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "mapo", "fedpara+scaffold+int8", "flasc"])
def test_method_by_name_is_clipped_and_warmed_up(name):
    method = resolve(name, "digits").method
    assert schedule(method) == ("WarmupLR", CLIP)
    assert method.lr_schedule.inner == CosineLR(floor=DEFAULT["lr_schedule"]["inner"]["floor"])
    assert method.server_opt.clip_norm == math.inf


def test_learning_rate_of_task_and_method_stay():
    for name in ("fedavg", "lora"):
        found = [resolve(name, "digits", recipe=recipe).method.client_opt.lr for recipe in ("default", "paper")]
        assert found[0] == found[1]


@pytest.mark.parametrize("recipe", [None, "default"])
def test_optimizer_of_another_kind_is_clipped_too(tmp_path, recipe):
    file = write(tmp_path, '[method]\nkind = "fedavg"\nclient_opt = { kind = "adam", lr = 0.01 }\n')
    assert resolve(file, "digits", recipe=recipe).method.client_opt == Adam(0.01, clip_norm=CLIP)


@pytest.mark.parametrize("stated", ['"adam"', '{ kind = "adam" }'])
def test_optimizer_by_name_alone_is_clipped_too(tmp_path, stated):
    file = write(tmp_path, f"[method]\nclient_opt = {stated}\n")
    assert resolve(file).method.client_opt == Adam(clip_norm=CLIP)


def test_file_wins(tmp_path):
    file = write(tmp_path, "[method.client_opt]\nclip_norm = 0.5\n[method.lr_schedule]\nfraction = 0.2\n")
    method = resolve(file).method
    assert (schedule(method), method.lr_schedule.fraction) == (("WarmupLR", 0.5), 0.2)
    file = write(tmp_path, '[method]\nlr_schedule = { kind = "warmup" }\n')
    assert resolve(file).method.lr_schedule.inner == ConstantLR()  # a stated part is not mixed with the recipe's
    file = write(tmp_path, '[method]\nlr_schedule = "constant"\nclient_opt = { clip_norm = inf }\n')
    assert schedule(resolve(file).method) == ("ConstantLR", math.inf)


@pytest.mark.parametrize("given", ["sgd", {"kind": "sgd", "lr": 0.1}])
def test_override_of_the_whole_optimizer_keeps_clipping(given):
    assert resolve("fedavg", "mnist", {"method.client_opt": given}).method.client_opt == SGD(0.1, clip_norm=CLIP)
    assert resolve("fedavg", "mnist", {"method.client_opt": given}, "paper").method.client_opt == SGD(0.1)


def test_command_line_wins():
    off = {"method.client_opt.clip_norm": math.inf, "method.lr_schedule": "constant", "task.scale": "unit"}
    found = resolve("fedavg", "digits", off)
    assert digest(found) == digest(resolve("fedavg", "digits", recipe="paper"))
    assert schedule(resolve("fedavg", "digits", {"method.client_opt.kind": "adam"}).method) == ("WarmupLR", CLIP)


def test_optimizer_without_the_option_is_left_alone():
    found = resolve("fedavg", "digits", {"method.client_opt": {"kind": "beta-posterior"}})
    assert found.method.client_opt == tw.optimizers.BetaPosterior()


# -- the paper's recipe ----------------------------------------------------------------------------------------------


def test_paper_leaves_everything_out():
    experiment = resolve("fedavg", "fashion-mnist", recipe="paper")
    assert (schedule(experiment.method), experiment.task.scale) == (("ConstantLR", math.inf), "unit")


def test_paper_puts_the_scale_of_every_task_preset_back():
    for task, one in presets("tasks").items():
        assert resolve("fedavg", task).task.scale == one.table["task"].get("scale", "unit")
        assert resolve("fedavg", task, recipe="paper").task.scale == "unit"
    assert resolve("fedavg", "mnist", {"task.scale": "standard"}, "paper").task.scale == "standard"


def test_file_names_its_recipe_and_the_command_line_wins(tmp_path):
    file = write(tmp_path, 'recipe = "paper"\nmethod = "fedavg"\n')
    assert schedule(resolve(file).method) == ("ConstantLR", math.inf)
    assert schedule(resolve(file, recipe="default").method) == ("WarmupLR", CLIP)
    assert "recipe" not in to_table(resolve(file))


# -- complete files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_complete_file_is_used_as_it_is(tmp_path, recipe):
    experiment = resolve("mapo+int8", "digits", {"rounds": 4}, recipe)
    file = write(tmp_path, dumps(to_table(experiment)))
    assert digest(resolve(file)) == digest(experiment)


# -- tw.simulate -----------------------------------------------------------------------------------------------------


def test_own_tasks_have_the_recipe_by_name_and_by_value(tmp_path):
    (tmp_path / "own.py").write_text("def task(): ...\n")
    own = f"{tmp_path}/own.py:task"
    assert resolve("fedavg", own).method.client_opt == SGD(Method.client_opt.lr, clip_norm=CLIP)
    assert schedule(resolve("mapo+int8", own).method) == ("WarmupLR", CLIP)
    assert schedule(resolve("mapo", own, recipe="paper").method) == ("ConstantLR", math.inf)
    assert schedule(resolve(write(tmp_path, 'recipe = "paper"\nmethod = "mapo"\n'), own).method)[0] == "ConstantLR"
    assert resolve(Method(), own).method == resolve("fedavg", own).method
    assert resolve(Method(), own, recipe="paper").method == Method()
    assert schedule(resolve(Method(lr_schedule=ConstantLR()), own).method) == ("ConstantLR", CLIP)


def test_simulate_trains_with_the_recipe():
    clients = [(torch.eye(4), torch.arange(4)), (torch.eye(4), torch.arange(4))]

    def weights(method, **options):
        torch.manual_seed(0)
        return tw.simulate(torch.nn.Linear(4, 4), clients, method, rounds=3, backend="loop", **options).weights

    paper, plain, default = weights("fedavg", recipe="paper"), weights(Method()), weights("fedavg")
    assert all(torch.equal(default[name], plain[name]) for name in plain)
    assert not torch.equal(default["weight"], paper["weight"])


# -- errors ----------------------------------------------------------------------------------------------------------


def test_unknown_recipe_is_one_line(tmp_path):
    for call in (
        lambda: resolve("fedavg", recipe="papr"),
        lambda: resolve(write(tmp_path, 'recipe = "papr"\n')),
    ):
        with pytest.raises(UnknownName, match=r"papr.*paper") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_recipe_that_is_no_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="recipe"):
        resolve(write(tmp_path, "recipe = 3\n"))


@pytest.mark.parametrize("verb", ["run", "compare", "check", "show", "tune", "deploy", "app"])
def test_every_verb_takes_a_recipe(thinwire, verb):
    folder = ["app"] if verb == "app" else []
    code, out, err = thinwire(verb, "fedavg", *folder, "--recipe", "papr")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "paper" in err


def test_show_prints_resolved_values_of_a_recipe(thinwire):
    default, paper = (tomllib.loads(thinwire("show", "fedavg", *words)[1]) for words in ((), ("--recipe", "paper")))
    assert default["method"]["client_opt"]["clip_norm"] == CLIP
    assert default["method"]["lr_schedule"]["kind"] == "warmup"
    assert "clip_norm" not in paper["method"]["client_opt"]
    assert paper["method"]["lr_schedule"] == {"kind": "constant"}
    assert "paper" in thinwire("list", "recipes")[1]
