"""Every command of the README and of the quick start is run, in the order of the pages, with fewer rounds."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file

import thinwire as tw

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs/quickstart.md")
FILE = re.compile(r"^`([\w/.-]+)`:\n\n```\w+\n(.*?)^```\n", re.S | re.M)  # a file of a page, and its contents
FEW = ("--clients", "4", "--cohort", "2", "--set", "local.epochs=1", "--set", "local.batch=32")
SMALLER = {
    "run": ("--rounds", "1", *FEW),
    "compare": ("--rounds", "1", *FEW),
    "tune": ("--rounds", "2", "--rates", "2", *FEW),
    "sweep": ("--rounds", "1", "--seeds", "1", *FEW),
    "watch": ("--once",),
}
# Commands that need minutes, other packages or a finished run of another kind, and the test that runs each.
OTHER_TESTS = {
    "thinwire deploy": "tests/flower/test_deploy.py::test_deployment_equals_the_simulation",
    "thinwire export": "tests/test_pretrained.py::test_a_run_writes_an_adapter_that_peft_loads",
    "python -m papers list": "papers/tests/test_page.py::test_verbs_list_and_reproduce_tables",
    "make test": "tests/test_readme.py",
    "make test-slow": "tests/flower/test_deploy.py",
    "make site": "tests/test_site.py",
    "make dist": "tests/test_packaging.py::test_packages_work_in_an_empty_environment",
    "python examples/compare_on_your_data.py": "tests/test_docs.py::test_csv_example_writes_a_page",
}


def commands(page: Path) -> list[str]:
    """The lines of shell blocks, and commands in the text of a page."""
    text = page.read_text()
    blocks = [inside for kind, inside in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M) if not kind]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    inline = [" ".join(code.split()) for code in re.findall(r"`((?:thinwire|make|pip|python) [^`]+)`", prose)]
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()] + inline


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile, as one would type them."""
    lines = (ROOT / "Makefile").read_text().split(f"\n{target}:")[1].splitlines()[1:]
    own = [
        line.strip() for line in lines[: next((i for i, line in enumerate(lines) if not line.startswith("\t")), None)]
    ]
    return [line.replace("$(BIN)/python -m pip", "pip").replace(" --quiet", "").replace("$(BIN)/", "") for line in own]


def plain(command: str) -> str:
    """A command without the folder of the virtual environment."""
    return command.replace(".venv/bin/", "")


def test_install_commands_are_those_of_the_makefile():
    """`make test` runs them in a fresh virtual environment."""
    known = recipe("$(VENV)/installed")
    for page in PAGES:
        given = [plain(line) for line in commands(page) if re.match(r"\.venv/bin/pip install", line)]
        assert given
        assert set(given) <= set(known)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in (line for page in PAGES for line in commands(page) if line.startswith("pip install")):
        name = shlex.split(line)[-1]
        extra = re.fullmatch(r"thinwire\[(\w+)\]", name)
        assert extra[1] in extras if extra else any(one.startswith(name) for one in extras["data"]), line


def test_every_command_runs(thinwire):
    """Nothing is left out: a command of an unknown kind fails."""
    for name, content in FILE.findall((ROOT / "docs/quickstart.md").read_text()):
        Path(name).write_text(content)
    done = set()
    for line in (line for page in PAGES for line in commands(page)):
        if line in done or any(plain(line).startswith(known) for known in OTHER_TESTS):
            continue
        done.add(line)
        if re.match(r"python3\.11 -m venv|\. \.venv/bin/activate|(\.venv/bin/)?pip install", line):
            continue  # the test above
        if line == "make demo":
            (line,) = recipe("demo")
        verb, *words = shlex.split(line)[1:]
        assert line.startswith("thinwire "), f"no test runs {line!r}"
        if verb == "app":
            shutil.rmtree("my-app", ignore_errors=True)
        more = ("--seeds", "2") if "--seeds" in words else ()
        more = ("--seeds", "1", "--tune-rates", "2", "--rounds", "2") if "--tune" in words else more
        smaller = SMALLER.get(verb, ())
        if any(".py:" in word for word in words):  # a task of one's own has its own clients
            smaller = (*smaller[:2], *FEW[4:]) if smaller else ()
        code, out, err = thinwire(verb, *words, *smaller, *more)
        assert code == 0, f"{line}: exit code {code}\n{err}"
        assert out or err, line
    assert len(done) > 20
    assert Path("demo.html").stat().st_size > 1000
    assert Path("my-app/pyproject.toml").is_file()
    network = tw.models.build("mlp", inputs=64, classes=10)
    network.load_state_dict(load_file("runs/first/model.safetensors"))


def test_deploy_without_flower_names_the_package_to_install(thinwire):
    if find_spec("flwr") is None:
        code, _, err = thinwire("deploy", "mapo", "--on", "digits", "--nodes", "4")
        assert code == 2
        assert "pip install 'thinwire[flower]'" in err
