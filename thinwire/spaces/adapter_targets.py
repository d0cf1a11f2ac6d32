"""Matrices of a transformer by keyword, for models whose weights are named differently.

    query-value    what peft adapts by default: the projections to queries and values, or the one that makes both
    all-linear     every matrix of a layer: not the embeddings, not the output layer

>>> llama = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.v_proj.weight",
...     "layers.0.mlp.up_proj.weight", "lm_head.weight")
>>> targets(llama, ("query-value",))
('layers.0.self_attn.q_proj.weight', 'layers.0.self_attn.v_proj.weight')
>>> targets(llama, ("all-linear", "!*mlp*"))
('layers.0.self_attn.q_proj.weight', 'layers.0.self_attn.v_proj.weight')
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.attention_names import makes_query_or_value
from thinwire.core.spec import select
from thinwire.errors import ConfigError

QUERY_VALUE = "query-value"
ALL_LINEAR = "all-linear"
KEYWORDS = (QUERY_VALUE, ALL_LINEAR)

_OUTSIDE = ("embed", "lm_head", "wte", "wpe", "classifier", "score", "shared")  # parts of names outside of layers


def targets(matrices: Sequence[str], selectors: Sequence[str]) -> tuple[str, ...]:
    """The matrices that keywords and selectors choose, in their order."""
    patterns: list[str] = []
    for one in selectors:
        patterns += _of_keyword(matrices, one) if one in KEYWORDS else [one]
    return select(matrices, patterns, what="target_modules")


def by_keyword(matrices: Sequence[str], selectors: Sequence[str]) -> frozenset[str]:
    """The matrices that a keyword chooses: they always have an adapter."""
    return frozenset(name for one in selectors if one in KEYWORDS for name in _of_keyword(matrices, one))


def _of_keyword(matrices: Sequence[str], keyword: str) -> list[str]:
    if keyword == ALL_LINEAR:
        found = [name for name in matrices if not any(part in name for part in _OUTSIDE)]
    else:
        found = [name for name in matrices if makes_query_or_value(name.removesuffix(".weight"))]
    if not found:
        shown = ", ".join(matrices[:6]) + (", ..." if len(matrices) > 6 else "")
        raise ConfigError(f"target_modules {keyword!r} matches no matrix; write selectors; the matrices are {shown}")
    return found
