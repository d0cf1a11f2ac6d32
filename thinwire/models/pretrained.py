"""Classify with a pretrained model from the `transformers` library, which the extra `hf` brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.checks import at_least, probability

_FORMS = ("all", "past", "bits")


class Pretrained(nn.Module):
    """A `transformers` classifier that gives plain logits and makes no choice that depends on the data.

    Given one bit a word as mask, many of these models look whether any word is masked before they choose their way:
    `torch.func.vmap` forbids that, and a GPU must wait for it. So the mask is handed over ready-made, as numbers to add
    to the attention scores:

        mask[query, key] = 0 where key is a word (and key <= query, for models that see the past only), else the lowest

    Which of these a model means by its bits, or whether it takes bits only, is found with one small example.

    Args:
        model: a model of `AutoModelForSequenceClassification`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.form = "bits"
        self.form = self._tried()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:  # (n, length) each -> (n, classes)
        """Logits of a batch of texts; without a mask everything is a word."""
        words = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        kinds = {} if token_type_ids is None else {"token_type_ids": token_type_ids.long()}
        out: Tensor = self.model(input_ids=input_ids.long(), attention_mask=self._mask(words), **kinds).logits
        return out

    def _mask(self, words: Tensor) -> Tensor:
        if self.form == "bits":
            return words.long()
        length, dtype = words.shape[1], next(self.model.parameters()).dtype
        seen = words[:, None, None, :].expand(-1, 1, length, -1)  # (n, 1, queries, keys)
        if self.form == "past":
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=words.device).tril()
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    @torch.no_grad()
    def _tried(self) -> str:
        """The first form of mask with which a padded example gets the logits that its bits give it."""
        config: Any = self.model.config
        words = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        known = int(getattr(config, "vocab_size", 2))
        ids = torch.where(words == 1, 5 + torch.arange(10).view(2, 5), _number(config.pad_token_id)) % known
        training = self.training
        self.eval()
        wanted = self(ids, words)
        found = "bits"
        for form in _FORMS:
            self.form = form
            try:
                if torch.allclose(self(ids, words), wanted, rtol=1e-4, atol=1e-5):
                    found = form
                    break
            except (ValueError, TypeError, RuntimeError, IndexError):  # a model that takes one bit a word only
                continue
        self.train(training)
        return found


@register("model", "pretrained", doc="Any Hugging Face checkpoint with a classification head (needs thinwire[hf]).")
def pretrained(classes: int = 2, checkpoint: str = "", dropout: float = 0.0) -> Pretrained:
    """A checkpoint of transformers with a new classification head, in float32.

    Args:
        classes: outputs.
        checkpoint: folder of a checkpoint; the task `text-classification` names its own.
        dropout: everywhere; 0 leaves it out, and only without it a step can be recorded on a GPU.
    """
    at_least(2, classes=classes)
    probability(dropout=dropout)
    if not checkpoint:
        raise ConfigError(
            "model 'pretrained' needs a checkpoint folder: take the task 'text-classification', or write checkpoint"
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("model 'pretrained' needs transformers: pip install 'thinwire[hf]'") from error
    with _quietly(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(checkpoint, local_files_only=True)
            _configure(config, classes, dropout)
            model, facts = transformers.AutoModelForSequenceClassification.from_pretrained(
                checkpoint,
                config=config,
                attn_implementation="eager",  # plain products: fused kernels have no rule for vmap everywhere
                use_safetensors=True,  # other forms are pickles, which can run code
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            said = " ".join(str(error).split())[:160]
            raise ConfigError(f"no text classifier can be made of the checkpoint {checkpoint!r} ({said})") from error
    model = model.float()
    _draw_head(model, facts["missing_keys"])
    return Pretrained(model)


def _configure(config: Any, classes: int, dropout: float) -> None:
    """Outputs, dropout under whichever names the family gives it, and a number that fills up."""
    config.num_labels = classes
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, dropout)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = getattr(config, "eos_token_id", None)


def _draw_head(model: nn.Module, missing: Any) -> None:
    """Draw the matrices that the checkpoint lacks in one order, so that a seed means the same in every version."""
    spread = float(getattr(model.config, "initializer_range", 0.02))
    with torch.no_grad():
        for name, block in model.named_parameters():
            if name in set(missing) and block.dim() > 1:
                block.normal_(0.0, spread)


@contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """No progress bars, and no warning that the head is new; what was set before is set again."""
    said = transformers.utils.logging
    before, bars = said.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity_error()
    said.disable_progress_bar()
    try:
        yield
    finally:
        said.set_verbosity(before)
        if bars:
            said.enable_progress_bar()


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
