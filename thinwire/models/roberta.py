"""RoBERTa for text classification, from the `transformers` library (extra `hf`).

Papers: Liu et al., RoBERTa; MAPO (GLUE).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.checks import at_least, probability
from thinwire.models.pretrained import library

PAD = 1  # the padding token of RoBERTa; positions start after it


class Roberta(nn.Module):
    """A `transformers` classifier that maps token ids to logits.

    It passes an additive attention mask: given a mask of one bit per token, version 5 of the library branches on the
    data, which `torch.func.vmap` does not allow.

    Args:
        model: a `RobertaForSequenceClassification`.
        ready: whether it accepts an additive mask; before version 5 it accepts bits only.
    """

    def __init__(self, model: nn.Module, *, ready: bool = True) -> None:
        super().__init__()
        self.model, self.ready = model, ready

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # (n, length) -> (n, classes)
        """Logits of a batch of texts; without a mask, all tokens except padding are used."""
        words = input_ids != PAD if attention_mask is None else attention_mask != 0
        position_ids = PAD + torch.cumsum(words, 1) * words
        mask = words.long()
        if self.ready:
            dtype = next(self.model.parameters()).dtype
            mask = torch.where(words, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None, :]
            mask = mask.expand(-1, 1, input_ids.shape[1], -1)  # (n, 1, length, length)
        return self.model(input_ids=input_ids, attention_mask=mask, position_ids=position_ids).logits


@register(
    "model",
    "roberta-large",
    doc="RoBERTa of 24 layers with a classification head (needs thinwire[hf]).",
    paper="RoBERTa; MAPO",
)
def roberta_large(
    classes: int = 2, checkpoint: str = "", layers: int = 24, width: int = 1024, dropout: float = 0.1
) -> Roberta:
    """RoBERTa of 24 layers with a classification head: 355,361,794 parameters for two classes.

    MAPO reports 357,199,876: the same model with a second copy of its head (1,051,650) and adapters of rank 8
    (786,432), as peft wraps it. Here each parameter is counted once.

    Args:
        classes: number of classes.
        checkpoint: folder or name of pretrained weights; empty for random ones.
        layers: number of layers; ignored with a checkpoint.
        width: hidden size, a multiple of 64 (the base model has 768, with 12 layers); ignored with a checkpoint.
        dropout: dropout probability of all layers, from the global generator of torch; 0 disables it.
    """
    at_least(2, classes=classes)
    at_least(1, layers=layers)
    at_least(64, width=width)
    probability(dropout=dropout)
    if width % 64:
        raise ConfigError(f"width = {width}: expected a multiple of 64, the size of an attention head")
    transformers = library("model 'roberta-large'")
    common: dict[str, Any] = {
        "num_labels": classes,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attn_implementation": "eager",  # plain products: the fused kernel has no batching rule for vmap on a CPU
    }
    family = transformers.RobertaForSequenceClassification
    ready = int(transformers.__version__.split(".")[0]) >= 5
    if checkpoint:
        try:
            return Roberta(family.from_pretrained(checkpoint, **common), ready=ready)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no RoBERTa weights at {checkpoint!r}: give the folder of a checkpoint") from error
    config = transformers.RobertaConfig(
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        **common,
    )
    return Roberta(family(config), ready=ready)
