"""Loading of plugins: once, lazily, with one line for a plugin that fails."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from thinwire.core import plugins, registry
from thinwire.core.registry import entries, lookup, register
from thinwire.errors import ConfigError, UnknownName
from thinwire.runs import plugins as experiment_plugins
from thinwire.runs.config import digest, from_table, resolve, to_table

CODEC = """\
from thinwire.codecs import Raw
from thinwire.core.registry import register

@register("codec", "{name}")
class Mine(Raw):
    "A codec of a plugin."
"""


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    """A registry that forgets the plugins of a test, and a folder of modules."""
    for kind in registry.KINDS:
        entries(kind)
    monkeypatch.setattr(registry, "_TABLE", {kind: dict(table) for kind, table in registry._TABLE.items()})
    monkeypatch.setattr(plugins, "_installed", False)
    monkeypatch.setattr(plugins, "_imported", [])
    monkeypatch.setattr(experiment_plugins, "_loaded", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("plug_"):
            del sys.modules[name]


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Write modules and their entry points: `installed(plug_a="source")`."""
    searches = []

    def write(**modules: str) -> list[int]:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        points = [metadata.EntryPoint(name, name, plugins.GROUP) for name in modules]

        def found(group: str):
            searches.append(group)
            return points

        monkeypatch.setattr(plugins.metadata, "entry_points", found)
        return searches

    return write


def test_installed_plugins_are_loaded_once_at_the_first_lookup(installed):
    searches = installed(plug_a=CODEC.format(name="mine"))
    assert "plug_a" not in sys.modules
    assert lookup("codec", "mine").doc == "A codec of a plugin."
    entries("space")
    assert searches == [plugins.GROUP]


def test_a_plugin_may_look_up_names_while_it_is_imported(installed):
    text = CODEC.format(name="mine") + "from thinwire.core.registry import entries\nassert 'topk' in entries('codec')\n"
    installed(plug_a=text)
    assert "mine" in entries("codec")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('no\\nluck')", "RuntimeError: no luck"),
        ("import absent_module", "it needs the module 'absent_module', which is not installed"),
        (CODEC.format(name="topk"), "codec 'topk' is already registered by thinwire"),
        ("from thinwire.core.registry import register\nregister('codex', 'x')(dict)", "unknown kind of part 'codex'"),
    ],
)
def test_a_plugin_that_fails_is_left_out_with_one_line_and_the_others_work(installed, text, message):
    ours = lookup("codec", "topk").make
    plugins._installed = False
    installed(plug_bad=CODEC.format(name="half") + text, plug_good=CODEC.format(name="good"))
    with pytest.warns(UserWarning, match="plug_bad") as caught:
        found = entries("codec")
    (line,) = (str(warning.message) for warning in caught)
    assert line.startswith("plugin 'plug_bad' of the package ")
    assert message in line
    assert "\n" not in line
    assert found["topk"].make is ours
    assert "good" in found
    assert "half" not in found, "the registrations of a failed plugin are undone"


def test_load_imports_a_module_once_and_refuses_one_that_fails(tmp_path):
    (tmp_path / "plug_a.py").write_text(CODEC.format(name="mine") + "print('imported')\n")
    experiment_plugins.load_plugins(["plug_a"])
    experiment_plugins.load_plugins(["plug_a"])
    assert experiment_plugins.loaded() == ("plug_a",)
    assert "mine" in entries("codec")
    (tmp_path / "plug_b.py").write_text(CODEC.format(name="raw"))
    with pytest.raises(
        ConfigError, match=r"'plug_b' cannot be imported as a plugin: .*plug_b.py, .*codec 'raw' is already registered"
    ):
        experiment_plugins.load_plugins(["plug_b"])
    with pytest.raises(ConfigError, match="there is no module 'plug_absent'; install its package"):
        experiment_plugins.load_plugins(["plug_absent"])
    assert experiment_plugins.loaded() == ("plug_a",)


def test_loaded_modules_are_part_of_an_experiment_but_not_of_its_digest(tmp_path):
    plain = resolve("fedavg")
    (tmp_path / "plug_a.py").write_text(CODEC.format(name="mine"))
    experiment_plugins.load_plugins(["plug_a"])
    experiment = resolve("fedavg")
    assert (plain.imports, experiment.imports) == ((), ("plug_a",))
    assert digest(experiment) == digest(plain)
    assert "import" not in to_table(plain)
    assert from_table(to_table(experiment)) == experiment
    file = tmp_path / "my.toml"
    file.write_text('import = ["plug_a"]\n[method]\nup = "mine"\n')
    assert resolve(str(file)).imports == ("plug_a",)
    file.write_text("import = [3]\n")
    with pytest.raises(ConfigError, match="import must be a list of modules"):
        resolve(str(file))


def test_register_refuses_an_unknown_kind():
    with pytest.raises(UnknownName, match="unknown kind of part 'codecs': did you mean 'codec'"):
        register("codecs", "mine")


def test_slots_of_the_table_are_fields_of_method():
    import dataclasses

    from thinwire.protocol.method import Method

    fields = {field.name for field in dataclasses.fields(Method)}
    assert set(registry.SLOTS) <= fields
    for kind in registry.KINDS.values():
        assert bool(kind.contract) == bool(kind.slots)
        if kind.contract:
            assert kind.contract_type().__name__ == kind.contract.rpartition(".")[2]
