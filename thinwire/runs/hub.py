"""A trained model as a folder with a model card, as on the Hugging Face hub.

README.md          the card: bytes, accuracy, method, rounds, seed, command, settings
config.toml        the settings
the model          an adapter folder of peft where the run has an adapter, a checkpoint folder of transformers where
                   the model is one, otherwise `model.safetensors`, a state dict
its tokenizer      the files of the folder that a model of transformers was loaded from
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from thinwire.core.text import markdown_text, visible
from thinwire.errors import ConfigError
from thinwire.models import CausalLM, Pretrained
from thinwire.runs.checkpoint import tensor_bytes
from thinwire.runs.files import write_all
from thinwire.runs.toml import dumps

_TOKENIZER = "tokenizer* special_tokens_map.json added_tokens.json vocab* merges.txt *.model chat_template*"


def save_folder(run: Any, folder: Path) -> list[Path]:
    """Write the model of a run (a `Run`, whose module imports this one) with its card; returns the files."""
    library = "peft"
    try:
        run.save_adapter(folder)
    except ConfigError:  # it has no adapter, or none that peft can load: the whole model
        library = "pytorch"
        if not run.weights:
            raise
        model: Any = None if run._start is None else run.model()
        inner: Any = model.model if isinstance(model, CausalLM | Pretrained) else model
        if hasattr(inner, "save_pretrained"):
            library = "peft" if hasattr(inner, "peft_config") else "transformers"
            inner.save_pretrained(folder)
        else:
            weights = {**run.weights, **run.buffers} if model is None else model.state_dict()
            write_all(folder, {"model.safetensors": tensor_bytes(weights)})
    config = getattr(getattr(run._start, "model", run._start), "config", None)
    if source := getattr(config, "_name_or_path", ""):
        for pattern in _TOKENIZER.split():
            for file in Path(source).glob(pattern):
                shutil.copy(file, folder)
    text = dumps(run._table)
    write_all(folder, {"README.md": _card(run, library, text).encode(), "config.toml": text.encode()})
    return sorted(folder.iterdir())


def _card(run: Any, library: str, settings: str) -> str:
    """The model card, in Markdown."""
    values = [value for one in run.history if (value := run.objective.value(one._asdict())) is not None]
    facts = {
        "method": run.name,
        "task": run.summary.get("task"),
        "rounds": len(run.history),
        "seed": run._table.get("seed"),
        run.objective.label: run.objective.text(values[-1] if values else None),
        "bytes up": f"{run.bytes_up:,}",
        "bytes down": f"{run.bytes_down:,}",
        "bytes of catch-up": f"{run.bytes_catchup:,}",
        "bytes in all": f"{run.bytes_total:,}",
    }
    rows = "".join(f"| {name} | {markdown_text(str(value))} |\n" for name, value in facts.items())
    command = f"python {run._table['script']}" if "script" in run._table else "thinwire run config.toml"
    return (
        f"---\nlibrary_name: {library}\ntags: [federated-learning, thinwire]\n---\n\n# {markdown_text(run.name)}\n\n"
        f"Trained by federated learning with thinwire.\n\n| | |\n|---|---|\n{rows}\n"
        f"Again: `{visible(command)}`, with the settings in `config.toml`:\n\n```toml\n{settings}```\n"
    )


def upload(run: Any, repo: str, **options: Any) -> str:
    """Upload the folder of a run as a model to the hub; returns the address of the commit.

    Args:
        run: the run.
        repo: owner/name, created if it does not exist.
        **options: of `huggingface_hub.HfApi.create_repo`, such as private.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ConfigError("push_to_hub needs huggingface_hub: pip install huggingface_hub") from None
    with tempfile.TemporaryDirectory() as folder:
        save_folder(run, Path(folder))
        try:
            HfApi().create_repo(repo, exist_ok=True, **options)
            return str(HfApi().upload_folder(repo_id=repo, folder_path=folder))
        except Exception as error:  # of many types: network, a name, rights
            why = " ".join(str(error).split())[:200]
            raise ConfigError(f"the hub did not take {repo}: {why}; `hf auth login` signs in") from error
