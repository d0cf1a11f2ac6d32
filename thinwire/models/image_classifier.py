"""Image classifiers of the `transformers` library (extra `hf`), such as ViT: `AutoModelForImageClassification`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.checks import at_least
from thinwire.models.pretrained import load_classifier


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
        self.size = (size, size) if isinstance(size, int) else None if size is None else (int(size[0]), int(size[1]))
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
    load = partial(load_classifier, "ImageClassification", "image classifier", weights_needed=False)
    return ImageClassifier(load(str(folder), classes, dropout))
