"""References: which texts are one, what they import, and one line for everything that fails."""

from __future__ import annotations

import sys

import pytest

from tests.own_code import forgotten
from thinwire.core.reference import in_folder, is_reference, load_file, load_reference, short_name
from thinwire.core.registry import lookup
from thinwire.errors import ConfigError, UnknownName


@pytest.fixture(autouse=True)
def _forgotten():
    with forgotten():
        yield


@pytest.mark.parametrize(
    "text", ["my.py:task", "/a b/my.py:Net.of", "../my.py:x", "package.module:task", "C:\\x\\my.py:task"]
)
def test_references(text):
    assert is_reference(text)


@pytest.mark.parametrize(
    "text", ["digits", "mapo+int8", "a.toml", "own:letters-0123abcd", "0.5:1", "my.py", "", ":", "a:"]
)
def test_other_texts(text):
    assert not is_reference(text)


def test_paths_are_absolute_in_files_and_short_for_readers(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    folder = tmp_path.resolve()
    assert in_folder("my.py:task", tmp_path / "link") == f"{folder}/my.py:task"
    assert in_folder("codec.py", tmp_path) == f"{folder}/codec.py"
    assert in_folder("package.module:task", tmp_path) == "package.module:task"
    assert [short_name(text) for text in ("/a/my.py:x", "/a/my.py", "p.m:x")] == ["my.py:x", "my.py", "p.m:x"]


def test_a_file_is_imported_once_and_imports_files_beside_it(tmp_path):
    (tmp_path / "beside_me.py").write_text("count = []\n")
    (tmp_path / "mine_once.py").write_text("import beside_me\nbeside_me.count.append(1)\nclass A:\n    b = 7\n")
    name = f"{tmp_path}/mine_once.py:A.b"
    assert load_reference(name) == 7
    assert load_file(tmp_path / "mine_once.py") is sys.modules["mine_once"]
    assert len(sys.modules["beside_me"].count) == 1


def test_files_of_one_name_in_two_folders_and_with_the_name_of_an_installed_module(tmp_path):
    for number, name in enumerate(("one/mine_two.py", "two/mine_two.py", "one/json.py", "one/dash-ed.py")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"value = {number}\n")
        assert load_reference(f"{tmp_path / name}:value") == number
    assert hasattr(sys.modules["json"], "dumps")


def test_objects_of_modules_and_parts_by_reference():
    assert load_reference("thinwire.codecs.sparse:TopK").__name__ == "TopK"
    found = lookup("metric", "thinwire.metrics.classification:in_shape")
    assert found.name == "in_shape"
    with pytest.raises(ConfigError, match="is of type int; a codec is a class or a function"):
        lookup("codec", "thinwire.core.text:LONGEST")


MISTAKES = {
    "": (":task", "unknown name in .*mine.py 'task'"),
    "taks = 1\nimport os": (":task", r"unknown name in .*mine.py 'task': did you mean 'taks'\? Known: taks$"),
    "x = 1\ndef f(:": (":f", r"mine.py, line 2: SyntaxError: invalid syntax$"),
    "import torch\n\nimport absent_module": (
        ":f",
        "mine.py, line 3: it needs the module 'absent_module', which is not installed",
    ),
    "def f():\n    return 1 / 0\nf()": (":f", "mine.py, line 2: ZeroDivisionError: division by zero$"),
    "raise ValueError('two\\nlines')": (":f", "mine.py, line 1: ValueError: two lines$"),
    "import sys\nsys.exit(3)": (":f", "mine.py, line 2: it ends Python"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_a_file_are_one_line(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    name, message = MISTAKES[text]
    with pytest.raises(ConfigError, match=message) as caught:
        load_reference(f"{tmp_path}/mine.py{name}")
    assert "\n" not in str(caught.value)
    assert "mine" not in sys.modules or text in ("", "taks = 1\nimport os")


def test_a_file_or_module_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"there is no file absent.py; write the path of a Python file"):
        load_reference("absent.py:task")
    with pytest.raises(ConfigError, match=r"there is no module 'absent_package'; install its package, add its folder"):
        load_reference("absent_package.tasks:task")
    with pytest.raises(ConfigError, match=r"there is no module 'thinwire.absent'"):
        load_reference("thinwire.absent:task")
    with pytest.raises(UnknownName, match="did you mean 'is_file'"):
        load_reference("thinwire.core.reference:is_fil")
