"""Pinned apps: what the server sends is compared, never run; data are loaded once."""

from __future__ import annotations

import io
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.flower.app_folder import write_app
from thinwire.flower.node import LONGEST_PROJECT, PinnedApp, app_bundle, files_of, pin
from thinwire.runs.config import resolve

PROJECT = b'[project]\nname = "a"\nversion = "1"\n'
FILES = {"pyproject.toml": PROJECT, "pkg/task.py": b"x = 1\n", "pkg/client_app.py": b"app = None\n"}


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in files.items():
            bundle.writestr(name, data)
    return buffer.getvalue()


@pytest.fixture
def pinned() -> PinnedApp:
    return PinnedApp(Path("/app"), "the app", files_of(zipped(FILES)))


def test_the_same_files_are_the_same_app(pinned):
    assert pinned.choose(zipped(FILES)) == "the app"
    again = {**FILES, "pyproject.toml": b'project = {version = "1", name = "a"}', ".info/CONTENT": b"made by Flower"}
    assert pinned.difference(zipped(dict(reversed(again.items())))) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pkg/task.py": b"x = 2\n"}, "it has another pkg/task.py"),
        ({"pkg/task.py": b"x = 1\n" * 1000}, "it has another pkg/task.py"),
        ({"pkg/task.py": bytes(2 * LONGEST_PROJECT)}, "it cannot be read (its files have 2,000,"),
        ({"pkg/more.py": b""}, "it has another pkg/more.py"),
        ({"pkg/\x1b[31m.py": b"x"}, "it has another pkg/\\x1b[31m.py"),
        ({"pyproject.toml": PROJECT + b"dependencies = ['x']\n"}, "it has another pyproject.toml"),
        ({"pyproject.toml": b"not TOML"}, "it cannot be read"),
        ({f"pkg/{i}.py": b"" for i in range(9)}, "it has another pkg/0.py, pkg/1.py, pkg/2.py, "),
    ],
)
def test_every_difference_is_named(change, words, pinned):
    assert words in pinned.difference(zipped({**FILES, **change}))
    assert callable(pinned.choose(zipped({**FILES, **change})))


def test_missing_files_and_damaged_bundles_are_another_app(pinned):
    bundle = zipped(FILES)
    assert pinned.difference(zipped({"pyproject.toml": PROJECT})) == "it has another pkg/client_app.py, pkg/task.py"
    for damaged in (b"", b"PK", bundle[:-40], bundle[:60] + bytes(10) + bundle[70:]):
        assert pinned.difference(damaged)


@pytest.fixture
def clean_imports(monkeypatch):
    """The app's package is imported as `federated`; other tests import their own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {name for name in sys.modules if name.split(".")[0] == "federated"}
    yield
    for name in {name for name in sys.modules if name.split(".")[0] == "federated"} - before:
        del sys.modules[name]


def app_with_counter(folder: Path) -> Path:
    """An app that counts how often it loads its data, in the file `loads` beside its folder."""
    quick = {"task.clients": 2, "cohort.size": 2, "local.steps": 1, "rounds": 1}
    write_app(resolve("fedavg", "digits", quick), folder)
    task = folder / "federated/jobs.py"
    count = f"    with Path({str(folder) + '.loads'!r}).open('a') as file:\n        file.write('x')\n"
    text = task.read_text().replace("    return job_of(", f"{count}    return job_of(")
    task.write_text(text)
    return folder


def test_a_pinned_app_loads_once_and_refuses_another(tmp_path, monkeypatch, capsys, clean_imports):
    flwr = pytest.importorskip("flwr.app")
    known = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(known, name, value)
    from thinwire.flower.grid_transport import Question, Task, pack, unpack
    from thinwire.flower.sites import Report

    config = {"partition-id": 0, "num-partitions": 1}
    app = pin(app_with_counter(tmp_path / "app"), config)
    loads = Path(f"{tmp_path}/app.loads")
    assert loads.read_text() == "x"
    copy = shutil.copytree(tmp_path / "app", tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    bundle = app_bundle(copy)
    assert app.choose(bundle) is app.app

    def ask(bundle: bytes, kind: str):
        context = flwr.Context(run_id=1, node_id=2, node_config=config, state=flwr.RecordDict(), run_config={})
        content = Question("0" * 16) if kind == "query" else Task("0" * 16, 0, 0, "", b"")
        message = flwr.Message(pack(content), dst_node_id=2, message_type=kind)
        return app.choose(bundle)(message, context)

    assert unpack(Report, ask(bundle, "query").content).clients == (0, 1)
    assert loads.read_text() == "x"  # the data of the first load

    (copy / "federated/jobs.py").write_text("raise SystemExit('code of the server')\n")
    refusal = unpack(Report, ask(app_bundle(copy), "query").content).refusal
    assert "this node runs only its own app" in refusal
    assert "it has another federated/jobs.py" in refusal
    assert unpack(Report, ask(app_bundle(copy), "train").content).refusal == refusal
    printed = capsys.readouterr().out.splitlines()
    assert (
        printed == [f"refused: the server sent another app than {tmp_path}/app: it has another federated/jobs.py"] * 2
    )


def test_folders_that_are_no_apps_are_refused_in_one_line(tmp_path, clean_imports):
    with pytest.raises(ConfigError, match=r"has no pyproject\.toml"):
        pin(tmp_path / "missing", {})
    pytest.importorskip("flwr")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\n')
    with pytest.raises(ConfigError, match=r"cannot be loaded: .* Missing \[tool\.flwr\.app\] section"):
        pin(tmp_path, {})
    app = app_with_counter(tmp_path / "app")
    (app / "federated/client_app.py").write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match=r"the app .* cannot be loaded: ModuleNotFoundError: No module") as error:
        pin(app, {"partition-id": 0, "num-partitions": 1})
    assert "\n" not in str(error.value)
