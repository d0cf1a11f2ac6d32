"""Classifiers of texts and of images from the `transformers` library (extra `hf`).

Papers: Liu et al., RoBERTa; MAPO (GLUE).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.checks import at_least, probability

_FORMS = ("all", "past", "bits")


class Pretrained(nn.Module):
    """A `transformers` classifier that maps token ids to logits, without control flow that depends on the data.

    Given a mask of one bit per token, many models check whether any token is masked: `torch.func.vmap` does not allow
    that, and it synchronizes the GPU. Instead, an additive attention mask is passed:

        mask[query, key] = 0 if key is a token (and key <= query, for causal models), else the lowest value

    Args:
        model: a model of `AutoModelForSequenceClassification`.
        form: of the mask that it supports: "all" (additive), "past" (additive and causal) or "bits"; by default found
            with one small example.
        pad: the token of padding, which is masked where no mask is given; by default no token is.
    """

    def __init__(self, model: nn.Module, form: str = "", pad: int = -1) -> None:
        super().__init__()
        self.model, self.pad = model, pad
        self.form = form or "bits"
        self.form = form or self._detect_form()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:  # (n, length) each -> (n, classes)
        """Logits of a batch of texts."""
        words = input_ids != self.pad if attention_mask is None else attention_mask != 0
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
def pretrained(classes: int = 2, checkpoint: str = "", dropout: float = 0.0) -> Pretrained:
    """A checkpoint of transformers with a new classification head, in float32.

    Args:
        classes: number of classes.
        checkpoint: folder of a checkpoint; the task `text-classification` sets it.
        dropout: dropout probability of all layers; CUDA graphs require 0.
    """
    at_least(2, classes=classes)
    if not checkpoint:
        raise ConfigError(
            "model 'pretrained' needs a checkpoint folder: use the task 'text-classification', or write checkpoint"
        )
    return Pretrained(load_classifier("SequenceClassification", "text classifier", checkpoint, classes, dropout))


@register(
    "model",
    "roberta-large",
    doc="RoBERTa of 24 layers with a classification head (needs thinwire[hf]).",
    paper="RoBERTa; MAPO",
)
def roberta_large(classes: int = 2, layers: int = 24, width: int = 1024, dropout: float = 0.1) -> Pretrained:
    """RoBERTa of 24 layers with a classification head and random weights: 355,361,794 parameters for two classes.

    MAPO reports 357,199,876: the same model with a second copy of its head (1,051,650) and adapters of rank 8
    (786,432), as peft wraps it. Here each parameter is counted once. For pretrained weights use `pretrained`.

    Args:
        classes: number of classes.
        layers: number of layers.
        width: hidden size, a multiple of 64 (the base model has 768, with 12 layers).
        dropout: dropout probability of all layers, from the global generator of torch; 0 disables it.
    """
    at_least(2, classes=classes)
    at_least(1, layers=layers)
    at_least(64, width=width)
    probability(dropout=dropout)
    if width % 64:
        raise ConfigError(f"width = {width}: expected a multiple of 64, the size of an attention head")
    transformers = library("model 'roberta-large'")
    config = transformers.RobertaConfig(
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_labels=classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",  # plain products: the fused kernel has no batching rule for vmap on a CPU
    )
    # stated, because a model without values (device "meta") cannot be tried
    form = "all" if int(transformers.__version__.split(".")[0]) >= 5 else "bits"
    return Pretrained(transformers.RobertaForSequenceClassification(config), form, pad=1)


class ImageClassifier(nn.Module):
    """A `transformers` image classifier that maps images to logits.

    Images are resized to the size of the checkpoint; a grey image is repeated for each of its channels.

    Args:
        model: a model of `AutoModelForImageClassification`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        size = getattr(config, "image_size", None)
        self.size = (size, size) if isinstance(size, int) else size and tuple(size)
        self.channels = int(getattr(config, "num_channels", 3))

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, h, w) -> (n, classes)
        """Logits of a batch of images."""
        if x.dim() == 3:
            x = x[:, None]
        if x.dim() != 4 or x.shape[1] not in (1, self.channels):
            raise ConfigError(
                f"images of shape {tuple(x.shape[1:])}: this model takes (1 or {self.channels}, height, width)"
            )
        if self.size is not None and tuple(x.shape[2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bilinear", align_corners=False)
        return self.model(pixel_values=x.expand(-1, self.channels, -1, -1)).logits


@register("model", "image-classifier", doc="Any Hugging Face image classifier, such as ViT (needs thinwire[hf]).")
def image_classifier(classes: int = 2, checkpoint: str = "", dropout: float = 0.0) -> ImageClassifier:
    """A checkpoint of transformers with a new classification head, in float32; from a configuration, random weights.

    Args:
        classes: number of classes.
        checkpoint: a folder with config.json and, for pretrained weights, safetensors files.
        dropout: dropout probability of all layers; CUDA graphs require 0.
    """
    at_least(2, classes=classes)
    folder = Path(checkpoint).expanduser()
    if not checkpoint or not (folder / "config.json").is_file():
        raise ConfigError(
            f"model 'image-classifier' needs a folder with config.json, not {checkpoint!r}; write task.model.checkpoint"
        )
    name = str(folder)
    model = load_classifier("ImageClassification", "image classifier", name, classes, dropout, weights_needed=False)
    return ImageClassifier(model)


def load_classifier(
    auto: str, what: str, checkpoint: str, classes: int, dropout: float, *, weights_needed: bool = True
) -> nn.Module:
    """A checkpoint of transformers with a new head, in float32.

    Args:
        auto: the class `AutoModelFor...`.
        what: the kind of model, for error messages.
        checkpoint: the folder.
        classes: number of classes.
        dropout: dropout probability of all layers.
        weights_needed: whether a folder without weights is refused; otherwise they are random.
    """
    probability(dropout=dropout)
    transformers = library(f"a {what}")
    family = getattr(transformers, f"AutoModelFor{auto}")
    eager = {"attn_implementation": "eager"}  # plain products: not all fused kernels have a batching rule for vmap
    with loading(transformers, what, checkpoint):
        config = transformers.AutoConfig.from_pretrained(checkpoint, local_files_only=True)
        config.num_labels = classes
        set_dropout(config, dropout)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = getattr(config, "eos_token_id", None)
        if not weights_needed and not any(Path(checkpoint).glob("*.safetensors")):
            return family.from_config(config, **eager).float()
        model, info = family.from_pretrained(
            checkpoint,
            config=config,
            use_safetensors=True,  # other formats are pickles, which can run code
            local_files_only=True,
            ignore_mismatched_sizes=True,  # the head of another number of classes is replaced
            output_loading_info=True,
            **eager,
        )
    new = {*info["missing_keys"], *(str(one[0]) for one in info["mismatched_keys"])}
    std = float(getattr(model.config, "initializer_range", 0.02))
    with torch.no_grad():
        for name, block in model.float().named_parameters():  # in a fixed order, so that a seed is reproducible
            if name in new and block.dim() > 1:
                block.normal_(0.0, std)
    return model


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
