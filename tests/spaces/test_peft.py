"""Models wrapped by Hugging Face peft: the parameters that peft trains are sent, and LoRA equals peft."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call

import thinwire as tw
from thinwire.core.tree import Tree
from thinwire.spaces import LoRA

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

WORDS = 50


def bare(name: str) -> torch.nn.Module:
    """A tiny model with fixed weights for two classes; nothing is downloaded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "gpt2":
            sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
            ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
            return GPT2ForSequenceClassification(GPT2Config(**sizes, **ends, num_labels=2)).eval()
        sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        return BertForSequenceClassification(
            BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16, num_labels=2)
        ).eval()


def wrapped(name: str) -> torch.nn.Module:
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS,
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["c_attn"] if name == "gpt2" else ["query", "value"],
        fan_in_fan_out=name == "gpt2",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(bare(name), config)


def sentences(n: int, seed: int) -> tuple[Tree, torch.Tensor]:
    """Random words; the class is whether the last word is in the second half of the vocabulary."""
    words = 2 + tw.Key(seed).integers(n * 8, WORDS - 2).view(n, 8)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}, (words[:, -1] >= WORDS // 2).long()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_wrapped_model_trains_its_adapters_and_is_saved_by_peft(name, tmp_path):
    model, clients = wrapped(name), [sentences(12, i) for i in range(3)]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    up: list[int] = []

    def on_message(number: int, direction: str, client: int, message: bytes) -> None:
        if direction == "up":
            up.append(len(message))

    method = tw.Method(client_opt=tw.optimizers.SGD(0.3))
    run = tw.simulate(
        model, clients, method, rounds=4, test=sentences(20, 9), local=tw.Local(batch=4), on_message=on_message
    )
    assert run.name == "lora"
    assert run.history[-1].loss < run.history[0].loss
    assert all("lora_" in key or "modules_to_save" in key for key in run.weights)
    assert any("modules_to_save" in key for key in run.weights)
    sent = sum(block.numel() * 4 for block in run.weights.values())
    assert {size - sent for size in up} < set(range(60))
    assert sent < 0.2 * sum(p.numel() * 4 for p in model.parameters())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())

    final = run.model().eval()
    final.save_pretrained(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    again = peft.PeftModel.from_pretrained(bare(name), tmp_path).eval()
    inputs, _ = sentences(20, 9)
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, final(**inputs).logits, rtol=0, atol=1e-4)
        assert (final(**inputs).logits - model.eval()(**inputs).logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_lora_makes_the_same_weights_as_peft(name):
    model, plain = wrapped(name), bare(name)
    base = {key: p.detach() for key, p in plain.named_parameters()}
    if name == "gpt2":
        space = LoRA(rank=4, alpha=8.0, target_modules=("*c_attn.weight",), fan_in_fan_out=("*c_attn.weight",))
    else:
        space = LoRA(rank=4, alpha=8.0, target_modules=("*query.weight", "*value.weight"))
    coords = space.init(base, {}, tw.Key(0))
    theirs = dict(model.named_parameters())
    for key in coords:
        weight, side = key.split("/")
        layer = weight.removesuffix(".weight")
        coords[key] = coords[key] + tw.Key(5).fold(key).normal(*coords[key].shape)
        with torch.no_grad():
            theirs[f"base_model.model.{layer}.lora_{side.upper()}.default.weight"].copy_(coords[key])
    inputs, _ = sentences(6, 3)
    with torch.no_grad():
        ours = functional_call(plain, space.expand(base, {}, coords), (), inputs).logits
        torch.testing.assert_close(ours, model.eval()(**inputs).logits, rtol=1e-4, atol=1e-6)
        assert (ours - plain(**inputs).logits).abs().max() > 1e-3


def test_a_model_without_peft_trains_in_the_lora_space():
    plain = copy.deepcopy(bare("gpt2"))
    space = LoRA(
        rank=4, target_modules=("*c_attn.weight",), fan_in_fan_out=("*c_attn.weight",), modules_to_save=("score.*",)
    )
    method = tw.Method(space, client_opt=tw.optimizers.SGD(0.1))
    run = tw.simulate(plain, [sentences(12, i) for i in range(3)], method, rounds=3, local=tw.Local(batch=4))
    assert run.history[-1].loss < run.history[0].loss
    moved = {key for key, p in plain.named_parameters() if not torch.equal(run.weights[key], p)}
    assert moved == {"transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight", "score.weight"}


@pytest.mark.parametrize("scaling", ["standard", "rslora"])
def test_peft_loads_an_exported_adapter_with_its_scaling_and_lower_ranks(scaling, tmp_path):
    """Rank 24 on a model of width 16: each adapter has rank 16, with the scale of rank 24."""
    plain, (inputs, labels) = bare("bert"), sentences(12, 1)
    targets = ("*query.weight", "*intermediate.dense.weight")
    space = LoRA(24, 12.0, targets, ("classifier.*",), scaling=scaling, init_lora_weights="isometric")
    run = tw.simulate(plain, [(inputs, labels)], tw.Method(space, client_opt=tw.optimizers.SGD(0.1)), rounds=2)
    run.save_adapter(tmp_path)
    config = peft.LoraConfig.from_pretrained(tmp_path)
    assert config.use_rslora == (scaling == "rslora")
    assert set(config.rank_pattern.values()) == {16}
    again = peft.PeftModel.from_pretrained(bare("bert"), tmp_path).eval()
    with torch.no_grad():
        ours = run.model().eval()(**inputs).logits
        torch.testing.assert_close(again(**inputs).logits, ours, rtol=0, atol=1e-5)
        assert (ours - plain(**inputs).logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("method", ["lora", "fed-sb", "flasc"])
def test_methods_adapt_what_peft_does_and_export_the_evaluated_model(method, name, tmp_path):
    """No adapter of an embedding; of FLASC the exported values are those that clients receive."""
    plain, (inputs, labels) = bare(name), sentences(12, 1)
    settings = {"method.space.rank": 4, "method.client_opt.lr": 0.3}
    run = tw.simulate(plain, [(inputs, labels)], method, test=(inputs, labels), rounds=3, set=settings)
    run.save_adapter(tmp_path)
    layers = peft.LoraConfig.from_pretrained(tmp_path).target_modules
    assert {layer.rpartition(".")[2] for layer in layers} == ({"c_attn"} if name == "gpt2" else {"query", "value"})
    again = peft.PeftModel.from_pretrained(bare(name), tmp_path).eval()
    with torch.no_grad():
        ours = run.model().eval()(**inputs).logits
        torch.testing.assert_close(again(**inputs).logits, ours, rtol=0, atol=1e-5)
        assert (ours - plain(**inputs).logits).abs().max() > 1e-3


def test_a_transformer_without_query_and_value_has_adapters_on_its_linear_layers():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32}
    model = ConvNextForImageClassification(ConvNextConfig(**sizes, num_labels=3))
    space = tw.methods.lora().space.for_model(model)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in space.target_modules} == {"pwconv1", "pwconv2"}
    assert space.modules_to_save == ("classifier",)
