"""A real `transformers.Trainer` as the local work of a client, on a tiny language model made from a configuration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.federation import records_of
from thinwire.data.partition import Assignment
from thinwire.data.token_rows import TokenRows
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.models.causal_lm import CausalLM

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

WORDS, ROWS, CLIENTS = 23, 6, 2


def model() -> CausalLM:
    """A Llama with tied embeddings."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return CausalLM(transformers.LlamaForCausalLM(config))


def rows() -> TokenRows:
    """Rows of 8 tokens that count up; only the last tokens are learned."""
    first = np.random.default_rng(1).integers(0, WORDS, ROWS * CLIENTS)
    learned = [False] * 3 + [True] * 5
    return TokenRows.of([((np.arange(8) + one) % WORDS, learned) for one in first])


def task() -> tw.Task:
    return tw.Task(model(), rows(), Assignment(np.arange(ROWS * CLIENTS), np.array([0, ROWS, ROWS * CLIENTS])), rows())


def make_fit(folder):
    def fit(model, records, lr, seed):
        language = model.model  # that of transformers, inside of ours
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=3,
            num_train_epochs=2,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=seed % (1 << 31),
            lr_scheduler_type="constant",
        )
        trainer = transformers.Trainer(language, arguments, train_dataset=records, optimizers=(optimizer, None))
        done = trainer.train()
        return model, done.training_loss

    return fit


METHODS = {
    "full": tw.Method(client_opt=tw.optimizers.AdamW(0.01), opt_lifetime="run", up=tw.codecs.Quantize(8)),
    "lora": tw.methods.lora(rank=4).replace(client_opt=tw.optimizers.AdamW(0.02), up=tw.codecs.TopK(0.5)),
}


@pytest.mark.parametrize("name", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_a_trainer_of_transformers_trains_a_language_model_beneath_our_methods(name, tmp_path):
    own = tw.Local(trainer=make_fit(tmp_path))
    job = Job(task(), METHODS[name], rounds=3, cohort=CLIENTS, local=own)
    records = records_of(Engine(), job)
    assert records[-1].test_loss < records[0].test_loss
    assert all(record.bytes_up > 0 for record in records)


def test_sft_trainer_of_trl_trains_a_language_model_beneath_our_methods(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")

    def fit(model, records, lr, seed):
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=3,
            num_train_epochs=2,
            learning_rate=lr,
            seed=seed % (1 << 31),
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        rows = datasets.Dataset.from_list([{k: v.tolist() for k, v in records[i].items()} for i in range(len(records))])
        done = trl.SFTTrainer(model.model, arguments, train_dataset=rows, processing_class=tokenizer).train()
        return model, {"loss": done.training_loss}

    job = Job(task(), METHODS["lora"], rounds=3, cohort=CLIENTS, local=tw.Local(trainer=fit))
    records = records_of(Engine(), job)
    assert records[-1].test_loss < records[0].test_loss
    assert all(record.bytes_up > 0 for record in records)


def test_the_loss_of_transformers_on_records_is_ours():
    seen = {}

    def look(model, records):
        items = [records[i] for i in range(3)]
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        seen["theirs"] = model.model(**batch).loss.item()
        x, y = records._work.gather(records._index[:3])
        seen["ours"] = torch.nn.functional.cross_entropy(model(**x).flatten(0, 1), y.flatten()).item()

    records_of(Engine(), Job(task(), tw.methods.lora(rank=2), 1, 1, tw.Local(trainer=look)))
    assert seen["theirs"] == pytest.approx(seen["ours"], abs=1e-5)
