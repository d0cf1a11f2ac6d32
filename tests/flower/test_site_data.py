"""Apps with data of one's own at each site: templates, jobs of machines, and evaluation at the sites, in memory."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.flower.in_memory import FlowerServer, InMemory
from tests.own_code import forgotten
from tests.own_files import write_csv
from tests.own_sites import SIZES, write_stays
from thinwire.errors import ConfigError, DataError, WireError
from thinwire.federation.evaluation import as_numbers, with_client_evaluations
from thinwire.federation.job import RoundRecord
from thinwire.federation.settings import Cohort
from thinwire.federation.simulation import make_simulation
from thinwire.flower.app_folder import KINDS, write_own_data_app
from thinwire.flower.apps import job_in, job_of, read_experiment
from thinwire.flower.client import Client, ClientStore
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.server import checked, in_record
from thinwire.flower.site_check import check_site
from thinwire.protocol.round import EVALUATE, Request, Response, Round
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.training.evaluation import Evaluation

PAGE = (Path(__file__).parents[2] / "docs/own-data.md").read_text()
(TASK,) = re.findall(r"^`federated/task.py`:\n\n```python\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(autouse=True)
def fresh():
    """No file of another test is imported."""
    with forgotten():
        yield


def write_app(folder: Path, kind: str = "table", method: str = "fedavg", **settings):
    """An app for three sites; returns its experiment."""
    given = {"rounds": 3, "task.validation_fraction": 0.2, "eval.every": 2, "task.clients": 3, **settings}
    write_own_data_app(kind, folder, lambda task: resolve(method, task, given))
    return folder / "federated/experiment.toml"


def hospitals(folder: Path, method: str = "fedavg", task: str = TASK, **settings):
    """The experiment of docs/own-data.md, and the folder of all sites."""
    file = write_app(folder / "app", method=method, **settings)
    file.with_name("task.py").write_text(task)
    return read_experiment(file), write_stays(folder / "data")


class Sites(InMemory):
    """Clients that have only the folders of their sites."""

    def __init__(self, experiment, folders: list[Path]) -> None:
        self.machines = []
        for folder in folders:
            job_in.cache_clear()
            self.machines.append(Client(experiment.engine, job_of(experiment, {"data-dir": str(folder)})))
        super().__init__(self.machines[0])
        self.away: set[int] = set()
        self.asked: list[tuple[int, str]] = []

    def clients(self):
        return super().clients() - self.away

    def respond(self, number, request):
        self.client = self.machines[number]
        self.asked.append((number, request.phase))
        return super().respond(number, request)


def play(runner, rounds: int):
    state, records = runner.start(), []
    for _ in range(rounds):
        state, record = runner.round(state)
        records.append(record._replace(seconds=0.0))
    return state, records


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper"])
def test_sites_with_their_own_records_equal_the_simulation(method, tmp_path):
    private = {"method.schedule.private": ["last.*"]} if method == "fedper" else {}
    experiment, data = hospitals(tmp_path, method, **private)
    transport = Sites(experiment, [data / name for name in sorted(SIZES)])
    server = FlowerServer(experiment.engine, job_of(experiment, None), transport, RoundPolicy(quorum=1.0))
    ours, records = play(server, 3)
    theirs, their_records = play(make_simulation(experiment.engine, build_job(experiment, data)), 3)
    for part in ("coords", "base", "buffers"):
        a, b = getattr(ours.server.public, part), getattr(theirs.server.public, part)
        assert all(a[name].equal(b[name]) for name in a), part
    assert records[0].accuracy is None
    for mine, other in zip(records, their_records, strict=True):
        assert mine._replace(sites_eval={}, bytes_catchup=0) == other._replace(bytes_catchup=0)
    assert list(records[1].sites_eval) == ["client 0", "client 1", "client 2"]
    assert records[1].sites_eval["client 0"]["examples"] == 18
    assert set(records[2].metrics) == {"f1", "balanced-accuracy"}
    assert records[2].bytes_catchup > their_records[2].bytes_catchup  # the downloads of the evaluation
    assert [phase for _, phase in transport.asked].count(EVALUATE) == 6  # rounds 2 and 3


def test_a_site_that_is_away_is_left_out_and_returns(tmp_path):
    experiment, data = hospitals(tmp_path, **{"eval.every": 1})
    transport, lines = Sites(experiment, [data / name for name in sorted(SIZES)]), []
    job = job_of(experiment, None)
    server = FlowerServer(experiment.engine, job, transport, RoundPolicy(0.1, 0.5), lines.append)
    state, first = server.round(server.start())
    transport.away = {1}
    state, second = server.round(state)
    transport.away = set()
    transport.stored.pop(2)  # this one lost its disk
    state, third = server.round(state)
    assert [len(one.sites_eval) for one in (first, second, third)] == [3, 2, 3]
    transport.stored.pop(0)
    request = Request(b"".join(server_download(server, state, 0)), state.clients[0].version, EVALUATE)
    assert "another state" in transport.respond(0, request).error


def server_download(server, state, client: int):

    return [
        Round.open(server.contract, state.server).downloads.messages({client: state.clients[client].version})[client]
    ]


def test_an_evaluation_changes_nothing_that_a_client_stores(tmp_path):
    experiment, data = hospitals(tmp_path)
    transport = Sites(experiment, [data / name for name in sorted(SIZES)])
    server = FlowerServer(experiment.engine, job_of(experiment, None), transport)
    state, _ = play(server, 1)
    before = dict(transport.stored)
    request = Request(server_download(server, state, 0)[0], state.clients[0].version, EVALUATE)
    response = transport.respond(0, request)
    assert response.evaluation.examples == 18
    assert not response.data
    assert transport.stored == before
    store = ClientStore.load(before[0], server.first)
    assert store.response.evaluation is None  # not evaluated in training: the server asks apart


def test_a_stored_response_keeps_its_evaluation(tmp_path):
    experiment, data = hospitals(tmp_path)
    client = Client(experiment.engine, job_in(experiment, data / "north"))
    found = Evaluation(0.5, None, {"f1": 0.25}, 7)
    store = client.fresh(0)._replace(response=Response(b"x", 0.1, 3, evaluation=found))
    assert ClientStore.load(store.dump(client.first), client.first).response == store.response


def test_numbers_of_sites_are_checked_and_bounded():
    def sent(**values):
        return Response(b"", evaluation=Evaluation(0.5, 0.5, {"f1": 0.5}, 10)._replace(**values))

    for bad, why in (
        ({"loss": float("inf")}, "loss inf"),
        ({"examples": 0}, "0 examples"),
        ({"examples": 1 << 60}, f"{1 << 60} examples"),
        ({"accuracy": float("nan")}, "accuracy nan"),
        ({"metrics": {"hit": 1.0}}, "metrics ['hit']"),
    ):
        with pytest.raises(WireError, match=re.escape(why)):
            checked(sent(**bad), ["f1"])
    with pytest.raises(WireError, match="no validation examples"):
        checked(Response(b""), [])
    undefined = checked(sent(metrics={"f1": float("nan")}), ["f1"])
    assert "f1" not in as_numbers(undefined)
    assert in_record(RoundRecord(1, 0.5, None, None, 0, 0, 0, 2, 0.1), [undefined]).metrics == {}
    honest = Evaluation(0.5, 0.5, {"f1": 0.4}, 10)
    record = RoundRecord(1, 0.5, None, None, 0, 0, 0, 3, 0.1)
    found = in_record(record, [honest, honest, Evaluation(1e300, 0.0, {}, 10**8)])
    assert found.test_loss <= 5.0
    assert found.accuracy == pytest.approx(10 / 10020)  # a count of at most 1,000 times the median
    assert found.metrics == {"f1": 0.4}
    assert found.clients_eval["p50"] == 0.5
    assert in_record(record, []) == with_client_evaluations(record, [], None) == record


def write_site(folder: Path, kind: str, rows: int, classes: tuple[str, ...]) -> Path:
    """Records of a site for the template of a kind."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(rows)
    labels = [classes[i % len(classes)] for i in range(rows)]
    if kind == "images":
        for i, label in enumerate(labels):
            (folder / label).mkdir(exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(folder / label / f"{i}.png")
        return folder
    names = {"table": ("age", "dose", "sex", "outcome"), "text": ("text", "label")}[kind]
    with (folder / {"table": "records.csv", "text": "texts.csv"}[kind]).open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        for i, label in enumerate(labels):
            row = (40 + i, "" if i % 7 == 0 else 1.5, "female") if kind == "table" else (f"patient {i} has a fever",)
            writer.writerow([*row, label])
    return folder


CLASSES = {"images": ("benign", "malignant"), "table": ("bad", "good"), "text": ("routine", "urgent")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_template_of_each_kind_trains_as_it_is_written(kind, tmp_path):
    experiment = read_experiment(write_app(tmp_path / "app", kind))
    write_site(tmp_path / "data/a", kind, 20, CLASSES[kind])
    write_site(tmp_path / "data/b", kind, 9, CLASSES[kind][:1])  # one class only
    facts = check_site(experiment, tmp_path / "data/b")
    assert facts["examples_by_class"] == {CLASSES[kind][0]: 9, CLASSES[kind][1]: 0}
    assert facts["examples"] == 9
    assert facts["bytes_up_per_client"] > 4 * facts["parameters"]
    two = replace(experiment, cohort=Cohort(2), task=replace(experiment.task, options=(("clients", 2),)))
    task = build_job(two, tmp_path / "data").task
    assert (task.clients.sizes().tolist(), task.client_names) == ([16, 7], ("a", "b"))


NEEDS_LONG = """\
def needs_long(outputs, targets):
    if not (targets == 2).any():
        raise ValueError("no long stays")
    return 1.0


"""


def test_a_metric_that_is_not_defined_at_a_site_is_left_out_there(tmp_path):
    named = TASK.replace('metrics=("f1", "balanced-accuracy")', 'metrics={"needs_long": needs_long}')
    experiment, data = hospitals(tmp_path, task=named.replace("own = OwnData", f"{NEEDS_LONG}own = OwnData"))
    transport = Sites(experiment, [data / name for name in sorted(SIZES)])
    server = FlowerServer(experiment.engine, job_of(experiment, None), transport)
    state, _ = play(server, 1)
    values = []
    for client in range(3):
        request = Request(server_download(server, state, client)[0], state.clients[client].version, EVALUATE)
        values.append(checked(transport.respond(client, request), ["needs_long"]).metrics)
    assert values == [{"needs_long": 1.0}, {"needs_long": 1.0}, {}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("age,pulse,ward,stay\n71,80,A,endless\n", "row 2: class 'endless' does not occur in the classes of task.py"),
        ("age,pulse,ward,stay\n,80,A,long\n", "row 2 has no value in the column 'age'"),
        ("age,pulse,ward,stay\nold,80,A,long\n", "row 2: column 'age' has 'old', expected a number"),
        ("age,puls,ward,stay\n71,80,A,long\n", "no column 'pulse' (an input named in task.py); did you mean 'puls'?"),
        ("age,pulse,ward\n71,80,A\n", "no column 'stay' (the target named in task.py)"),
        ("age,pulse,ward,stay\n71,,A,long\n", "column 'pulse' has no values to compute its scale"),
        ("age,pulse,ward,stay\n71,80,A,long\n", "has 1 examples, too few to hold out"),
    ],
)
def test_bad_records_are_one_line_with_the_row(rows, message, tmp_path):
    experiment, _ = hospitals(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/stays.csv").write_text(rows)
    with pytest.raises((DataError, ConfigError), match=re.escape(message)) as error:
        check_site(experiment, tmp_path / "bad")
    assert "\n" not in str(error.value)


def test_folders_and_settings_that_do_not_fit_are_refused(tmp_path):
    experiment, data = hospitals(tmp_path)
    with pytest.raises(ConfigError, match="absolute path"):
        job_of(experiment, {"partition-id": 0})
    with pytest.raises(ConfigError, match="absolute path"):
        job_of(experiment, {"data-dir": "north"})
    with pytest.raises(DataError, match="not the folder of a site; expected the file stays"):
        job_of(experiment, {"data-dir": str(data)})
    with pytest.raises(DataError, match=r"3 of its folders .* but task.clients is 2; write --clients 3"):
        build_job(replace(experiment, task=replace(experiment.task, options=(("clients", 2),))), data)
    with pytest.raises(DataError, match="no such folder; write --data-dir FOLDER"):
        build_job(experiment)
    with pytest.raises(ConfigError, match="sites do not have the averaged model"):
        write_app(tmp_path / "averaged", **{"method.evaluate": "average"})
    with pytest.raises(ConfigError, match="is not the task of an `OwnData`"):
        check_site(resolve("fedavg", "digits"), data)
    (tmp_path / "app/federated/task.py").write_text(TASK.replace("hidden, classes)", "hidden, klasses)"))
    with forgotten(), pytest.raises(ConfigError, match=r"task.py, line \d+: NameError"):
        job_of(replace(experiment, seed=1), None)


def test_a_simulation_has_the_clients_of_the_roster(tmp_path):
    experiment, data = hospitals(tmp_path)
    sites = {"west": 0, "south": 2, "north": 1}
    tables = [f'[[sites]]\nname = "{name}"\nkey = "k"\nclients = [{client}]\n' for name, client in sites.items()]
    revoked = f"{tables[0].replace('west', 'east')}revoked = true\n"
    (data / "roster.toml").write_text("\n".join([revoked, *tables]))
    task = build_job(experiment, data).task
    assert list(task.client_names) == ["west", "north", "south"]
    (data / "roster.toml").write_text("sites = 3")
    with pytest.raises(DataError, match=r"roster.toml is not a roster .* copy that of the deployment, or remove it"):
        build_job(experiment, data)


def test_a_model_that_is_not_a_function_of_the_seed_is_refused(tmp_path):
    draw = "self.last = nn.Linear(hidden, classes)\n        self.last.bias.data.fill_(random.random())"
    drawn = "import random\n" + TASK.replace("self.last = nn.Linear(hidden, classes)", draw)
    experiment, data = hospitals(tmp_path, task=drawn)
    with pytest.raises(ConfigError, match="other initial weights each time"):
        check_site(experiment, data / "north")


def test_the_commands(tmp_path, monkeypatch, thinwire):
    monkeypatch.chdir(tmp_path)
    app = ("app", "fedavg", "my-app", "--template", "own-data", "--clients", "3", "--rounds", "2")
    code, out, err = thinwire(*app)
    assert code == 0, err
    assert "my-app/federated/task.py" in out
    (tmp_path / "my-app/federated/task.py").write_text(TASK)
    write_stays(tmp_path / "data")
    code, out, err = thinwire("site", "check", "my-app", "--data-dir", "data/west", "--json")
    assert code == 0, err
    assert json.loads(out)["examples_by_class"]["long"] == 0
    assert "warning" not in json.loads(out)
    (tmp_path / "months").mkdir()
    rows = list(csv.DictReader((tmp_path / "data/north/stays.csv").read_text().splitlines()))
    months = [{**row, "age": 12 * float(row["age"])} for row in rows]
    write_csv(tmp_path / "months/stays.csv", {key: [row[key] for row in months] for key in months[0]})
    warning = json.loads(thinwire("site", "check", "my-app", "--data-dir", "months", "--json")[1])["warning"]
    assert re.match(
        r"column 'age' has mean \d\d\d and .* here, the app states 60 and 20: is it in other units\?$", warning
    )
    code, out, err = thinwire("run", "my-app/federated/experiment.toml", "--data-dir", "data", "--out", "run", "-q")
    assert code == 0, err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["objective"]["name"] == "accuracy"
    assert summary["objective"]["final"] == summary["final_accuracy"] is not None
    for words, message in (
        (("app", "fedavg", "other", "--template", "own"), "--template must be own-data"),
        (("app", "fedavg", "other", "--template", "own-data", "--on", "digits"), "without --on"),
        (("app", "fedavg", "other", "--template", "own-data", "--kind", "sound"), "Known: images, table, text"),
        (("site", "check", "data", "--data-dir", "data/west"), "data is not the folder of an app"),
    ):
        code, _, err = thinwire(*words)
        assert code == 2
        assert message in err
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "other").exists()
