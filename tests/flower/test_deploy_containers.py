"""`deploy/compose.yaml` and the Helm chart: schemas, commands, secrets; and the services of the file, as sandboxes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from tests.flower.test_deploy_folder import ROOT
from thinwire.cli.app import app
from thinwire.flower.app_folder import _PYPROJECT
from thinwire.flower.local import Processes, listens, make_certificate
from thinwire.flower.policy import RoundPolicy
from thinwire.runs.toml import loads, read_toml

yaml = pytest.importorskip("yaml")

COMPOSE, CHART = ROOT / "deploy/compose.yaml", ROOT / "deploy/helm/thinwire"
VALUES = "server.enabled=true,site.enabled=true,site.name=north,site.superlink=server.example:443,site.data=records"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
FILES = {"server.pem", "server.key", "ca.pem", "roster.toml", "north", "key"}  # of operators, in /etc/thinwire


def tool(name: str) -> str:
    """A program of the extra `deploy`."""
    return shutil.which(name, path=PATH) or pytest.skip(f"no {name}")


def called(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command that has ended."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def services() -> dict[str, dict]:
    """The services of the compose file, with its default values."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text()))["services"]


def chart() -> list[dict]:
    """The objects of the chart, as the real helm renders them."""
    command = [tool("helm"), "template", "trial", str(CHART), "--set", VALUES]
    return list(yaml.safe_load_all(called(command).stdout))


def containers() -> list[dict]:
    """The containers of the chart."""
    pods = [one["spec"]["template"]["spec"] for one in chart() if one["kind"] in ("Job", "StatefulSet")]
    return [one for pod in pods for one in pod["initContainers"] + pod["containers"]]


def commands(where: str) -> list[list[str]]:
    """The words of all commands; those of our image without an entry point begin with `thinwire`."""
    if where == "compose":
        return [[*one.get("entrypoint", ["thinwire"]), *one["command"]] for one in services().values()]
    return [[*one.get("command", ["thinwire"]), *one.get("args", [])] for one in containers()]


@pytest.mark.parametrize("where", ["compose", "helm"])
def test_commands_exist_and_are_parsed(where):
    assert read_toml(CHART / "files/config.toml")["superlink"].keys() == {"mine"}
    seen = set()
    for program, *words in commands(where):
        text = " ".join(words)
        mounted = {*re.findall(r"/etc/(?:proxy|flower)/([\w.-]+)", text)}
        assert all((CHART / "files" / name).is_file() for name in mounted)
        assert {*re.findall(r"/etc/thinwire/([\w.-]+)", text)} <= {*FILES, "apps", "trial"}
        if program == "thinwire":
            verb = get_command(app).commands[words[0]].commands[words[1]]
            seen.add(words[1])
        if program == "thinwire" and words[1] == "supervise":
            values = verb.make_context("supervise", words[2:]).params
            assert (values["connection"], str(values["run_dir"])) == ("mine", "/var/lib/thinwire/runs/first")
            (line,) = values["config"]
            config = loads(line.replace(" ", "\n"), "-c")
            assert config.keys() <= {*re.findall(r"^([a-z-]+) =", _PYPROJECT.partition("app.config]")[2], re.M)}
            assert RoundPolicy.of(config).grace == 10.0
        elif program == "thinwire":
            context = verb.make_context("start", words[2:])
            assert str(context.params["app"]) in ("/etc/thinwire/trial", "/app")
            config = [one.partition("=")[2] for one in context.args if one.startswith("--node-config")]
            assert loads(config[0].replace(" ", "\n"), "").keys() == {"site", "data-dir", "state-dir"}
            flower = pytest.importorskip("flwr.supernode.cli.flower_supernode")
            flower._parse_args_run_supernode().parse_args(context.args)
        elif program == "flower-superlink":
            flower = pytest.importorskip("flwr.superlink.cli.flower_superlink")
            parsed = flower._parse_args_run_superlink().parse_args(words)
            assert (parsed.host, parsed.enable_supernode_auth) == ("127.0.0.1", True)
            assert not parsed.runtime_dependency_install
        else:
            assert program in ("sh", "python", "nginx", "sleep")
    assert seen == {"supervise", "start"}


def test_containers_have_few_rights_and_no_secret():
    for name, one in services().items():
        assert (one["read_only"], one["user"], one["cap_drop"]) == (True, "10001:10001", ["ALL"]), name
        assert "environment" not in one, name
        assert name in ("pod", "setup") or (one["restart"] and one["deploy"]["resources"]["limits"]["memory"])
    files = [COMPOSE, *(file for file in CHART.rglob("*") if file.is_file())]
    assert not any(re.search("PRIVATE KEY|BEGIN CERT|ecdsa-sha2|password", file.read_text()) for file in files)


def test_chart_is_valid(tmp_path):
    done = called([tool("helm"), "lint", "--strict", str(CHART), "--set", VALUES])
    assert done.returncode == 0, done.stdout
    kinds = [one["kind"] for one in chart()]
    assert sorted(kinds) == ["ConfigMap", "Job", "PersistentVolumeClaim", "Service", "StatefulSet"]
    for one in containers():
        rights = one["securityContext"]
        assert rights["readOnlyRootFilesystem"], one["name"]
        assert not rights["allowPrivilegeEscalation"], one["name"]
        assert one["resources"]["limits"]["memory"], one["name"]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(chart()))
    command = [tool("kubernetes-validate"), "--strict", str(tmp_path / "all.yaml")]
    done = called(command)
    assert done.returncode == 0, done.stdout + done.stderr
    done = called([tool("helm"), "template", str(CHART), "--set", "site.enabled=true"])
    assert "site.name is the name of the site on the roster" in done.stderr


def test_compose_file_is_valid():
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = called(command)
    assert done.returncode == 0, done.stdout + done.stderr


def sandbox(service: dict, volumes: dict[str, Path]) -> list[str]:
    """A service as a command of bubblewrap: its mounts, its user, no other folder that can be written."""
    words = ["bwrap", "--die-with-parent", "--unshare-user", "--uid", "10001", "--gid", "10001", "--new-session"]
    words += ["--unshare-pid"] * ("nginx" in service.get("entrypoint", ()))  # its workers end with it
    for path in ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc/ssl", "/etc/ld.so.cache"):
        words += ["--ro-bind-try", path, path]
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += [word for path in service["tmpfs"] for word in ("--tmpfs", path)]
    for path in {str(ROOT), sys.prefix, sys.base_prefix}:
        words += ["--ro-bind", path, path]
    for volume in service.get("volumes", []):
        source, target, *ro = volume.split(":")
        words += ["--ro-bind" if ro else "--bind", str(volumes[source]), target]
    files = {"flower": "config.toml", "proxy": "nginx.conf"}
    for one in service.get("configs", []):
        words += ["--ro-bind", str(CHART / "files" / files[one["source"]]), one["target"]]
    home = "/var/lib/thinwire"
    words += [word for path in (home, "/var/log/nginx") for word in ("--dir", path)]
    words += ["--remount-ro", "/", "--chdir", home, "--clearenv"]
    env = {"PATH": PATH, "HOME": home, "FLWR_HOME": f"{home}/flwr", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    words += [word for key, value in env.items() for word in ("--setenv", key, value)]
    return [*words, *service.get("entrypoint", [sys.executable, "-m", "thinwire"]), *service["command"]]


@pytest.mark.slow
def test_services_train_in_sandboxes_that_write_nowhere_else(tmp_path):
    pytest.importorskip("flwr")
    from tests.flower.test_three_hospitals import write_records

    assert tool("bwrap")
    assert tool("nginx")
    if any(map(listens, (8000, 8443, 9094))):
        pytest.skip("a port is taken")
    found, (home, etc, data) = services(), (tmp_path / name for name in ("home", "etc", "data"))
    write_records(data, 40)
    for folder in (home, etc / "apps", tmp_path / "server", tmp_path / "site"):
        folder.mkdir(parents=True)
    volumes = {"server": tmp_path / "server", "site": tmp_path / "site", "/etc/thinwire": etc, "/data/records": data}
    found["site"]["command"][3] = "--superlink=127.0.0.1:8443"
    with Processes(home, None) as processes:

        def thinwire(*words: str) -> None:
            command = [sys.executable, "-m", "thinwire", *words]
            subprocess.run(command, cwd=etc, env=processes.env, check=True, timeout=600)

        def start(name: str):
            return processes.start(name, sandbox(found[name], volumes))

        def until(port: int, name: str) -> None:
            end = time.monotonic() + 120
            while not listens(port):
                assert time.monotonic() < end, processes.log_tail(name)
                time.sleep(0.2)

        template = ("--template", "own-data", "--kind", "table", "--clients", "1", "--cohort", "1", "--rounds", "2")
        thinwire("app", "fedavg", "trial", *template)
        shutil.copytree(etc / "trial", etc / "apps/first")
        make_certificate(processes)
        for old, new in (("server.pem", "server.pem"), ("server.key", "server.key"), ("server.pem", "ca.pem")):
            shutil.copy(home / old, etc / new)
        thinwire("site", "key", "north")
        thinwire("site", "add", "north", "north.pub", "--roster", "roster.toml")
        assert start("setup").wait(60) == 0, processes.log_tail("setup")
        start("superlink")
        until(8000, "superlink")
        register = {**found["setup"], "volumes": found["superlink"]["volumes"]}
        register |= {"entrypoint": ["flwr"], "command": ["supernode", "register", "/etc/thinwire/north.pub", "mine"]}
        processes.call(sandbox(register, volumes))
        start("proxy")
        until(8443, "proxy")
        start("site")
        until(9094, "site")
        for name, service in found.items():
            if name in ("superlink", "site"):  # their health checks
                subprocess.run([sys.executable, *service["healthcheck"]["test"][2:]], check=True)
        supervise = start("supervise")
        assert supervise.wait(300) == 0, processes.log("supervise")
        lines = {name: processes.log(name) for name in ("superlink", "proxy", "site", "supervise")}
    rounds = (tmp_path / "server/runs/first/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clients"] for line in rounds] == [1, 1], lines
    assert any("introduced as site north" in line for line in lines["site"])
    assert not any("Read-only" in line or "Traceback" in line for log in lines.values() for line in log), lines
