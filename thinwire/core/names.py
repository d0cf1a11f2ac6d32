"""Names of blocks and of layers: selectors, and layers that make queries and values in transformers.

>>> select(("fc.weight", "fc.bias"), ("*.weight",))
('fc.weight',)
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from thinwire.errors import ConfigError

R = TypeVar("R")

# Llama, Qwen, Gemma, Mistral and OPT; BERT, RoBERTa and ViT; DistilBERT; T5; GPT-2; Phi-3; Falcon; MPT.
QUERY_VALUE = frozenset(
    (
        *("q_proj", "v_proj", "query", "value", "q_lin", "v_lin", "q", "v"),
        *("c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv"),
    )
)


def weight_of(name: str) -> str:
    """The weight that a coordinate belongs to: its name up to the last slash.

    >>> weight_of("fc.weight/x1"), weight_of("fc.weight"), weight_of("model/b")
    ('fc.weight', 'fc.weight', 'model')
    """
    return name.rpartition("/")[0] or name


def layer_of(name: str) -> str:
    """The layer of a block: the module of the weight, or of the weight that the coordinate belongs to.

    Weights of the outermost module, and coordinates of all weights together, belong to the layer `model`.

    >>> [layer_of(name) for name in ("body.fc.weight", "body.fc.bias", "body.fc.weight/x1", "scale", "model/b")]
    ['body.fc', 'body.fc', 'body.fc', 'model', 'model']
    """
    weight = weight_of(name)
    return weight if "/" in weight else weight.rpartition(".")[0] or "model"


def select(names: Sequence[str], patterns: Sequence[str], *, what: str = "selector") -> tuple[str, ...]:
    """The names that match shell-style patterns, in the order of `names`; a pattern with a leading `!` removes matches.

    Raises a ConfigError for a pattern without a match, which is usually misspelled.

    >>> select(("a.weight", "a.bias", "b.weight"), ("*", "!*.bias"))
    ('a.weight', 'b.weight')
    """
    chosen: set[str] = set()
    for pattern in patterns:
        take = not pattern.startswith("!")
        hit = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        if not hit:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise ConfigError(f"{what} {pattern!r} matches no block; the blocks are {shown}")
        chosen = chosen | hit if take else chosen - hit
    return tuple(name for name in names if name in chosen)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one name matches: the last matching pattern decides. Unlike `select`, patterns without a match are fine.

    >>> matches("a.bias", ("a.*", "!*.bias")), matches("a.weight", ("a.*", "!*.bias"))
    (False, True)
    """
    hits = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(hits) and not hits[-1].startswith("!")


def as_rules(kind: type[R], given: Sequence[Any], what: str) -> tuple[R, ...]:
    """Rules, given as records of `kind` or as pairs `(selector or selectors, value)`, as records, which compare equal.

    Args:
        kind: the record; its first field is `on`, the selectors.
        given: records or pairs.
        what: the name of the setting, for error messages.
    """
    rules = []
    for rule in given:
        if not isinstance(rule, kind):
            if not isinstance(rule, tuple) or len(rule) != 2:
                raise ConfigError(f"{what} must be pairs of selectors and a value, not {rule!r}")
            rule = kind((rule[0],) if isinstance(rule[0], str) else tuple(rule[0]), rule[1])  # type: ignore[call-arg]
        if not rule.on:  # type: ignore[attr-defined]
            raise ConfigError(f"{what}: the rule {rule!r} selects nothing; write for example on = ['*']")
        rules.append(rule)
    return tuple(rules)


def makes_query_or_value(layer: str) -> bool:
    """Whether a layer makes queries or values, or both in one product.

    >>> makes_query_or_value("model.layers.0.self_attn.q_proj"), makes_query_or_value("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return layer.rpartition(".")[2] in QUERY_VALUE
