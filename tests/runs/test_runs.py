"""Run directories: their files, resumed runs, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.federation import keeps_nothing
from thinwire.core.tree import same
from thinwire.errors import CheckpointError
from thinwire.federation.job import RunState
from thinwire.protocol.ledger import Ledger, Window
from thinwire.protocol.state import ClientState, PublicState, ServerState, SyncCounts
from thinwire.runs.checkpoint import Checkpoint, load_checkpoint, rounds_in, save_checkpoint
from thinwire.runs.config import from_table, resolve
from thinwire.runs.execute import execute
from thinwire.runs.run_directory import RunFolder
from thinwire.runs.toml import loads

QUICK = {"rounds": 4, "checkpoint.every": 2, "local.epochs": 1}


def quick(**overrides):
    return resolve("fedavg", overrides={**QUICK, **overrides})


def metrics(folder: Path) -> list[dict]:
    """The lines of a run without `seconds`, which differs between equal runs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_a_run_directory_holds_all_files(tmp_path):
    summary = execute(quick(), tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {
        ".lock",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "model.safetensors",
        "SHA256SUMS",
        "checkpoints",
    }
    assert json.loads((tmp_path / "run/summary.json").read_text()) == summary
    keys = {"method", "task", "seed", "rounds", "parameters", "trainable", "final_accuracy", "best_accuracy"}
    assert keys | {"bytes_up", "bytes_down", "bytes_catchup", "bytes_total", "seconds"} <= summary.keys()
    lines = metrics(tmp_path / "run")
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert {"loss", "accuracy", "bytes_up", "bytes_down", "bytes_catchup", "clients"} <= lines[0].keys()
    for way in ("up", "down", "catchup"):
        assert summary[f"bytes_{way}"] == sum(line[f"bytes_{way}"] for line in lines)
    assert summary["bytes_total"] == summary["bytes_up"] + summary["bytes_down"] + summary["bytes_catchup"]
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["clients_trained_by"] == "vmap"
    assert environment["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    "overrides",
    [
        {"method.server_opt.momentum": 0.9, "method.evaluate": "average"},
        {"method.schedule.private": ["*.bias"], "method.download": "full"},
        {"method.space": {"kind": "mapo", "k": 8, "redraw_every": 2}, "cohort.size": 2, "task.clients": 6},
        {"method.client_opt.momentum": 0.9, "method.client_weight": "uniform", "engine.backend": "loop"},
        {"method.schedule": {"kind": "fedlama", "phi": 2}, "method.client_opt.momentum": 0.5},
    ],
)
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, overrides):
    execute(quick(**overrides), tmp_path / "whole")

    def stop(record):
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(quick(**overrides), tmp_path / "cut", on_round=stop)
    with pytest.raises(CheckpointError, match="thinwire resume"):
        execute(quick(**overrides), tmp_path / "cut")
    summary = execute(quick(**overrides), tmp_path / "cut", resume=True)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert summary["bytes_total"] == sum(
        line["bytes_up"] + line["bytes_down"] + line["bytes_catchup"] for line in metrics(tmp_path / "whole")
    )


def test_one_run_has_the_honest_and_the_ideal_total(tmp_path):
    space = {"kind": "mapo", "k": 8, "redraw_every": 3}
    known = {"method.space": space, "cohort.size": 2, "task.clients": 9, "rounds": 6}
    found = execute(quick(**known), tmp_path / "run")
    assert found["bytes_catchup"] > 0
    assert found["bytes_total"] == found["bytes_total_honest"] == found["bytes_total_ideal"] + found["bytes_catchup"]
    config = tmp_path / "run/config.toml"
    text = config.read_text()
    config.write_text(text.replace("rounds = 6\n", 'rounds = 6\naccounting = "honest"\n'))
    assert RunFolder.open(tmp_path / "run").experiment == from_table(loads(text, "config.toml")), "of earlier versions"


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(CheckpointError, match="not a run directory"):
        execute(quick(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_flipped_bit_in_a_checkpoint_is_detected(tmp_path, suffix):
    execute(quick(), tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    file = tmp_path / f"run/checkpoints/round-000004.{suffix}"
    data = bytearray(file.read_bytes())
    for position in (0, len(data) // 2, len(data) - 3):
        flipped = bytearray(data)
        flipped[position] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError) as error:
            execute(quick(), tmp_path / "run", resume=True)
        assert "round-000004" in str(error.value)
        assert "\n" not in str(error.value)
    assert "continue from round 2" in str(error.value)


def test_after_removing_a_damaged_checkpoint_the_run_continues_from_the_one_before(tmp_path):
    execute(quick(), tmp_path / "whole")
    execute(quick(), tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    (tmp_path / "run/checkpoints/round-000004.json").unlink()
    execute(quick(), tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_checkpoint_restores_every_part_of_the_state(tmp_path):
    def tree(prefix):
        return {f"{prefix}.{i}": torch.randn(3 + i) for i in (1, 0)}  # not in alphabetical order

    public = PublicState(7, tree("base"), tree("coords"), tree("shared"), tree("buffers"))
    past = (Window(1, 3, (), b"end of the window"), Window(3, 5, (b"x", b"yz"), b""))
    ledger = Ledger(7, 5, (b"abc", b""), past, {"coords.1": 7}, adds_since=6)
    server = ServerState(
        public, {"momentum": tree("opt"), "second": tree("opt")}, tree("corr"), tree("sched"), tree("codec"), ledger
    )
    kept = ClientState(6, tree("unsent"), tree("control"), tree("residual"), {"momentum": tree("velocity")})
    clients = {12: kept, 3: ClientState(2)}
    sync_counts = SyncCounts({"coords.1": 7}, None)
    state = RunState(9, server, clients, (12, 3), "loop", "because", sync_counts, 5)
    save_checkpoint(tmp_path, Checkpoint(state, tree("best"), "lines"), "digest")
    back, best, lines = load_checkpoint(tmp_path, "digest")
    assert (set(best), lines) == ({"best.0", "best.1"}, "lines")
    for name in ("base", "coords", "shared", "buffers"):
        mine, theirs = getattr(public, name), getattr(back.server.public, name)
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[block], theirs[block]) for block in mine)
    for name in ("correction", "schedule", "codec"):
        mine, theirs = getattr(server, name), getattr(back.server, name)
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[block], theirs[block]) for block in mine)
    assert list(back.server.opt) == ["momentum", "second"]
    assert all(same(back.server.opt[slot], server.opt[slot]) for slot in server.opt)
    assert back.server.ledger == ledger
    assert (back.round, back.cohort, back.backend, back.backend_reason) == (9, (12, 3), "loop", "because")
    assert keeps_nothing(back.clients[3])
    assert back.clients[12].version == 6
    for name in ("unsent", "correction", "codec"):
        assert same(getattr(back.clients[12], name), getattr(kept, name))
    assert same(back.clients[12].opt["momentum"], kept.opt["momentum"])
    assert back.sync_counts == sync_counts
    with pytest.raises(CheckpointError, match="another configuration"):
        load_checkpoint(tmp_path, "other")


def test_the_newest_two_checkpoints_are_kept(tmp_path):
    execute(quick(**{"checkpoint.every": 1}), tmp_path / "run")
    assert rounds_in(tmp_path / "run/checkpoints") == [3, 4]
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 4


def test_the_saved_model_loads_into_a_plain_module(tmp_path):
    from thinwire.models import build

    execute(quick(), tmp_path / "run")
    build("mlp").load_state_dict(load_file(tmp_path / "run/model.safetensors"))
