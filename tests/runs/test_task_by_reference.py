"""Tasks of one's own: by reference, as objects of Python, in files; in runs that check that the data are the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from tests.own_code import forgotten, write_project
from thinwire.core.registry import register
from thinwire.data.fingerprint import fingerprint
from thinwire.errors import CheckpointError, ConfigError
from thinwire.runs.build import build_job, build_task, make_own, task_name
from thinwire.runs.config import digest, from_table, resolve, to_table
from thinwire.runs.execute import default_folder, execute
from thinwire.runs.records import read_run
from thinwire.runs.run_directory import RunFolder

QUICK = {"rounds": 2, "engine.backend": "vmap"}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with my_task.py and my_net.py, in which the test runs."""
    monkeypatch.chdir(write_project(tmp_path / "project"))
    with forgotten():
        yield Path.cwd()


def on(reference: str = "my_task.py:task", **overrides):
    return resolve(
        "fedavg", reference, {**QUICK, **{key.replace("__", "."): value for key, value in overrides.items()}}
    )


def weights(experiment) -> torch.Tensor:
    return nn.utils.parameters_to_vector(build_job(experiment).task.model.parameters())


def test_the_default_settings(project):
    experiment = resolve("fedavg", "my_task.py:task")
    assert experiment.task.kind == f"{project}/my_task.py:task"
    assert (experiment.rounds, experiment.local.epochs, experiment.local.batch) == (50, 0, 16)
    assert experiment.auto_lr
    assert to_table(experiment)["method"]["client_opt"]["clip_norm"] == 5.0, "the recipe"
    assert from_table(to_table(experiment)) == experiment
    job = build_job(experiment)
    assert (job.cohort, len(job.task.clients)) == (5, 5)
    assert build_job(on(task__members=12)).cohort == 10


def test_seeds_give_other_weights_and_one_seed_the_same_bits_whatever_torch_drew_before():
    torch.manual_seed(1)
    first = weights(on())
    drawn = torch.rand(1)
    assert torch.equal(first, weights(on()))
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1)), "the global generator is as before"
    assert not torch.equal(first, weights(on(seed=1)))
    assert torch.equal(build_job(on()).task.train.inputs, build_job(on(seed=1)).task.train.inputs)
    with forgotten():
        again = weights(on("my_task.py:fixed"))
    torch.rand(3)
    assert torch.equal(again, weights(on("my_task.py:fixed"))), "also a Task that is made when the file is imported"


def test_options_are_parameters_of_the_function_and_have_its_types():
    assert build_job(on(task__rows=30)).task.clients.sizes().tolist() == [30] * 5
    assert dict(on(task__shift=2).task.options) == {"shift": 2.0}
    for overrides, message in (
        ({"task.rows": "many"}, "task.rows must be of type int, not 'many'"),
        ({"task.row": 3}, "unknown key in task 'row': did you mean 'rows'"),
        ({"task.seed": 3}, "unknown key in task 'seed'"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve("fedavg", "my_task.py:task", overrides)


@pytest.mark.parametrize(
    ("key", "value"),
    [("clients", 7), ("partition", "iid"), ("model", "mlp"), ("scale", "standard"), ("augment", "shift-flip")],
)
def test_a_task_has_its_own_clients_and_model(key, value):
    message = rf"my_task.py:task is a Task, which has a model and 5 clients of its own; leave .*task\.{key}.* out"
    with pytest.raises(ConfigError, match=message):
        build_job(on(**{f"task__{key}": value}))


def test_validation_examples_and_fewer_clients():
    task = build_job(on(task__validation_fraction=0.1, task__participating_clients=3, cohort__size=2)).task
    assert task.clients.sizes().tolist() == [18] * 3
    assert task.client_tests.sizes().tolist() == [2] * 3
    with pytest.raises(ConfigError, match=r"the first 6 clients are wanted, but there are 5"):
        build_job(on(task__participating_clients=6))


def test_a_source_is_partitioned_and_gets_a_model_of_ones_own(tmp_path):
    made = make_own(on("my_task.py:by_user").task.kind, {}, tw.Key(3), Path("data"))
    assert made.model["note"] == "3 data", "seed and data_dir are filled"
    natural = build_job(on("my_task.py:by_user", task__model="my_net.py:Net")).task
    assert natural.clients.sizes().tolist() == [10] * 6
    table = {"kind": "my_net.py:Net", "hidden": 3}
    experiment = on("my_task.py:by_user", task__model=table, task__clients=4, task__partition="iid")
    assert from_table(to_table(experiment)) == experiment
    task = build_job(experiment).task
    assert task.clients.sizes().tolist() == [15] * 4
    assert task.model.layers[0].weight.shape == (3, 4)
    assert not torch.equal(
        weights(experiment),
        weights(tw.resolve("fedavg", "my_task.py:by_user", {**QUICK, "seed": 1, "task.model": table})),
    )
    Path("wide.py").write_text(
        "from my_net import Net\ndef net(in_features, classes): return Net(in_features, classes)\n"
    )
    assert build_job(on("my_task.py:by_user", task__model="wide.py:net")).task.model.layers[0].in_features == 4
    with pytest.raises(ConfigError, match=r"by_user has no model; write --set task.model=mlp"):
        build_job(on("my_task.py:by_user"))
    with pytest.raises(ConfigError, match=r"task.model.hidden must be of type int"):
        on("my_task.py:by_user", task__model={"kind": "my_net.py:Net", "hidden": "x"})
    Path("needs.py").write_text("def net(width): ...\ndef none(classes): return classes\n")
    with pytest.raises(ConfigError, match=r"needs.py:net has a parameter 'width' without a default"):
        build_job(on("my_task.py:by_user", task__model="needs.py:net"))
    with pytest.raises(ConfigError, match=r"needs.py:none returned an object of type int, not a torch nn.Module"):
        build_job(on("my_task.py:by_user", task__model="needs.py:none"))


WRONG = """\
import thinwire as tw

def number(): return 4
def needs(rows): return rows
def fails():
    return inner()
def inner():
    raise KeyError("state")
def refuses():
    tw.data.pool_clients([])
values = [1]
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "wrong.py:number returned an object of type int; a task function returns a thinwire.Task"),
        ("needs", "wrong.py:needs has a parameter 'rows' without a default; write --set task.rows=VALUE"),
        ("fails", "wrong.py, line 8: KeyError: 'state'"),
        ("refuses", "wrong.py, line 10: there are no clients; give at least one pair"),
        ("values", "wrong.py:values is of type list; a task is a thinwire.Task, or a function"),
        ("fail", "did you mean 'fails'"),
    ],
)
def test_mistakes_in_a_task_are_one_line(name, message):
    Path("wrong.py").write_text(WRONG)
    with pytest.raises(ConfigError, match=message) as caught:
        build_job(on(f"wrong.py:{name}"))
    assert "\n" not in str(caught.value)


def test_metrics_and_parts_by_reference(tmp_path):
    Path("mine.py").write_text("from thinwire.codecs import Raw\nclass Mine(Raw):\n    'A codec.'\n")
    overrides = {
        **QUICK,
        "eval.metrics": ["f1", "my_task.py:missed"],
        "eval.objective": "missed",
        "method.up": "mine.py:Mine",
    }
    experiment = resolve("fedavg", "my_task.py:task", {**overrides, "method.client_opt.lr": 0.1})
    assert to_table(experiment)["method"]["up"] == {"kind": f"{Path.cwd()}/mine.py:Mine"}
    summary = execute(experiment, tmp_path / "run")
    assert summary["objective"]["name"] == "missed"
    assert set(read_run(tmp_path / "run").records[-1]["metrics"]) == {"f1", "missed"}
    assert RunFolder.open(tmp_path / "run").experiment.method == experiment.method


def test_names_without_folders_and_digests_that_do_not_depend_on_the_folder(tmp_path):
    experiment = on()
    assert default_folder(experiment).name == f"fedavg-my_task-task-s0-{digest(experiment)[:6]}"
    summary = execute(experiment, tmp_path / "run")
    assert summary["task"] == read_run(tmp_path / "run").task == "my_task.py:task"
    table = read_run(tmp_path / "run").table
    assert (table["task"]["clients"], table["cohort"]["size"]) == (5, 5)
    moved = write_project(tmp_path / "moved")
    other = resolve("fedavg", f"{moved}/my_task.py:task", QUICK)
    assert digest(other) == digest(experiment)
    assert execute(other, tmp_path / "run") == summary, "the same data and model: the run is used again"


def test_a_run_is_used_again_and_resumed_with_the_same_data_only(tmp_path, thinwire, project, monkeypatch):
    monkeypatch.chdir(project)
    path = tmp_path / "run"

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(on(checkpoint__every=1), path, on_round=stop)
    file = Path("my_task.py")
    text = file.read_text()
    with forgotten():
        file.write_text(text.replace("manual_seed(0)", "manual_seed(1)"))
        code, _, err = thinwire("resume", str(path), "-q")
        assert (code, err.count("\n")) == (2, 1)
        assert "on my_task.py:task began with other data" in err
    with forgotten():
        file.write_text(text)
        assert thinwire("resume", str(path), "-q")[0] == 0
    whole = execute(on(checkpoint__every=1), tmp_path / "whole")
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    with forgotten():
        file.write_text(text.replace("manual_seed(0)", "manual_seed(1)"))
        with pytest.raises(CheckpointError, match=r"holds a run that began with other data, or other initial weights"):
            execute(on(checkpoint__every=1), path)
        assert execute(on(checkpoint__every=1), path, overwrite=True)["rounds"] == whole["rounds"]


def test_pages_and_lists_of_runs_do_not_import_the_files_of_a_run(tmp_path, thinwire, project):
    trap = project / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nfrom my_task import task\n")
    with forgotten():
        execute(resolve("fedavg", f"{trap}:task", QUICK), tmp_path / "run")
    (tmp_path / "imported").unlink()
    for words in (("report", "run", "--html", "page.html"), ("watch", "run"), ("show", "run")):
        assert thinwire(*words)[0] == 0
    assert not (tmp_path / "imported").exists()
    assert thinwire("resume", "run")[0] == 0
    assert (tmp_path / "imported").exists()


def test_objects_of_python_have_a_name_for_this_process(tmp_path, thinwire):
    def letters(seed):
        inputs = torch.linspace(0.0, 1.0, 40).view(20, 2)
        train, clients = tw.data.pool_clients(
            [(inputs[:10], torch.arange(10) % 2), (inputs[10:], torch.arange(10) % 2)]
        )
        return tw.Task(nn.Linear(2, 2), train, clients, tw.data.as_examples((inputs, torch.arange(20) % 2)))

    kind = task_name(letters)
    assert kind == task_name(letters)
    assert task_name("digits") == "digits"
    experiment = resolve("mapo", kind, {**QUICK, "method.space.k": 2})
    assert experiment.task.label == "letters"
    summary = execute(experiment, tmp_path / "run")
    assert summary["task"] == "letters"
    assert execute(experiment, tmp_path / "run", resume=True) == summary
    task = build_task(experiment.task, tw.Key(0))
    assert task_name(task, "mine") == f"own:mine-{fingerprint(task)[:8]}"
    own = resolve("fedavg", task_name(task, "mine"), QUICK)
    assert torch.equal(weights(own), nn.utils.parameters_to_vector(task.model.parameters()))
    assert thinwire("report", "run")[0] == 0
    from thinwire.runs import build

    build._kept.clear()  # as in another process
    code, _, err = thinwire("resume", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "was written by a script" in err
    assert "again, with resume=True" in err
    for wrong, message in (
        (3, "task is of type int; a task is a thinwire.Task"),
        (nn.Linear(1, 1), "is of type Linear"),
    ):
        with pytest.raises(ConfigError, match=message):
            task_name(wrong)
    with pytest.raises(ConfigError, match=r"the name '../x' of a task cannot be used: it begins with a dot"):
        task_name(task, "../x")


def test_a_task_file_has_paths_relative_to_it(tmp_path, monkeypatch, project):
    (project / "task.toml").write_text(
        'about = "Mine."\nrounds = 4\n[task]\nkind = "my_task.py:task"\nrows = 7\n'
        "[cohort]\nsize = 3\n[local]\nepochs = 2\n"
    )
    (project / "named.toml").write_text('[task]\nkind = "digits"\nclients = 5\n[cohort]\nsize = 2\n')
    monkeypatch.chdir(tmp_path)
    experiment = resolve("mapo", "project/task.toml")
    assert experiment.task.kind == f"{project.resolve()}/my_task.py:task"
    assert (experiment.rounds, experiment.cohort.size, experiment.local.epochs) == (4, 3, 2)
    assert build_job(experiment).task.clients.sizes().tolist() == [7] * 5
    named = resolve("mapo", "project/named.toml")
    assert (named.task.clients, named.local.batch, named.task.scale) == (5, 16, "standard"), "on top of the preset"
    (project / "experiment.toml").write_text('method = "mapo"\nrounds = 3\n[task]\nkind = "my_task.py:task"\n')
    assert resolve("project/experiment.toml").task.kind == experiment.task.kind
    (project / "empty.toml").write_text("rounds = 3\n")
    with pytest.raises(ConfigError, match=r"empty.toml is no task file: it lacks kind in \[task\]"):
        resolve("mapo", "project/empty.toml")
    with pytest.raises(ConfigError, match=r"my_task.py is a Python file; add the name"):
        resolve("mapo", "project/my_task.py")


def test_files_of_data_are_datasets_with_an_option(tmp_path, monkeypatch):
    from thinwire.core import registry

    def read(data_dir=None, file: str = "", factor: float = 1.0):
        values = torch.from_numpy(np.load(file)["x"]) * factor
        examples = tw.data.Arrays(values, torch.arange(len(values)) % 2)
        return tw.data.Source(examples, examples, 2, model={"inputs": values.shape[1]})

    monkeypatch.setitem(registry._TABLE, "dataset", dict(registry.entries("dataset")))
    registry._TABLE["dataset"].pop("arrays", None)
    register("dataset", "arrays", doc="Arrays.", preset={"task": {"model": "mlp"}})(read)
    np.savez("points.npz", x=np.ones((40, 3), np.float32))
    monkeypatch.setattr("thinwire.runs.config.preset", _no_preset)
    experiment = resolve("fedavg", "points.npz", {**QUICK, "task.factor": 2})
    assert experiment.task.label == "points.npz"
    assert dict(experiment.task.options) == {"file": f"{Path.cwd()}/points.npz", "factor": 2.0}
    summary = execute(experiment, tmp_path / "run")
    assert (summary["task"], read_run(tmp_path / "run").table["task"]["clients"]) == ("points.npz", 10)
    np.savez("points.npz", x=np.zeros((40, 3), np.float32))
    with pytest.raises(CheckpointError, match=r"other data, or other initial weights"):
        execute(experiment, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"there is no file absent.csv"):
        resolve("fedavg", "absent.csv")


def _no_preset(kind, name):
    from thinwire.errors import UnknownName
    from thinwire.runs.presets import preset

    if kind != "tasks":
        return preset(kind, name)
    raise UnknownName("task", name, [])


def test_a_comparison_names_the_file_and_averages_its_seeds(tmp_path, thinwire, project, monkeypatch):
    call = thinwire
    monkeypatch.chdir(project)
    words = ("compare", "fedavg", "fedsgd", "--on", "my_task.py:task", "--rounds", "2", "--seeds", "2", "-q", "--json")
    code, out, err = call(*words)
    assert code in (0, 3), err
    rows = json.loads(out)
    assert [(row["method"], row["seeds"]) for row in rows] == [("fedavg", 2), ("fedsgd", 2)]
    page = Path("runs/compare.html").read_text()
    assert "my_task.py:task" in page
    assert "5 clients, 5 sampled per round" in page
    assert "2 seeds" in page
    assert "my_task" in sys.modules
