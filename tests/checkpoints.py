"""A small checkpoint folder of transformers for tests: a tokenizer of a few words and a random model."""

from pathlib import Path

import pytest
import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abc", "good", "bad", "film", "the", "it", "is", "was", "not", "very"]

GLUE_FILES = {
    "SST-2": "sentence\tlabel\n" + "a good film\t1\nbad film\t0\nit was very good\t1\nnot good\t0\n" * 6,
    "RTE": "index\tsentence1\tsentence2\tlabel\n" + "0\ta b c\tb\tentailment\n1\tthe film\tbad\tnot_entailment\n" * 8,
}


def write_sheets(root: Path) -> Path:
    """Write a data folder with a few lines of two GLUE tasks."""
    for name, text in GLUE_FILES.items():
        (root / "glue" / name).mkdir(parents=True, exist_ok=True)
        for file in ("train.tsv", "dev.tsv"):
            (root / "glue" / name / file).write_text(text)
    return root


def write_checkpoint(folder: Path, family: str = "bert") -> Path:
    """Write a checkpoint without a classification head, as pretrained ones are."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=inputs, **names).save_pretrained(
        folder
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        make(family).save_pretrained(folder)
    return folder


def make(family: str, **more) -> torch.nn.Module:
    """A small model with random weights."""
    transformers = pytest.importorskip("transformers")
    if family == "gpt2":
        sizes = {
            "vocab_size": len(WORDS),
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "initializer_range": 0.3,
        }
        config = transformers.GPT2Config(
            **sizes, attn_implementation="eager", pad_token_id=0, bos_token_id=2, eos_token_id=3, **more
        )
        return transformers.GPT2ForSequenceClassification(config) if more else transformers.GPT2Model(config)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "initializer_range": 0.3,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    if family == "roberta":
        config = transformers.RobertaConfig(
            **sizes, attn_implementation="eager", bos_token_id=2, eos_token_id=3, **more
        )
        return transformers.RobertaForSequenceClassification(config) if more else transformers.RobertaModel(config)
    config = transformers.BertConfig(**sizes, attn_implementation="eager", **more)
    return transformers.BertForSequenceClassification(config) if more else transformers.BertModel(config)


CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
SPOKEN = ["<pad>", "<unk>", "<s>", "</s>", *ROLES, *"abcdefgh", "yes", "no", "one", "two", "three", "is", "it", "the"]


def write_language_model(folder: Path, family: str = "llama", template: str = CHAT) -> Path:
    """Write a causal language model of random weights, with a tokenizer of a few words and a chat template."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(SPOKEN)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=ROLES, **names)
    made.chat_template = template or None
    made.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        speaker(family).save_pretrained(folder)
    return folder


def speaker(family: str = "llama", **more) -> torch.nn.Module:
    """A small causal language model with random weights."""
    transformers = pytest.importorskip("transformers")
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "attn_implementation": "eager", **more}
    if family == "gpt2":
        sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
        sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=len(SPOKEN), initializer_range=0.3, **sizes, **ends)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3}
    config = transformers.LlamaConfig(vocab_size=len(SPOKEN), tie_word_embeddings=True, **sizes, **ends)
    return transformers.LlamaForCausalLM(config)
