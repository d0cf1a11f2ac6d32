"""Configurations of peft on models of several families: the same layers, the same logits, adapters that go on."""

from __future__ import annotations

import copy
import json
import re
from contextlib import nullcontext

import pytest
import torch
from torch.func import functional_call

import thinwire as tw
from tests.checkpoints import SPOKEN, speaker, write_language_model
from thinwire.core.key import Key
from thinwire.errors import ConfigError, DataError
from thinwire.models import CausalLM, build
from thinwire.models.quantized import Blocks
from thinwire.protocol.method import Method
from thinwire.spaces.adapters import targets
from thinwire.spaces.peft_config import lora_from_peft

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = {"vocab_size": 30, "max_position_embeddings": 24, "pad_token_id": 0}
HEADS = {"num_key_value_heads": 1, "head_dim": 8}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def family(name: str) -> torch.nn.Module:
    """A tiny model of a family with fixed weights; nothing is downloaded."""
    t = transformers
    make = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **WORDS, **ENDS)),
        "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**SIZES, **WORDS, **HEADS, **ENDS)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=30, n_positions=24, n_embd=16, n_layer=2, n_head=2, **ENDS)
        ),
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**SIZES, **WORDS, num_labels=3)),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3, attn_implementation="eager")
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make[name]().eval()


TASKS = {"bert": "SEQ_CLS", "vit": None}
CONFIGS = {
    "default": {},
    "all-linear": {"target_modules": "all-linear", "use_rslora": True},
    "regex": {"target_modules": r".*\.[01]\..*(q_proj|query|c_attn|mlp\.c_proj|up_proj|output\.dense)"},
}


def inputs(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": Key(3).normal(2, 3, 8, 8)}
    return {"input_ids": 3 + Key(3).integers(10, 27).view(2, 5)}


def layers(wrapped: torch.nn.Module) -> set[str]:
    """The layers that peft adapts."""
    found = (re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.default\.weight", name) for name in wrapped.state_dict())
    return {one[1] for one in found if one}


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "bert", "vit"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_and_logits_are_those_of_peft(name, kind):
    model = family(name)
    if name == "vit" and kind == "default":  # peft has no default for it
        pytest.skip("peft names no layers of ViT")
    # without a task type, peft's "all-linear" includes the head; its adapter is 0 here
    config = peft.LoraConfig(r=3, lora_alpha=6, task_type=TASKS.get(name, "CAUSAL_LM"), **CONFIGS[kind])
    with pytest.warns(UserWarning, match="fan_in_fan_out") if name == "gpt2" else nullcontext():
        wrapped = peft.get_peft_model(family(name), config).eval()
    method = Method(lora_from_peft(peft.LoraConfig(r=3, lora_alpha=6, **CONFIGS[kind]))).for_model(model)
    base = {key: p.detach() for key, p in model.named_parameters()}
    coords = method.space.init(base, {}, Key(0))
    assert {key.removesuffix(".weight/b") for key in coords if key.endswith("/b")} == layers(wrapped) - {"classifier"}
    theirs = dict(wrapped.named_parameters())
    for key in coords:
        coords[key] = Key(5).fold(key).normal(*coords[key].shape)
        layer, side = key.removesuffix(key[-2:]).removesuffix(".weight"), key[-1].upper()
        with torch.no_grad():
            theirs[f"base_model.model.{layer}.lora_{side}.default.weight"].copy_(coords[key])
    with torch.no_grad():
        ours = functional_call(model, method.space.expand(base, {}, coords), (), inputs(name)).logits
        torch.testing.assert_close(ours, wrapped(**inputs(name)).logits, rtol=1e-4, atol=1e-5)
        assert (ours - model(**inputs(name)).logits).abs().max() > 1e-3


def test_names_of_modules_select_as_in_peft():
    weights = ("h.0.q_proj.weight", "h.0.xq_proj.weight", "h.1.q_proj.weight", "head.fc.weight", "head.fc.bias")
    space = lora_from_peft({"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["head"]})
    assert targets(weights, space.target_modules) == ("h.0.q_proj.weight", "h.1.q_proj.weight")
    base = {name: torch.zeros(*(4,) * (1 + name.endswith("weight"))) for name in weights}
    assert [name for name in space.init(base, {}, Key(0)) if "/" not in name] == ["head.fc.weight", "head.fc.bias"]
    for given, message in (
        ("k_proj", "matches no block"),
        ("regex:(", "is no regular expression"),
        ("regex:.*k_proj", "matches no block"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            targets(weights, (given,))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora = True of peft is not supported"),
        ({"bias": "all"}, "bias = 'all' of peft is not supported"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern and alpha_pattern"),
        ({"lora_dropout": 1.5}, "lora_dropout must be"),
    ],
)
def test_what_is_not_supported_is_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        lora_from_peft(peft.LoraConfig(target_modules=["q_proj"], **settings).to_dict())
    assert "\n" not in str(caught.value)


def sentences(n: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    words = 4 + Key(seed).integers(n * 6, len(SPOKEN) - 4).view(n, 6)
    return {"input_ids": words, "label_positions": torch.arange(5).expand(n, -1)}, words[:, 1:]


def trained(model, space, rounds=2, **more):
    clients = [sentences(6, i) for i in range(2)]
    method = tw.Method(space, client_opt=tw.optimizers.SGD(0.05))
    return tw.simulate(model, clients, method, rounds=rounds, local=tw.Local(batch=3), seed=1, **more)


def test_training_goes_on_from_a_folder_of_peft(tmp_path):
    """A folder that peft wrote: the first round begins with its logits, and what is exported loads in peft again."""
    base = speaker()
    wrapped = peft.get_peft_model(
        _copied(base), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_" in name:
                p.copy_(0.3 * Key(7).fold(name).normal(*p.shape))
    wrapped.save_pretrained(tmp_path / "first")
    space = lora_from_peft(tmp_path / "first")
    model = CausalLM(_copied(base))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    ids = torch.tensor([[5, 7, 8, 9]])
    with torch.no_grad():
        ours = functional_call(model, space.expand(weights, {}, space.init(weights, {}, Key(0))), (ids,))
        torch.testing.assert_close(ours, wrapped.eval()(input_ids=ids).logits, rtol=0, atol=1e-5)
    run = trained(model, space)
    run.save_adapter(tmp_path / "second")
    again = peft.PeftModel.from_pretrained(_copied(base), tmp_path / "second").eval()
    with torch.no_grad():
        torch.testing.assert_close(run.model().eval()(ids), again(input_ids=ids).logits, rtol=0, atol=1e-5)
        assert (again(input_ids=ids).logits - ours).abs().max() > 1e-4
    ffa = tw.spaces.LoRA(2, 4.0, ("q_proj", "v_proj"), freeze_a=True, adapter=str(tmp_path / "first"))
    moved = trained(model, ffa).coords
    assert all(name.endswith("/b") for name in moved)


def _copied(model):
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    return made


def test_an_adapter_that_does_not_fit_is_one_line(tmp_path):
    model = CausalLM(speaker())
    trained(model, tw.spaces.LoRA(2, 4.0, ("q_proj",)), rounds=1).save_adapter(tmp_path / "a")
    folder = str(tmp_path / "a")
    for options, message in (
        ({"rank": 4, "alpha": 8.0}, "has shape .* write rank = 2"),
        ({"rank": 2, "alpha": 8.0}, "has the factor 2, this LoRA 4; write rank = 2, alpha = 4"),
        ({"rank": 2, "alpha": 4.0, "target_modules": ("q_proj", "v_proj")}, "has no adapter of"),
        ({"rank": 2, "alpha": 4.0, "target_modules": ("regex:.*layers.0.*q_proj",)}, "also has .* not trained here"),
        ({"adapter": str(tmp_path)}, "no adapter of peft there"),
        ({"from_start": True}, "leave from_start out"),
    ):
        settings = {"target_modules": ("q_proj",), "adapter": folder, **options}
        with pytest.raises((ConfigError, DataError), match=message) as caught:
            trained(model, tw.spaces.LoRA(**settings), rounds=1)
        assert "\n" not in str(caught.value)
    data = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(data[:-9])
    with pytest.raises(DataError, match="safetensors cannot read it"):
        trained(model, tw.spaces.LoRA(2, 4.0, ("q_proj",), adapter=folder), rounds=1)


def test_dropout_of_adapters_acts_in_training_only_and_is_exported(tmp_path):
    model = CausalLM(speaker())
    runs = [
        trained(model, tw.spaces.LoRA(2, 4.0, ("query-value",), lora_dropout=p), backend="loop")
        for p in (0.0, 0.5, 0.5)
    ]
    first, *others = (run.coords for run in runs)
    assert any(not torch.equal(first[name], others[0][name]) for name in first)
    assert all(torch.equal(others[0][name], others[1][name]) for name in first)
    runs[1].save_adapter(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"] == 0.5
    trained(model, tw.spaces.LoRA(2, 4.0, ("query-value",), lora_dropout=0.5), rounds=1, backend="vmap")


def test_gpt2_is_exported_and_merged_without_settings(tmp_path):
    model = CausalLM(speaker("gpt2"))
    run = trained(model, tw.spaces.LoRA(2, 4.0, ("all-linear",)))
    run.save_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["fan_in_fan_out"], config["task_type"]) == (True, "CAUSAL_LM")
    bare = _copied(model.model)
    again = peft.PeftModel.from_pretrained(bare, tmp_path).eval()
    ids = torch.tensor([[5, 7, 8, 9]])
    with torch.no_grad():
        ours = run.model().eval()(ids)
        torch.testing.assert_close(ours, again(input_ids=ids).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours, again.merge_and_unload()(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_vit_trains_on_images_and_its_adapter_loads_in_peft(tmp_path):
    model, images = family("vit"), Key(0).normal(24, 3, 8, 8)
    labels = (images.mean((1, 2, 3)) > 0).long()
    space = tw.spaces.LoRA(2, 4.0, ("query-value",), ("classifier",))
    clients = [(images[i::2], labels[i::2]) for i in range(2)]
    runs = [
        tw.simulate(
            model,
            clients,
            tw.Method(space, client_opt=tw.optimizers.SGD(0.1)),
            rounds=2,
            local=tw.Local(batch=6),
            backend=backend,
        )
        for backend in ("loop", "vmap")
    ]
    for name, block in runs[0].weights.items():
        torch.testing.assert_close(block, runs[1].weights[name], rtol=0, atol=1e-5)
    runs[0].save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == (None, ["classifier"])
    loaded = peft.PeftModel.from_pretrained(family("vit"), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(images).logits, runs[0].model().eval()(images).logits, rtol=0, atol=1e-5)


def test_copies_of_a_model_share_layers_in_few_bits(tmp_path):
    model = build("causal-lm", checkpoint=str(write_language_model(tmp_path)), bits=4)
    again = copy.deepcopy(model)
    pairs = zip(model.modules(), again.modules(), strict=True)
    shared = [(one.blocks, two.blocks) for one, two in pairs if hasattr(one, "blocks")]
    assert all(one is two and isinstance(one, Blocks) for one, two in shared)
    assert len({id(one) for one, _ in shared}) == len(shared) - 1  # embedding and output layer are one matrix
