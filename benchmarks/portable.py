"""Write a folder with a checkpoint and datasets of texts, small enough to copy to a machine without network access.

    python benchmarks/portable.py OUT --data 20newsgroups sst2 rte
    THINWIRE_DATA=OUT thinwire run lora --on text-classification        # on the other machine

    OUT/checkpoints/minilm/   config, tokenizer, and the weights in 16 bits (safetensors)
    OUT/20newsgroups/ ...     the files of the texts

The weights are rounded to 11 bits of mantissa, half their bytes; a run starts from slightly different weights than with
the original. Needs the extra `hf`, the checkpoint and the data (THINWIRE_DATA).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from thinwire.data.checkpoints import MINILM, find_checkpoint
from thinwire.data.files import root
from thinwire.data.named_texts import READERS

KEPT = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", default=MINILM)
    parser.add_argument("--data", nargs="+", default=["20newsgroups"], choices=sorted(READERS))
    options = parser.parse_args()
    source = find_checkpoint(options.checkpoint)
    target = options.out / "checkpoints" / Path(options.checkpoint).name
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    weights = load_file(source / "model.safetensors")
    small = {name: block.half() if block.dtype == torch.float32 else block for name, block in weights.items()}
    save_file(small, target / "model.safetensors", metadata={"format": "pt"})
    base = root(None) or Path()
    for file in (file for data in options.data for file in READERS[data](base).files):
        copy = options.out / file.relative_to(base)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for file in sorted(path for path in options.out.rglob("*") if path.is_file()):
        print(f"{file.stat().st_size:>12,}  {file.relative_to(options.out)}")
    print(f"{sum(path.stat().st_size for path in options.out.rglob('*') if path.is_file()):>12,}  in total")


if __name__ == "__main__":
    main()
