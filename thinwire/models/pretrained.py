"""Classifiers of texts from the `transformers` library (extra `hf`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.core.text import BelowOne, Classes
from thinwire.errors import ConfigError

_FORMS = ("all", "past", "bits")


class Pretrained(nn.Module):
    """A `transformers` classifier that maps token ids to logits, without control flow that depends on the data.

    Given a mask of one bit per token, many models check whether any token is masked: `torch.func.vmap` does not allow
    that, and it synchronizes the GPU. Instead, an additive attention mask is passed:

        mask[query, key] = 0 if key is a token (and key <= query, for causal models), else the lowest value

    Args:
        model: a model of `AutoModelForSequenceClassification`.

    Which form of mask it supports, "all" (additive), "past" (additive and causal) or "bits", is found with one small
    example.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.form = model, "bits"
        self.form = self._detect_form()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:  # (n, length) each -> (n, classes)
        """Logits of a batch of texts."""
        words = torch.ones_like(input_ids) != 0 if attention_mask is None else attention_mask != 0
        kinds = {} if token_type_ids is None else {"token_type_ids": token_type_ids.long()}
        return self.model(input_ids=input_ids.long(), attention_mask=self._mask(words), **kinds).logits

    def _mask(self, words: Tensor) -> Tensor:
        if self.form == "bits":
            return words.long()
        length, dtype = words.shape[1], next(self.model.parameters()).dtype
        seen = words[:, None, None, :].expand(-1, 1, length, -1)  # (n, 1, queries, keys)
        if self.form == "past":
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=words.device).tril()
        return additive(seen, dtype)

    @torch.no_grad()
    def _detect_form(self) -> str:
        """The first form of mask that gives the same logits for a padded example as a mask of bits."""
        config: Any = self.model.config
        words = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        vocabulary = int(getattr(config, "vocab_size", 2))
        ids = torch.where(words == 1, 5 + torch.arange(10).view(2, 5), config.pad_token_id or 0) % vocabulary
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
            except (ValueError, TypeError, RuntimeError, IndexError):  # a model that accepts bits only
                continue
        self.train(training)
        return found


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive attention mask: 0 where a query sees a key, else the lowest value."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


@register("model", "pretrained", doc="Any Hugging Face checkpoint with a classification head (needs thinwire[hf]).")
def pretrained(classes: Classes = 2, checkpoint: str = "", dropout: BelowOne = 0.0) -> Pretrained:
    """A checkpoint of transformers with a new classification head, in float32.

    Args:
        classes: number of classes.
        checkpoint: folder of a checkpoint; the task `text-classification` sets it.
        dropout: dropout probability of all layers; CUDA graphs require 0.
    """
    if not checkpoint:
        raise ConfigError(
            "model 'pretrained' needs a checkpoint folder: use the task 'text-classification', or write checkpoint"
        )
    transformers = library("a text classifier")
    with loading(transformers, "text classifier", checkpoint):
        config = transformers.AutoConfig.from_pretrained(checkpoint, local_files_only=True)
        config.num_labels = classes
        set_dropout(config, dropout)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = getattr(config, "eos_token_id", None)
        model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
            checkpoint,
            config=config,
            use_safetensors=True,  # other formats are pickles, which can run code
            local_files_only=True,
            ignore_mismatched_sizes=True,  # the head of another number of classes is replaced
            output_loading_info=True,
            attn_implementation="eager",  # plain products: not all fused kernels have a batching rule for vmap
        )
    new = {*info["missing_keys"], *(str(one[0]) for one in info["mismatched_keys"])}
    std = float(getattr(model.config, "initializer_range", 0.02))
    with torch.no_grad():
        for name, block in model.float().named_parameters():  # in a fixed order, so that a seed is reproducible
            if name in new and block.dim() > 1:
                block.normal_(0.0, std)
    return Pretrained(model)


def library(what: str) -> Any:
    """The package transformers, an optional dependency."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"{what} needs transformers: pip install 'thinwire[hf]'") from error
    return transformers


@contextmanager
def loading(transformers: Any, what: str, checkpoint: str) -> Iterator[None]:
    """Errors of transformers become one line that names the checkpoint; its progress bars and warnings are off."""
    with quiet(transformers):
        try:
            yield
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            reason = " ".join(str(error).split())[:160]
            raise ConfigError(f"no {what} can be made from {checkpoint!r} ({reason})") from error


def set_dropout(config: Any, dropout: float) -> None:
    """Set all dropout probabilities of a configuration of transformers."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, dropout)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Disable progress bars and the warning about a new head; restores the settings afterwards."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
