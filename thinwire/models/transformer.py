"""Classify short texts with one block of attention.

Papers: Vaswani et al., Attention Is All You Need; MAPO (Sent140).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.checks import at_least

PAD = 0  # the word code that fills a text up to the common length


class Attention(nn.Module):
    """Every word gathers from the words it finds relevant, in several independent ways (heads).

        head = softmax(Q K^T / sqrt(depth)) V,   Q, K, V = linear maps of x;   out = linear map of all heads

    Plain products instead of torch's fused attention, whose kernels do not all have a rule for `torch.func.vmap`.
    """

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, depth
        self.query = nn.Linear(width, heads * depth)
        self.key = nn.Linear(width, heads * depth)
        self.value = nn.Linear(width, heads * depth)
        self.out = nn.Linear(heads * depth, width)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:  # (n, length, width), (n, length) bool -> (n, length, width)
        """The gathered words; positions that are no words are not looked at."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, self.depth)).transpose(1, 2)  # (n, heads, length, depth)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.depth)
        # A large negative number, not minus infinity: a text without any word must not become NaN.
        scores = torch.where(words[:, None, None, :], scores, -1e9)
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class TextClassifier(nn.Module):
    """Word and position vectors, one attention block, and the mean over the words.

        x = E[word] + P[position];   x = LN1(x + attention(x));   x = LN2(x + W2 relu(W1 x));   logits = W mean(x)

    Args:
        vocab: word codes; code 0 fills up short texts and counts for nothing.
        length: most words in a text.
        classes: outputs.
        width: numbers a word.
        heads, depth: attention heads, and numbers in each.
        inner: width of the layer between W1 and W2.

    >>> model = TextClassifier(50, 10, 2)
    >>> codes = torch.tensor([[4, 7, 9]])
    >>> filled = torch.tensor([[4, 7, 9, 0, 0]])
    >>> torch.allclose(model(codes), model(filled), atol=1e-5)
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
        at_least(2, vocab=vocab, classes=classes)
        at_least(1, length=length, width=width, heads=heads, depth=depth, inner=inner)
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
                f"texts of {steps} words in a model of length={self.length}: cut them, or build it longer"
            )
        words = codes != PAD
        x = self.word(codes) + self.position.weight[:steps]
        x = self.norm1(x + self.attention(x, words))
        x = self.norm2(x + self.fc2(self.relu(self.fc1(x))))
        share = words[..., None].to(x.dtype)
        out: Tensor = self.head((x * share).sum(1) / share.sum(1).clamp(min=1))
        return out


@register("model", "transformer-sent140", doc="One attention block, for the mood of short messages.", paper="MAPO")
def transformer_sent140(classes: int = 2, length: int = 40, vocab: int = 20000) -> TextClassifier:
    """One attention block over 40 words out of 20,000: 2,221,570 weights.

    Vectors of 96, 8 heads of 64, 512 in between. MAPO prints only the count; this is the one network found that gives
    it with a round vocabulary and length.
    """
    return TextClassifier(vocab, length, classes)
