"""Old names in files and overrides: one line with the new name."""

from __future__ import annotations

import pytest

from thinwire.core.registry import SLOTS, entries
from thinwire.errors import ConfigError
from thinwire.experiments.config import resolve
from thinwire.experiments.load import PLAIN_FIELDS
from thinwire.experiments.renamed import KEYS, PARTS, VALUES, check_part, unknown_key

# a file with an old name, and the name to write instead
FILES = [
    ("[method]\nlink = 'ledger'", "write method.download"),
    ("[method]\nsay = 'delta'", "write method.upload"),
    ("[method]\nweigh = 'uniform'", "write method.client_weight"),
    ("[method]\nmean = 'median'", "write method.aggregator"),
    ("[method]\nrate = 'cosine'", "write method.lr_schedule"),
    ("[method]\nserver_rate = 'cosine'", "write method.server_lr_schedule"),
    ("[method]\nthen = { at = 2 }", "write method.next_stage"),
    ("[method]\nsecure = true", "write method.secure_aggregation"),
    ("[method]\nsettle = 'raw'", "write method.merge_codec"),
    ("[method]\nguard = false", "write method.drift_check"),
    ("[method]\nspace = { kind = 'mapo', fresh_every = 2 }", "write method.space.redraw_every"),
    ("[method]\nspace = { kind = 'lora', layers = ['*'] }", "write method.space.target_modules"),
    ("[method]\nspace = { kind = 'lora', transposed = ['*'] }", "write method.space.fan_in_fan_out"),
    ("[method]\nspace = { kind = 'fedpara', layers = ['*'] }", "write method.space.target_modules"),
    ("[eval]\nuntil = 0.8", "write eval.target_accuracy"),
    ("[task]\nkeep = 3", "write task.participating_clients"),
    ("[task]\nhold_out = 0.1", "write task.validation_fraction"),
    ("[task]\nsplit = 'iid'", "write task.partition"),
    ("[engine]\nvectorise = 'loop'", "write engine.backend"),
    ("[method]\nup = { kind = 'quantise', bits = 4 }", "write method.up = 'quantize'"),
    ("[method]\nup = { kind = 'chain', parts = ['topk', 'quantise'] }", "write method.up.parts = 'quantize'"),
    ("[method]\nschedule = 'every'", "write method.schedule = 'all-blocks'"),
    ("[method]\nmask = 'pick'", "write method.mask = 'random'"),
    ("[method]\nmask = 'select'", "write method.mask = 'topk'"),
    ("[method]\npenalty = 'norms'", "write method.penalty = 'l1l2'"),
    ("[method]\nlr_schedule = 'decay'", "write method.lr_schedule = 'exponential'"),
    ("[method]\nlr_schedule = { kind = 'steps', at = [3] }", "write method.lr_schedule = 'multistep'"),
    ("[method]\ndownload = 'ledger'", "write method.download = 'incremental'"),
    ("[method]\ndownload = 'snapshot'", "write method.download = 'full'"),
    ("[method]\nupload = 'value'", "write method.upload = 'weights'"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[text.replace("\n", " ") for text, _ in FILES])
def test_an_old_name_in_a_file_is_refused_with_the_new_name(tmp_path, text, message):
    file = tmp_path / "old.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        resolve(str(file))
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)


def test_an_old_name_in_an_override_is_refused_with_the_new_name():
    with pytest.raises(ConfigError, match=r"write method\.download$"):
        resolve("fedavg", overrides={"method.link": "ledger"})
    with pytest.raises(ConfigError, match=r"write method\.lr_schedule$"):
        resolve("fedavg", overrides={"method.rate.kind": "steps"})


def test_every_new_name_exists_and_no_old_part_does():
    for old, new in KEYS.items():
        assert old not in (*SLOTS, *PLAIN_FIELDS), old
        assert old != new
    for (kind, old), new in PARTS.items():
        assert new in entries(kind)
        assert old not in entries(kind)
    for (setting, _), new in VALUES.items():
        section, key = setting.split(".")
        resolve("fedavg", overrides={f"{section}.{key}": new})


def test_an_argument_of_a_plugin_may_have_an_old_name():
    assert "did you mean" in str(unknown_key("method.space", "layer", ["layers"]))
    assert "Known: width" in str(unknown_key("method.space", "layers", ["width"]))
    check_part("codec", "quantise", "method.up", ["quantise"])
