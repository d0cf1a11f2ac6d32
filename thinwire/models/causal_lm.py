"""Causal language models of the `transformers` library (extra `hf`): any checkpoint of `AutoModelForCausalLM`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.core.recording import is_recorded
from thinwire.core.registry import register
from thinwire.core.text import BelowOne
from thinwire.errors import ConfigError
from thinwire.models.pretrained import additive, library as library, loading, quiet, set_dropout
from thinwire.models.quantized import quantize

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CausalLM(nn.Module):
    """A `transformers` language model that maps tokens to the logits of the next ones, where they are needed.

    Logits take most of the memory of a small model with many tokens. They are computed at `label_positions` only: a
    hook before the output layer picks the hidden states, so that everything that a model does with its logits stays.

    Rows are padded at the end. Attention is causal, so no token sees the padding, and no mask is passed.

    Args:
        model: a model of `AutoModelForCausalLM`.
    """

    independent_rows = True  # no row of a batch influences another: rows of many clients can be one batch

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.positions: Tensor | None = None  # of the forward pass that runs
        head = model.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise ConfigError(f"{type(model).__name__} has no output layer; expected a causal language model")
        head.register_forward_pre_hook(self._pick)

    def forward(
        self, input_ids: Tensor, label_positions: Tensor | None = None
    ) -> Tensor:  # (n, length), (n, labels) -> (n, labels, tokens)
        """Logits at the given positions; without them, at all."""
        mask = self._mask(input_ids)
        self.positions = label_positions
        try:
            found = self.model(input_ids=input_ids, attention_mask=mask, use_cache=False)
        finally:
            self.positions = None
        return found.logits

    @torch.no_grad()
    def generate(self, prompts: Sequence[np.ndarray], new_tokens: int) -> list[list[int]]:
        """The tokens that follow each prompt, chosen greedily; at most so many, fewer where an answer ends."""
        model: Any = self.model
        ends = model.config.eos_token_id
        pad = next((one for one in (model.config.pad_token_id, *np.atleast_1d(ends)) if one is not None), 0)
        width = max(map(len, prompts))  # padded at the front: the next token follows the last one
        ids, words = (
            torch.from_numpy(np.stack([np.pad(row, (width - len(row), 0), constant_values=fill) for row in rows]))
            for rows, fill in ((prompts, pad), (map(np.ones_like, prompts), 0))
        )
        transformers, device = library("causal-lm"), next(model.parameters()).device
        greedy = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, pad_token_id=int(pad), eos_token_id=ends
        )
        with quiet(transformers):
            made = model.generate(
                ids.long().to(device), attention_mask=words.long().to(device), generation_config=greedy
            )
        return [row[width:] for row in made.tolist()]

    def _pick(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Hook: the hidden states at the positions of labels."""
        if self.positions is None:
            return None
        hidden = args[0]
        index = self.positions[..., None].expand(*self.positions.shape, hidden.shape[-1])
        return (hidden.gather(1, index), *args[1:])

    def _mask(self, input_ids: Tensor) -> Tensor | None:
        """(1, 1, length, length) the causal mask of a recording: that of transformers for `eager` copies to the GPU."""
        config: Any = self.model.config
        length = input_ids.shape[1]
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        own = config._attn_implementation == "eager" and all(w is None or length <= w for w in windows)
        if not own or not is_recorded(input_ids):
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        return additive(seen, next(self.model.parameters()).dtype)


@register("model", "causal-lm", doc="Any causal language model of Hugging Face, or a GGUF file (needs thinwire[hf]).")
def causal_lm(
    checkpoint: str = "",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attention: Literal["eager", "sdpa"] = "eager",
    checkpointing: bool = False,
    dropout: BelowOne = 0.0,
    bits: Literal[4, 8, 32] = 32,
) -> CausalLM:
    """A causal language model with the weights of a checkpoint.

    Args:
        checkpoint: a folder of `transformers`, or a GGUF file, which is converted to `dtype`; the task `causal-lm`
            sets it.
        dtype: type of the weights: float32, bfloat16 or float16. Adapters are float32 all the same.
        attention: `eager`, plain products, or `sdpa`, torch's fused kernels: less memory for long rows, but on a CPU
            slow for clients that are trained together (write engine.backend = "loop").
        checkpointing: compute the layers a second time in the backward pass instead of keeping their activations;
            clients are then trained one after another.
        dropout: dropout probability of all layers; CUDA graphs require 0.
        bits: 4 or 8 keeps all matrices but those of queries and values in blocks of so many bits, as constants
            (`quantized.py`); 32 for the type of the weights.
    """
    if not checkpoint:
        raise ConfigError("model 'causal-lm' needs a checkpoint: use the task 'causal-lm', or write checkpoint")
    transformers = library("causal-lm")
    folder, more = location(Path(checkpoint))
    with loading(transformers, "language model", checkpoint):
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, **more)
        set_dropout(config, dropout)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            attn_implementation=attention,
            local_files_only=True,
            **(more or {"use_safetensors": True}),  # other formats are pickles, which can run code
        )
    if bits != 32:
        quantize(model, bits, DTYPES[dtype])
    model = model.to(DTYPES[dtype])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return CausalLM(model)


def location(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint, and further arguments of `from_pretrained`: of a GGUF file, its name."""
    if checkpoint.suffix != ".gguf":
        return checkpoint, {}
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise ConfigError(f"{checkpoint.name}: a GGUF file needs {' and '.join(missing)}: pip install gguf accelerate")
    return checkpoint.parent, {"gguf_file": checkpoint.name}
