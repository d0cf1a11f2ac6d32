"""Causal language models: loss and gradients are those of transformers, answers are those of its generation."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import thinwire as tw
from tests.checkpoints import SPOKEN, speaker, write_language_model
from thinwire.core.key import Key
from thinwire.data.causal_lm import causal_lm
from thinwire.data.partition import Assignment
from thinwire.data.task import Task
from thinwire.data.token_rows import TokenRows
from thinwire.errors import ConfigError
from thinwire.federation.sampler import Sampler
from thinwire.metrics import metrics_by_name
from thinwire.models import CausalLM, build
from thinwire.models.quantized import Blocks, QuantizedEmbedding
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.run import reopen
from thinwire.training import evaluation
from thinwire.training.evaluation import evaluate
from thinwire.training.functional import Functional

transformers = pytest.importorskip("transformers")


def rows(sizes=(5, 12, 8, 3, 9), seed=0):
    """Rows of random tokens; about half of them are learned."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        ids = torch.randint(4, len(SPOKEN), (size,), generator=generator).tolist()
        made.append((ids, [False, *(torch.rand(size - 1, generator=generator) < 0.5).tolist()[:-1], True]))
    return TokenRows.of(made), made


def theirs(model, made):
    """Loss and gradients of transformers, of padded rows in one batch."""
    width = max(len(ids) for ids, _ in made)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row, _ in made])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row, _ in made])
    flags = torch.tensor([[*one, *[False] * (width - len(one))] for _, one in made])
    labels = torch.where(flags, ids, -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    return float(loss.detach()), {f"model.{name}": p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("family", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("gpt2", "eager")])
def test_loss_and_gradients_of_a_step_are_those_of_transformers(family, attention):
    model = speaker(family, attn_implementation=attention)
    batch, made = rows()
    ours = Functional.of(CausalLM(copy.deepcopy(model)))
    weights = {name: w.requires_grad_() for name, w in ours.weights().items()}
    grads, (loss, _) = ours.gradient(weights, ours.buffers(), *batch.gather(torch.arange(len(batch))), None)
    model.train()
    wanted, expected = theirs(model, made)
    assert float(loss) == pytest.approx(wanted, abs=1e-5)
    assert set(expected) == set(grads)
    for name, block in expected.items():
        torch.testing.assert_close(grads[name], block, rtol=1e-5, atol=1e-5)


def task_of(model, window=1):
    """Two clients with rows of different lengths."""
    _, first = rows(seed=0)
    _, second = rows(seed=1)
    pool = TokenRows.of([*first, *second], window=window)
    return Task(
        model, pool, Assignment(np.arange(10), np.array([0, 5, 10])), pool, metrics=metrics_by_name(["perplexity"])
    )


def trained(model, backend="loop", **more):
    method = tw.Method(tw.spaces.LoRA(rank=2, target_modules=("query-value",)), client_opt=tw.optimizers.SGD(0.02))
    settings = {"local.batch": 2, "engine.backend": backend}
    return tw.run(method, task_of(model, **more), rounds=2, cohort=2, set=settings, recipe="paper")


def largest_difference(one, other):
    return max(float((one.weights[name] - block).abs().max()) for name, block in other.weights.items())


def test_checkpointing_and_backends_give_the_same_weights():
    plain, again = CausalLM(speaker()), CausalLM(speaker())
    again.load_state_dict(plain.state_dict())
    again.model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = trained(plain)
    start = dict(plain.named_parameters())
    assert max(float((expected.weights[n] - start[n].detach()).abs().max()) for n in expected.weights) > 1e-4
    assert largest_difference(trained(again), expected) < 1e-5
    assert largest_difference(trained(plain, "vmap"), expected) < 1e-5
    with pytest.raises(ConfigError, match=r"checkpointing.*write backend = 'auto'"):
        trained(again, "vmap")


def test_batches_of_similar_length_train_on_every_row_once():
    task = task_of(CausalLM(speaker()), window=4)
    sampler = Sampler(Key(0), [0, 1], 2, tw.Local(batch=2), task.train, task.clients, torch.device("cpu"))
    work = sampler.workload(0, (0, 1))
    full = work.index[0][torch.from_numpy(work.rows[0] == 2)]
    seen = [*full.flatten().tolist(), int(work.index[0][torch.from_numpy(work.rows[0] == 1)][0, 0])]
    assert sorted(seen) == [0, 1, 2, 3, 4]
    sizes = task.train.sizes[full].sort(1).values
    low, high = sizes[sizes[:, 0].argsort()]
    assert int(low[1]) <= int(high[0])


def test_evaluation_does_not_depend_on_the_batch_and_fits_into_memory(monkeypatch):
    examples, made = rows((4, 30, 6, 17, 9, 5, 22))
    model = speaker()
    wanted, _ = theirs(model, made)
    functional = Functional.of(CausalLM(model))
    metrics = metrics_by_name(["perplexity"])
    results = [evaluate(functional, functional.weights(), {}, examples, metrics=metrics, batch=b) for b in (0, 1, 3)]
    for one in results:
        assert one.loss == pytest.approx(wanted, abs=1e-5)
        assert one.metrics["perplexity"] == pytest.approx(float(torch.tensor(wanted).exp()), rel=1e-5)
    widths = []
    monkeypatch.setitem(evaluation.MAX_TENSOR_BYTES, "cpu", 4 * 32 * 32 * 4 * 2)
    monkeypatch.setattr(TokenRows, "gather", _noting(TokenRows.gather, widths))
    again = evaluate(functional, functional.weights(), {}, examples)
    assert again.loss == pytest.approx(wanted, abs=1e-5)
    assert max(widths[-4:]) <= 2


def _noting(gather, widths):
    def noted(self, index):
        widths.append(index.numel())
        return gather(self, index)

    return noted


QUESTIONS = [
    {"prompt": f"{a} {b}", "response": answer, "options": ["yes it is", "no", "two three"], "set": kind}
    for kind, a, answer in (("p", "a", "yes it is"), ("q", "b", "no"), ("q", "c", "two three"))
    for b in ("one", "two", "d e f", "g h the is")
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A checkpoint and a file of questions of three clients."""
    folder = tmp_path_factory.mktemp("language")
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({**row, "home": "xyz"[i % 3]}) + "\n" for i, row in enumerate(QUESTIONS * 2)))
    return str(write_language_model(folder / "llama")), str(file)


def test_answers_are_those_of_transformers_and_options_those_of_its_losses(world):
    checkpoint, file = world
    source = causal_lm(file=file, test_file=file, checkpoint=checkpoint, options="options", group="set", new_tokens=6)
    model = build("causal-lm", checkpoint=checkpoint)
    bare = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    questions, right, exact = source.test.questions, [], []
    made = model.generate(questions.prompts[:12], 6)
    for row, prompt, tokens in zip(QUESTIONS, questions.prompts, made, strict=False):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        assert ids[0].tolist() == prompt.tolist()
        alone = bare.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :].tolist()
        assert questions.text(tokens) == questions.text(alone)
        exact.append(questions.text(alone).strip() == row["response"])
        losses = []
        for option in row["options"]:
            own = tokenizer(f"{text}{option} </s>", return_tensors="pt", add_special_tokens=False)["input_ids"]
            labels = own.clone()
            labels[:, : ids.shape[1]] = -100
            with torch.no_grad():
                losses.append(float(bare(input_ids=own, labels=labels).loss) * (own.shape[1] - ids.shape[1]))
        right.append(row["options"][losses.index(min(losses))] == row["response"])
    functional = Functional.of(model)
    metrics = metrics_by_name(["option-accuracy", "exact-match"])
    found = evaluate(functional, functional.weights(), {}, source.test, metrics=metrics).metrics
    p, q = sum(right[:4]) / 4, sum(right[4:]) / 8
    assert found["option-accuracy/p"] == pytest.approx(p)
    assert found["option-accuracy/q"] == pytest.approx(q)
    assert found["option-accuracy"] == pytest.approx((p + q) / 2)
    assert found["exact-match"] == pytest.approx((sum(exact[:4]) / 4 + sum(exact[4:]) / 8) / 2)
    with pytest.raises(ConfigError, match="needs records with a prompt"):
        evaluate(functional, functional.weights(), {}, source.train, metrics=metrics)


def test_a_run_learns_the_answers_and_its_adapter_loads_in_peft(world, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    checkpoint, file = world
    settings = {"task.file": file, "task.test_file": file, "task.checkpoint": checkpoint, "task.client": "home"}
    settings |= {"task.options": "options", "task.length": 64, "task.group": "set"}
    settings |= {"rounds": 12, "eval.every": 12, "local.epochs": 4, "local.batch": 4, "engine.backend": "vmap"}
    settings |= {
        "method.client_opt.lr": 0.01,
        "eval.metrics": ["exact-match"],
        "method.space.target_modules": ["all-linear"],
    }
    path = tmp_path / "run"
    execute(resolve("lora", on="causal-lm", overrides=settings), path)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["metrics"]["option-accuracy"] > 0.9
    assert records[-1]["metrics"]["exact-match"] > 0.5
    assert json.loads((path / "summary.json").read_text())["objective"]["name"] == "option-accuracy"

    tw.report([path], md=tmp_path / "page.md")
    assert "perplexity" in (tmp_path / "page.md").read_text()

    reopen(path).save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["r"], config["modules_to_save"]) == ("CAUSAL_LM", 16, None)
    assert config["base_model_name_or_path"] == checkpoint
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ours = build("causal-lm", checkpoint=checkpoint).eval()
    ours.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    ids = torch.tensor([[5, 7, 8, 3, 6]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, ours(ids), rtol=0, atol=1e-4)


def test_refusals_of_the_model_are_one_line(tmp_path):
    for options, message in (
        ({}, "needs a checkpoint"),
        ({"checkpoint": str(tmp_path)}, "no language model can be made"),
        ({"checkpoint": "x", "dtype": "int3"}, "dtype must be one of"),
        ({"checkpoint": "x", "attention": "flash"}, "attention must be one of"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            build("causal-lm", **options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_in_few_bits_trains_and_its_adapter_fits_the_full_base(world, tmp_path, bits):
    """Weights on a grid, as those of a GGUF file, are kept; so logits are those of the full base."""
    peft = pytest.importorskip("peft")
    checkpoint = tmp_path / "grid"
    write_language_model(checkpoint)
    whole = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        for weight in whole.parameters():
            if weight.dim() == 2:
                weight.copy_((weight * 5).round().clamp(-7, 7) / 8)
    whole.save_pretrained(checkpoint)
    small = build("causal-lm", checkpoint=str(checkpoint), bits=bits)
    trained_names = [name for name, _ in small.named_parameters() if "norm" not in name]
    assert all("q_proj" in name or "v_proj" in name for name in trained_names)
    examples, _ = rows()
    clients = [examples.gather(torch.arange(5)[i:]) for i in (0, 1)]
    method = tw.Method(tw.spaces.LoRA(rank=2, target_modules=("query-value",)), client_opt=tw.optimizers.SGD(0.1))
    runs = [
        tw.simulate(small, clients, method, rounds=2, local=tw.Local(batch=2), backend=backend)
        for backend in ("loop", "vmap")
    ]
    assert largest_difference(*runs) < 1e-5
    assert runs[0].history[-1].loss < runs[0].history[0].loss
    runs[0].save_adapter(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 7, 8, 3, 6]])
    with torch.no_grad():
        torch.testing.assert_close(runs[0].model().eval()(ids), loaded(input_ids=ids).logits, rtol=0, atol=1e-4)
        loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(ids).logits, runs[0].model().eval()(ids), rtol=0, atol=1e-4)
        assert small.generate([ids[0].numpy()], 3) == build("causal-lm", checkpoint=str(checkpoint)).generate(
            [ids[0].numpy()], 3
        )


@pytest.mark.parametrize("block", [16, 32])
def test_blocks_of_eight_bits_have_the_values_of_q8_0(block):
    """32 values with one step, which is that of the largest magnitude over 127; also in halves."""
    drawn = Key(5).normal(20, 18, 32)
    step = (drawn.abs().amax(2, keepdim=True) / 127).half().float()
    weight = ((drawn / step).round().clamp(-127, 127) * step).view(20, -1)
    found = Blocks.of(weight, 8, block).decoded(torch.float32)
    assert torch.allclose(found, weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_have_the_values_of_a_grid_and_few_bytes(bits):
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (64, 96), generator=generator).float()
    scale = torch.rand(64, 3, generator=generator).repeat_interleave(32, 1)
    weight = scale * levels - 0.3
    blocks = Blocks.of(weight, bits)
    torch.testing.assert_close(blocks.decoded(torch.float32), weight, rtol=0, atol=1e-5)
    assert blocks.nbytes <= (0.2 if bits == 4 else 0.32) * 4 * weight.numel()
    torch.testing.assert_close(
        QuantizedEmbedding(blocks, torch.float32)(torch.tensor([[3], [5]]))[:, 0], weight[[3, 5]], rtol=0, atol=1e-5
    )
    odd = torch.randn(5, 37, generator=generator)
    assert float((Blocks.of(odd, 8).decoded(torch.float32) - odd).abs().max()) < 0.02
