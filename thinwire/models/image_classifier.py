"""Image classifiers of the `transformers` library (extra `hf`), such as ViT: `AutoModelForImageClassification`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.checks import at_least, probability
from thinwire.models.pretrained import draw_head, quiet, set_dropout


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
        out: Tensor = self.model(pixel_values=x.expand(-1, self.channels, -1, -1)).logits
        return out


@register("model", "image-classifier", doc="Any Hugging Face image classifier, such as ViT (needs thinwire[hf]).")
def image_classifier(classes: int = 2, checkpoint: str = "", dropout: float = 0.0) -> ImageClassifier:
    """A checkpoint of transformers with a new classification head, in float32; from a configuration, random weights.

    Args:
        classes: number of classes.
        checkpoint: a folder with config.json and, for pretrained weights, safetensors files.
        dropout: dropout probability of all layers; CUDA graphs require 0.
    """
    at_least(2, classes=classes)
    probability(dropout=dropout)
    folder = Path(checkpoint).expanduser()
    if not checkpoint or not (folder / "config.json").is_file():
        raise ConfigError(
            f"model 'image-classifier' needs a folder with config.json, not {checkpoint!r}; write task.model.checkpoint"
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("model 'image-classifier' needs transformers: pip install 'thinwire[hf]'") from error
    auto = transformers.AutoModelForImageClassification
    with quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
            config.num_labels = classes
            set_dropout(config, dropout)
            if not list(folder.glob("*.safetensors")):
                return ImageClassifier(auto.from_config(config, attn_implementation="eager").float())
            model, info = auto.from_pretrained(
                str(folder),
                config=config,
                attn_implementation="eager",  # plain products: not all fused kernels have a batching rule for vmap
                use_safetensors=True,  # other formats are pickles, which can run code
                local_files_only=True,
                ignore_mismatched_sizes=True,  # the head of another number of classes is replaced
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            reason = " ".join(str(error).split())[:160]
            raise ConfigError(f"no image classifier can be made from {checkpoint!r} ({reason})") from error
    model = model.float()
    new = {*info["missing_keys"], *(str(one[0]) for one in info["mismatched_keys"])}
    draw_head(model, new)
    return ImageClassifier(model)
