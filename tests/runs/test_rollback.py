"""`thinwire resume --from` and `--rounds`: runs that go back by hand, and runs that are given more rounds."""

from __future__ import annotations

import json

from thinwire.runs.records import read_run, rounds_in


def test_a_run_goes_back_and_continues_with_the_same_bits(thinwire, tmp_path):
    settings = ("checkpoint.every=1", "checkpoint.keep=3", "local.epochs=1", "task.clients=4", "cohort.size=2")
    sets = [part for one in settings for part in ("--set", one)]
    assert thinwire("run", "scaffold", "--on", "digits", "--rounds", "5", *sets, "--out", "run", "-q")[0] == 0
    run = tmp_path / "run"
    model, before = (run / "model.safetensors").read_bytes(), read_run(run)
    assert rounds_in(run / "checkpoints") == [3, 4, 5]
    code, _, err = thinwire("resume", "run", "--from", "2")
    assert code == 2
    assert "has no checkpoint of round 2; it has 3, 4, 5" in err
    assert (run / "summary.json").is_file(), "nothing was changed"
    code, _, err = thinwire("resume", "run", "--from", "3")
    assert code == 0, err
    assert "is back at round 3: 2 rounds and " in err
    assert "run goes on after round 3 of 5" in err
    assert (run / "model.safetensors").read_bytes() == model
    after = read_run(run)
    lost = sum(one["bytes_up"] + one["bytes_down"] + one["bytes_catchup"] for one in before.records[3:])
    assert [one["bytes_abandoned"] for one in after.records] == [0, 0, 0, lost, 0]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["bytes_total_honest"] == before.totals["bytes_total_honest"] + lost
    assert "round 5 rolled back: back to round 3" in thinwire("show", "run")[1]
    row = json.loads(thinwire("report", "run", "--html", "page.html", "--json")[1])[0]
    assert (row["bytes_abandoned"], row["bytes_total_honest"]) == (lost, summary["bytes_total_honest"])
    page = (tmp_path / "page.html").read_text()
    assert "Note: scaffold, seed 0, round 5 rolled back: back to round 3" in page
    assert ">abandoned</th>" in page
    assert "abandoned)" in thinwire("watch", "run", "--once")[1]
    assert thinwire("resume", "run", "--from", "0", "-q")[0] == 0
    assert (run / "model.safetensors").read_bytes() == model


def test_a_run_is_given_more_rounds(thinwire):
    words = ("--on", "digits", "--set", "local.steps=2", "--set", "engine.backend=loop", "-q")
    assert thinwire("run", "fedavg", "--rounds", "2", "--out", "run", *words)[0] == 0
    code, out, _ = thinwire("resume", "run", "--rounds", "4", "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 4)
    code, _, err = thinwire("resume", "run", "--rounds", "3")
    assert code != 0
    assert "run has 4 rounds already; write --rounds 8, or leave it" in err
