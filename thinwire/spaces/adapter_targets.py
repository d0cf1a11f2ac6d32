"""Matrices of a transformer as peft names them, for models whose weights are named differently.

    query-value    what peft adapts by default: the projections to queries and values, or the one that makes both
    all-linear     every matrix of a layer: not the embeddings, not the output layer
    q_proj         the last part of the name of a layer, as in a list of peft
    regex:...      a regular expression that matches the whole name of a layer, as a string of peft
    *q_proj.weight a selector of thinwire: a pattern of the whole name of a weight

>>> llama = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.v_proj.weight",
...     "layers.0.mlp.up_proj.weight", "lm_head.weight")
>>> targets(llama, ("query-value",)) == targets(llama, ("q_proj", "v_proj")) == targets(llama, ("regex:.*[qv]_proj",))
True
>>> targets(llama, ("all-linear", "!*mlp*"))
('layers.0.self_attn.q_proj.weight', 'layers.0.self_attn.v_proj.weight')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from thinwire.core.attention_names import makes_query_or_value
from thinwire.core.spec import select
from thinwire.errors import ConfigError

QUERY_VALUE = "query-value"
ALL_LINEAR = "all-linear"
KEYWORDS = (QUERY_VALUE, ALL_LINEAR)
REGEX = "regex:"
WRAPPER = "model."  # the name of a model of transformers inside of a model of thinwire

_OUTSIDE = ("embed", "lm_head", "wte", "wpe", "classifier", "score", "shared")  # parts of names outside of layers


def targets(matrices: Sequence[str], selectors: Sequence[str]) -> tuple[str, ...]:
    """The matrices that keywords, names of layers and selectors choose, in their order."""
    patterns: list[str] = []
    for one in selectors:
        found = _named(matrices, one.removeprefix("!"))
        patterns += [one] if found is None else [("!" if one.startswith("!") else "") + name for name in found]
    return select(matrices, patterns, what="target_modules")


def saved(weights: Sequence[str], selectors: Sequence[str]) -> tuple[str, ...]:
    """The weights that are trained without an adapter, by names of modules, as in peft, or by selectors.

    >>> saved(("classifier.dense.weight", "classifier.dense.bias", "fc.weight"), ("classifier",))
    ('classifier.dense.weight', 'classifier.dense.bias')
    """
    patterns: list[str] = []
    for one in selectors:
        inside = [name for name in weights if f".{one}." in f".{name}"] if _is_name(weights, one) else []
        patterns += inside or [one]
    return select(weights, patterns, what="modules_to_save")


def by_keyword(matrices: Sequence[str], selectors: Sequence[str]) -> frozenset[str]:
    """The matrices that a keyword or the name of a layer chooses: they always have an adapter."""
    return frozenset(name for one in selectors if not one.startswith("!") for name in _named(matrices, one) or ())


def layer_names(weight: str) -> tuple[str, str]:
    """The name of the layer of a weight, with and without the wrapper of a model of transformers.

    >>> layer_names("model.model.layers.0.self_attn.q_proj.weight")
    ('model.model.layers.0.self_attn.q_proj', 'model.layers.0.self_attn.q_proj')
    """
    layer = weight.removesuffix(".weight")
    return layer, layer.removeprefix(WRAPPER)


def _named(matrices: Sequence[str], selector: str) -> list[str] | None:
    """The matrices that a keyword, a regular expression or the name of a layer chooses; None for other selectors."""
    if selector in KEYWORDS:
        return _of_keyword(matrices, selector)
    if selector.startswith(REGEX):
        try:
            matches = re.compile(selector.removeprefix(REGEX)).fullmatch
        except re.error as fault:
            raise ConfigError(f"target_modules {selector!r} is no regular expression ({fault})") from None
        return _chosen(matrices, selector, lambda layers: any(map(matches, layers)))
    if _is_name(matrices, selector):
        end = f".{selector}"
        return _chosen(matrices, selector, lambda layers: f".{layers[0]}".endswith(end))
    return None


def _is_name(weights: Sequence[str], selector: str) -> bool:
    """Whether a selector is the name of a module: no pattern, and not the name of a weight."""
    return not any(mark in selector for mark in "*?[!") and selector not in weights


def _chosen(matrices: Sequence[str], selector: str, matches: Callable[[tuple[str, str]], bool]) -> list[str]:
    found = [name for name in matrices if matches(layer_names(name))]
    if not found:
        shown = ", ".join(matrices[:6]) + (", ..." if len(matrices) > 6 else "")
        raise ConfigError(f"target_modules {selector!r} matches no block; the blocks are {shown}")
    return found


def _of_keyword(matrices: Sequence[str], keyword: str) -> list[str]:
    if keyword == ALL_LINEAR:
        found = [name for name in matrices if not any(part in name for part in _OUTSIDE)]
    else:
        found = [name for name in matrices if makes_query_or_value(name.removesuffix(".weight"))]
    if not found:
        shown = ", ".join(matrices[:6]) + (", ..." if len(matrices) > 6 else "")
        raise ConfigError(f"target_modules {keyword!r} matches no matrix; write selectors; the matrices are {shown}")
    return found
