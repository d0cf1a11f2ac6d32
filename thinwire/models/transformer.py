"""A transformer of one block for the classification of short texts.

Papers: Vaswani et al., Attention Is All You Need; MAPO (Sent140).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.core.text import Classes, PositiveInt
from thinwire.errors import ConfigError

PAD = 0  # the token of padding


class Attention(nn.Module):
    """Multi-head self-attention.

        head = softmax(Q K^T / sqrt(depth)) V,   Q, K, V = linear maps of x;   out = linear map of all heads

    It uses plain products, because not all fused attention kernels of torch have a batching rule for `torch.func.vmap`.

    Args:
        width: size of a token vector.
        heads: number of heads.
        depth: size of each head.
    """

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, depth
        self.query = nn.Linear(width, heads * depth)
        self.key = nn.Linear(width, heads * depth)
        self.value = nn.Linear(width, heads * depth)
        self.out = nn.Linear(heads * depth, width)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:  # (n, length, width), (n, length) bool -> (n, length, width)
        """Attend to all tokens where `words` is true; padding is masked."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, self.depth)).transpose(1, 2)  # (n, heads, length, depth)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.depth)
        # a large negative value instead of minus infinity: an empty text must not give NaN
        scores = torch.where(words[:, None, None, :], scores, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TextClassifier(nn.Module):
    """A text classifier: token and position embeddings, one transformer block, mean over the tokens.

        x = E[word] + P[position];   x = LN1(x + attention(x));   x = LN2(x + W2 relu(W1 x));   logits = W mean(x)

    Args:
        vocab: size of the vocabulary; token 0 is padding.
        length: maximum number of tokens.
        classes: number of classes.
        width: size of a token vector.
        heads: number of attention heads.
        depth: size of each head.
        inner: width of the feed-forward layer.

    >>> model = TextClassifier(50, 10, 2)
    >>> codes = torch.tensor([[4, 7, 9]])
    >>> padded = torch.tensor([[4, 7, 9, 0, 0]])
    >>> torch.allclose(model(codes), model(padded), atol=1e-5)
    True
    """

    def __init__(
        self,
        vocab: int,
        length: int,
        classes: int,
        *,
        width: int = 96,
        heads: int = 8,
        depth: int = 64,
        inner: int = 512,
    ) -> None:
        super().__init__()
        self.length = length
        self.word = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)
        self.attention = Attention(width, heads, depth)
        self.norm1 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, inner)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(inner, width)
        self.norm2 = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, codes: Tensor) -> Tensor:  # (n, up to length) int64 -> (n, classes)
        """Logits of a batch of texts."""
        steps = codes.shape[1]
        if steps > self.length:
            raise ConfigError(
                f"texts of {steps} tokens in a model of length={self.length}: truncate them, or build a longer model"
            )
        words = codes != PAD
        x = self.word(codes) + self.position.weight[:steps]
        x = self.norm1(x + self.attention(x, words))
        x = self.norm2(x + self.fc2(self.relu(self.fc1(x))))
        weight = words[..., None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1).clamp(min=1))


@register(
    "model", "transformer-sent140", doc="Transformer of one block, for the sentiment of short messages.", paper="MAPO"
)
def transformer_sent140(classes: Classes = 2, length: PositiveInt = 40, vocab: Classes = 20000) -> TextClassifier:
    """One transformer block, 40 tokens, a vocabulary of 20,000: 2,221,570 parameters.

    Width 96, 8 heads of 64, feed-forward width 512. MAPO reports only the count; these sizes match it with a round
    vocabulary and length.
    """
    return TextClassifier(vocab, length, classes)
