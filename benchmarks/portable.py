"""Write a folder with a checkpoint and tokenized datasets, small enough to copy to a machine without network access.

    python benchmarks/portable.py OUT --data 20newsgroups sst2 rte
    THINWIRE_DATA=OUT thinwire run lora --on text-classification        # on the other machine

    OUT/checkpoints/minilm/   config, tokenizer, and the weights in 16 bits (safetensors)
    OUT/tokens/               the token ids of all texts; the texts are not included

The weights are rounded to 11 bits of mantissa, half their bytes; a run starts from slightly different weights than with
the original. Needs the extra `hf`, the checkpoint and the data (THINWIRE_DATA).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from thinwire.data.checkpoints import MINILM, find_checkpoint
from thinwire.data.named_texts import READERS
from thinwire.data.text import file_name, tokenize

KEPT = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", default=MINILM)
    parser.add_argument("--data", nargs="+", default=["20newsgroups"], choices=sorted(READERS))
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    source = find_checkpoint(options.checkpoint)
    target = options.out / "checkpoints" / Path(options.checkpoint).name
    target.mkdir(parents=True, exist_ok=True)
    (options.out / "tokens").mkdir(exist_ok=True)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    weights = load_file(source / "model.safetensors")
    small = {name: block.half() if block.dtype == torch.float32 else block for name, block in weights.items()}
    save_file(small, target / "model.safetensors", metadata={"format": "pt"})
    for data in options.data:
        kept = tokenize(READERS[data](None).read(), source, options.length)
        np.savez_compressed(options.out / "tokens" / file_name(data, target, options.length), **kept)
    for file in sorted(path for path in options.out.rglob("*") if path.is_file()):
        print(f"{file.stat().st_size:>12,}  {file.relative_to(options.out)}")
    print(f"{sum(path.stat().st_size for path in options.out.rglob('*') if path.is_file()):>12,}  in total")


if __name__ == "__main__":
    main()
