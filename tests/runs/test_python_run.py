"""A run of one's own is a run: folders, resuming, early stopping, the best model, callbacks, progress, its text."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn

import thinwire as tw
from tests.bad_input.test_file_system import files_of_at_most
from thinwire.data.examples import Arrays
from thinwire.data.partition import Assignment
from thinwire.federation.job import RoundRecord
from thinwire.runs.config import resolve, to_table
from thinwire.runs.execute import execute
from thinwire.runs.progress import style_of
from thinwire.runs.records import SUMS

X, Y = load_digits(return_X_y=True)
X, Y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(Y)
CLIENTS = [(X[i:400:4], Y[i:400:4]) for i in range(4)]
TEST = (X[400:600], Y[400:600])
METHOD = tw.Method(client_opt=tw.optimizers.SGD(0.5))


def model(seed: int = 0, outputs: int = 10) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(64, outputs)


def simulate(**options) -> tw.Run:
    given = {"rounds": 6, "cohort": 2, "test": TEST, "backend": "loop", "checkpoint_every": 2, **options}
    return tw.simulate(given.pop("model", model()), given.pop("clients", CLIENTS), METHOD, **given)


def timeless(run: tw.Run) -> list[RoundRecord]:
    return [record._replace(seconds=0) for record in run.history]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same bits; the order of their weights does not matter."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tw.Run:
    """An uninterrupted run in a folder."""
    return simulate(out=tmp_path_factory.mktemp("whole") / "run")


def interrupted(at: int, error: BaseException):
    def on_round(record):
        if record.round == at:
            raise error

    return on_round


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 4])
def test_ctrl_c_saves_the_last_round_and_the_run_goes_on_with_the_same_bits(tmp_path, whole, at, capsys):
    with pytest.raises(KeyboardInterrupt):
        simulate(out=tmp_path / "cut", on_round=interrupted(at, KeyboardInterrupt()), progress=True)
    assert "stopped; the same call with resume=True continues" in capsys.readouterr().err
    trained = []
    run = simulate(out=tmp_path / "cut", resume=True, on_message=lambda number, *_: trained.append(number))
    assert min(trained) == at + 1
    assert timeless(run) == timeless(whole)
    assert same(run.weights, whole.weights)
    assert same(weights_of(run.best_model()), weights_of(whole.best_model()))
    for name in ("model.safetensors", "best.safetensors"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_finished_run_is_returned_without_training(whole):
    before = (whole.path / "summary.json").read_bytes()
    again = simulate(out=whole.path, resume=True, on_message=lambda *_: pytest.fail("it was trained"))
    assert timeless(again) == timeless(whole)
    assert again.history[0].seconds == whole.history[0].seconds
    assert same(again.weights, whole.weights)
    assert same(again.coords, whole.coords)
    assert again.summary == whole.summary
    assert (whole.path / "summary.json").read_bytes() == before


def test_a_finished_run_is_given_more_rounds(tmp_path):
    path, constant = tmp_path / "run", {"schedule": "constant"}  # a rate that does not depend on the number of rounds
    straight = simulate(rounds=11, **constant)
    simulate(out=path, **constant)
    with pytest.raises(KeyboardInterrupt):
        simulate(out=path, **constant, resume=True, rounds=9, on_round=interrupted(8, KeyboardInterrupt()))
    simulate(out=path, **constant, resume=True, rounds=9)
    run = simulate(out=path, **constant, resume=True, rounds=11)
    assert timeless(run) == timeless(straight)
    assert same(run.weights, straight.weights)
    assert run._table["extended"] == [6, 9]
    assert (
        simulate(out=path, **constant, rounds=11, on_message=lambda *_: pytest.fail("it was trained")).summary
        == run.summary
    )
    with pytest.raises(tw.CheckpointError, match="rounds = 11 there, 6 here"):
        simulate(out=path, **constant)


def test_an_extended_run_keeps_its_method_and_its_schedule_goes_on_as_in_a_longer_run(tmp_path):
    """A basis for 2 rounds, as in a run of 100; the cosine of the last rounds is that of a longer run."""
    options = {"out": tmp_path / "run", "schedule": "cosine", "lr": "auto", "cohort": 2, "backend": "loop"}
    first = tw.simulate(model(), CLIENTS, "thin", rounds=100, **options)
    longer = tw.simulate(model(), CLIENTS, "thin", rounds=152, resume=True, **options)
    rate = first.history[0].lr
    for record, rounds in ((first.history[-1], 100), (longer.history[-1], 152)):
        assert record.lr == pytest.approx(rate * (1 + math.cos(math.pi * (rounds - 1) / rounds)) / 2)
    assert longer._table["method"]["space"]["redraw_every"] == 2
    assert timeless(longer)[:100] == timeless(first)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resume": True, "rounds": 3}, "rounds = 6 there, 3 here; .* --overwrite"),
        ({"rounds": 9}, "rounds = 6 there, 9 here; .* --overwrite"),
        ({"resume": True, "model": model(1)}, r"other data, or other initial weights .*torch\.manual_seed"),
        ({"resume": True, "clients": CLIENTS[::-1]}, "other data, or other initial weights"),
        ({"resume": True, "patience": 3}, "eval.patience = unset there, 3 here"),
        ({"resume": True, "overwrite": True}, "write one of them"),
    ],
    ids=["fewer rounds", "rounds", "model", "data", "patience", "both"],
)
def test_a_folder_with_another_run_is_refused_in_one_line(whole, options, words):
    before = {file: file.read_bytes() for file in whole.path.rglob("*") if file.is_file()}
    with pytest.raises(tw.ThinwireError, match=words) as error:
        simulate(out=whole.path, **options)
    assert "\n" not in str(error.value)
    assert {file: file.read_bytes() for file in whole.path.rglob("*") if file.is_file()} == before


def test_another_name_and_other_checkpoints_are_the_same_run(whole):
    assert simulate(out=whole.path, resume=True, name="another", checkpoint_every=5).summary == whole.summary


def test_overwrite_replaces_the_run_and_needs_a_folder(tmp_path):
    simulate(out=tmp_path / "run", rounds=3)
    assert len(simulate(out=tmp_path / "run", rounds=2, overwrite=True).history) == 2
    assert len(tw.load_run(tmp_path / "run").history) == 2
    with pytest.raises(tw.ConfigError, match="resume=True needs the folder"):
        simulate(resume=True)


def test_files_and_full_disks_are_one_line_and_the_run_continues(tmp_path, whole):
    (tmp_path / "file").write_text("notes")
    with pytest.raises(tw.CheckpointError, match="is not a run directory; name another directory"):
        simulate(out=tmp_path / "file")
    for bad, words in ((tmp_path / "file/run", "Not a directory"), (tmp_path / ("n" * 300), "use a shorter name")):
        with pytest.raises(tw.CheckpointError, match=words):
            simulate(out=bad)
    with files_of_at_most(100), pytest.raises(tw.CheckpointError, match=r"config\.toml: File too large"):
        simulate(out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with files_of_at_most(2500), pytest.raises(tw.CheckpointError, match=r"too large.*; resume=True continues it"):
        simulate(out=tmp_path / "run")
    assert not list(tmp_path.rglob("*.tmp"))
    assert same(simulate(out=tmp_path / "run", resume=True).weights, whole.weights)


# -- who does badly ----------------------------------------------------------------------------------------------------


def hospitals(**changes) -> tw.Task:
    """Three named clients, the last with digits that it does not train on; each keeps examples of its own."""
    held_out = Assignment(np.arange(400, 460), np.array([0, 20, 50, 60]))
    task = tw.Task(
        model(),
        Arrays(X[:460], torch.cat((Y[:450], (Y[450:460] + 5) % 10))),
        Assignment(np.arange(400), np.array([0, 100, 300, 400])),
        test=Arrays(*TEST),
        client_tests=held_out,
        client_names=("north", "south", "west"),
    )
    return replace(task, **changes)


def test_each_client_is_measured_at_the_end_and_the_worst_is_first(tmp_path):
    task = hospitals()
    run = tw.run(METHOD, task, rounds=3, metrics=["f1", "auroc"], out=tmp_path / "run")
    assert run.clients[0]["client"] == "west"
    accuracies = [one["accuracy"] for one in run.clients]
    assert accuracies == sorted(accuracies)
    with torch.no_grad():
        scores = run.model()(X[400:420]).softmax(1)
    labels = Y[400:420]
    north = next(one for one in run.clients if one["client"] == "north")
    assert (north["training_examples"], north["examples"]) == (100, 20)
    assert north["accuracy"] == pytest.approx((scores.argmax(1) == labels).double().mean().item())
    assert north["loss"] == pytest.approx(-scores[range(20), labels].log().mean().item(), rel=1e-5)
    seen = [i for i in range(10) if (labels == i).any()]
    assert north["auroc"] == pytest.approx(np.mean([roc_auc_score(labels == i, scores[:, i]) for i in seen]), abs=1e-6)
    assert f"client west: accuracy {100 * accuracies[0]:.2f} % on 10 validation examples, the worst of 3" in repr(run)
    assert run.summary["worst_client"] == run.clients[0]
    again = tw.run(METHOD, task, rounds=3, metrics=["f1", "auroc"], out=run.path)
    assert tw.load_run(run.path).clients == again.clients == run.clients
    assert "clients.jsonl" in (run.path / SUMS).read_text()
    (run.path / "clients.jsonl").write_text("")
    with pytest.raises(tw.CheckpointError, match=r"clients\.jsonl is damaged"):
        tw.load_run(run.path)


def test_measuring_clients_does_not_change_training():
    with_clients, without = (tw.run(METHOD, one, rounds=2) for one in (hospitals(), hospitals(client_tests=None)))
    assert same(with_clients.weights, without.weights)
    assert (len(with_clients.clients), without.clients) == (3, [])
    assert "the worst of" not in repr(without)


def test_clients_of_a_personal_method_are_measured_with_their_own_model():
    run = tw.run("local", hospitals(), rounds=3, set={"method.client_opt.lr": 0.5})
    accuracies = [one["accuracy"] for one in run.clients]
    assert np.mean(accuracies) == pytest.approx(run.history[-1].client_accuracy)
    with torch.no_grad():
        shared = (run.model()(X[400:420]).argmax(1) == Y[400:420]).double().mean().item()
    assert next(one["accuracy"] for one in run.clients if one["client"] == "north") > shared


def test_a_metric_that_fails_for_a_client_is_left_out_there_and_the_run_is_kept():
    def narrow(outputs, targets):
        return {20: 0.5, 30: math.nan, len(TEST[1]): 0.7}[len(targets)]  # a KeyError for the ten examples of west

    run = tw.run(METHOD, hospitals(metrics={"narrow": narrow}), rounds=1)
    assert {one["client"]: one.get("narrow") for one in run.clients} == {"north": 0.5, "south": None, "west": None}


def test_clients_of_a_regression_are_ranked_by_their_loss():
    pairs = [(x, y.float()[:, None] / 9) for x, y in CLIENTS]
    run = simulate(model=model(outputs=1), clients=pairs, test=pairs[0], loss="mse", rounds=2, validation_fraction=0.2)
    losses = [one["loss"] for one in run.clients]
    assert losses == sorted(losses, reverse=True)
    assert "accuracy" not in run.clients[0]
    assert f": loss {losses[0]:.4g} on 20 validation examples, the worst of 4 clients" in repr(run)


# -- early stopping and the best model --------------------------------------------------------------------------------


def test_the_best_model_has_the_accuracy_of_the_best_record(whole):
    assert whole.best == max(whole.history, key=lambda record: (record.accuracy, -record.round))
    with torch.no_grad():
        right = (whole.best_model()(TEST[0]).argmax(1) == TEST[1]).float().mean().item()
    assert right == pytest.approx(whole.best.accuracy)
    assert whole.summary["best"] == {
        "round": whole.best.round,
        "value": whole.best.accuracy,
        "chosen_by": "test accuracy",
    }
    assert "best.safetensors" in (whole.path / SUMS).read_text()


def test_patience_ends_a_run_by_validation_examples_and_not_by_the_test_set():
    run = simulate(rounds=60, patience=2, validation_fraction=0.2, metrics=["f1"])
    assert (run.ended_by, run.summary["ended_by"]) == ("patience", "patience")
    values = [record.client_accuracy for record in run.history]
    assert len(values) == run.best.round + 2 < 60
    assert run.best.client_accuracy == max(values)
    assert all(value < max(values) for value in values[: run.best.round - 1])
    assert (run.selected_by.label, run.objective.label) == ("validation accuracy", "test accuracy")


def test_the_best_round_is_that_of_the_objective_on_validation_examples():
    run = simulate(rounds=6, validation_fraction=0.2, metrics=["f1"], objective="f1")
    values = [record.clients_eval["f1"] for record in run.history]
    assert values != [record.metrics["f1"] for record in run.history], "those of the test set"
    assert (run.best.round, run.summary["best"]["value"]) == (1 + values.index(max(values)), max(values))
    assert run.selected_by.label == run.summary["best"]["chosen_by"] == "validation f1"


def test_patience_of_a_metric_and_of_a_regression():
    run = simulate(rounds=60, patience=1, metrics=["f1"], objective="f1")
    values = [record.metrics["f1"] for record in run.history]
    assert run.ended_by == "patience"
    assert max(values) == values[-2] >= values[-1]
    pairs = [(x, y.float()[:, None] / 9) for x, y in CLIENTS]
    run = simulate(model=model(outputs=1), clients=pairs, test=pairs[0], loss="mse", rounds=3)
    assert run.best.test_loss == min(record.test_loss for record in run.history)
    assert "r2 " in repr(run)


def test_a_target_and_a_stop_function_end_a_run():
    target = simulate(rounds=60, target_accuracy=0.5)
    assert target.ended_by == "target accuracy"
    assert target.accuracy >= 0.5 > max(record.accuracy for record in target.history[:-1])
    assert len(simulate(stop=lambda record: record.round == 2).history) == 2
    sizes = []
    spent = simulate(stop=lambda record: sizes.append(record.bytes_up) or sum(sizes) > 15_000)
    assert spent.ended_by == "stop function"
    assert spent.bytes_up > 15_000 >= spent.bytes_up - spent.history[-1].bytes_up


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": 2, "test": None}, "nothing to evaluate on; give test="),
        ({"target_accuracy": 0.9, "test": None}, "give test="),
        ({"target_accuracy": 80}, "above 0 and at most 1"),
        ({"patience": -1}, "eval.patience must be"),
        ({"stop": True}, "stop must be a function of the record"),
        ({"on_round": ["print"]}, "on_round must be a function of the record"),
        ({"callbacks": [print]}, "unknown option callbacks; write one of rounds"),
        ({"validation_fraction": 2}, "between 0 and 1"),
        ({"objective": "r2"}, "unknown metric of the run 'r2'"),
        ({"checkpoint_every": 0}, "checkpoint.every must be 1 or more"),
    ],
)
def test_unusable_options_are_refused_in_one_line(tmp_path, options, words):
    with pytest.raises(tw.ConfigError, match=words):
        simulate(out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_run_without_evaluation_has_no_best_model():
    run = simulate(test=None, rounds=1)
    assert run.best is None
    with pytest.raises(tw.ConfigError, match="no round was evaluated"):
        run.best_model()


# -- callbacks and progress -------------------------------------------------------------------------------------------


def test_functions_are_called_in_order_and_see_earlier_rounds_when_a_run_goes_on(tmp_path):
    calls: list[tuple[str, int]] = []

    def stop(record):
        calls.append(("stop", record.round))
        return record.round == 2

    simulate(stop=stop, on_round=lambda record: calls.append(("on_round", record.round)))
    assert calls == [(name, number) for number in (1, 2) for name in ("on_round", "stop")]
    with pytest.raises(KeyboardInterrupt):
        simulate(out=tmp_path / "run", on_round=interrupted(3, KeyboardInterrupt()))
    calls.clear()
    simulate(out=tmp_path / "run", resume=True, on_round=lambda record: calls.append(("again", record.round)))
    assert calls == [("again", number) for number in range(1, 7)]


def test_after_an_error_of_a_function_the_run_goes_on(tmp_path, whole):
    def plot(record):
        if record.round == 3:
            raise ValueError("no display")

    for options in ({"on_round": plot}, {"stop": plot}):
        with pytest.raises(ValueError, match="no display"):
            simulate(out=tmp_path / "run", overwrite=True, **options)
    trained = []
    run = simulate(out=tmp_path / "run", resume=True, on_message=lambda number, *_: trained.append(number))
    assert min(trained) == 3, "after the newest checkpoint"
    assert same(run.weights, whole.weights)


def test_progress_is_quiet_here_and_lines_on_request(capsys):
    simulate(rounds=2)
    assert capsys.readouterr().err == ""
    simulate(rounds=2, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "round 2/2" in lines[1]


def _all_of(terminal):
    """What was written to a pseudo-terminal whose other end is closed; one read returns only a part of it."""
    text = b""
    with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as file:  # Linux: EIO at the end
        while part := file.read(1 << 16):
            text += part
    return text.decode()


def test_progress_is_a_bar_in_a_terminal(monkeypatch):
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert (style_of(None), style_of(False)) == ("terminal", "nothing")
        simulate(rounds=2)
    text = _all_of(leader)
    assert "2/2" in text
    assert "accuracy" in text


# -- text and files ---------------------------------------------------------------------------------------------------


def test_a_run_is_told_in_four_lines(whole):
    lines = repr(whole).splitlines()
    assert len(lines) == 4
    assert all(len(line) < 200 for line in lines)
    assert lines[0].endswith("6 of 6 rounds, ended by rounds")
    assert whole._repr_html_().startswith("<pre>Run fedavg on own data")


def test_a_run_is_a_frame():
    run = simulate(rounds=2, metrics=["f1"])
    frame = run.frame()
    assert list(frame.index) == [1, 2]
    assert list(frame["f1"]) == [record.metrics["f1"] for record in run.history]


def test_a_run_is_saved_and_loaded(tmp_path, whole):
    memory = simulate()
    for loaded in (tw.load_run(simulate(out=tmp_path / "copy").path), tw.load_run(whole.path)):
        assert timeless(loaded) == timeless(memory)
        assert same(loaded.weights, memory.weights)
        assert same(weights_of(loaded.model(model(5))), weights_of(memory.model()))
        assert same(weights_of(loaded.best_model(model(5))), weights_of(memory.best_model()))
        assert (loaded.best.round, loaded.ended_by) == (memory.best.round, "rounds")
        assert loaded.bytes_total == memory.bytes_total
        with pytest.raises(tw.ConfigError, match=r"run\.model\(module\)"):
            loaded.model()
        with pytest.raises(tw.ConfigError, match="has shape"):
            loaded.model(nn.Linear(3, 2))
    assert len(tw.report([tmp_path / "copy"]).rows) == 1


def test_an_unfinished_run_is_not_loaded(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        simulate(out=tmp_path / "run", on_round=interrupted(3, KeyboardInterrupt()))
    with pytest.raises(tw.CheckpointError, match=r"not finished \(3 of 6 rounds\); run `python .*resume=True"):
        tw.load_run(tmp_path / "run")


# -- named tasks ------------------------------------------------------------------------------------------------------

QUICK = {"rounds": 3, "set": {"local.epochs": 1, "engine.backend": "loop"}}


def test_run_is_the_run_of_the_command_line(tmp_path, thinwire):
    run = tw.run("fedavg", "digits", out=tmp_path / "python", **QUICK)
    words = ["--on", "digits", "--rounds", "3", "--set", "local.epochs=1", "--set", "engine.backend=loop", "-q"]
    assert thinwire("run", "fedavg", *words, "--keep-best", "--out", "here")[0] == 0
    for name in ("config.toml", "model.safetensors", "best.safetensors"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "python" / name).read_bytes()
    loaded = tw.load_run(tmp_path / "here")
    assert same(loaded.weights, {**run.weights, **run.buffers})
    assert same(weights_of(loaded.best_model(run.model())), weights_of(run.best_model()))
    again = tw.run("fedavg", "digits", out=tmp_path / "here", resume=True, **QUICK)
    assert same(again.weights, run.weights)


def test_run_takes_a_method_and_refuses_what_is_no_task():
    run = tw.run(METHOD, metrics=["f1"], objective="f1", name="mine", **QUICK)
    assert (run.name, run.objective.name) == ("mine", "f1")
    with pytest.raises(tw.ConfigError, match="or a function that returns one"):
        tw.run("fedavg", 3)
    with pytest.raises(tw.ConfigError, match="method must be"):
        tw.run(3)


def test_new_settings_do_not_change_digests():
    table = to_table(resolve("fedavg", "digits"))
    assert set(table["eval"]) == {"every", "target_accuracy", "metrics"}
    assert set(table["checkpoint"]) == {"every"}


def test_resume_says_where_it_goes_on(thinwire):
    experiment = resolve("fedavg", "digits", {"rounds": 4, "local.epochs": 1, "checkpoint.every": 2})
    with pytest.raises(KeyboardInterrupt):
        execute(experiment, Path("run"), on_round=interrupted(3, KeyboardInterrupt()))
    code, _, err = thinwire("resume", "run")
    assert (code, err.splitlines()[0]) == (0, "run goes on after round 3 of 4")


def test_options_of_the_command_line(thinwire, tmp_path):
    quick = ("--rounds", "30", "--set", "local.epochs=1", "--set", "method.client_opt.lr=1.5", "-q")
    asked = ("--patience", "1", "--objective", "f1", "--metric", "f1", "--metric", "balanced-accuracy")
    code, out, err = thinwire("run", "fedavg", *quick, *asked, "--json", "--out", "run")
    assert code == 0, err
    found = json.loads(out)
    assert (found["ended_by"], found["objective"]["name"]) == ("patience", "f1")
    assert found["rounds"] < 30
    assert not (tmp_path / "run/best.safetensors").exists()
    assert thinwire("--version")[1] == f"thinwire {tw.__version__}\n"
