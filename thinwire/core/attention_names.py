"""Names of the layers that make queries and values in transformers, by which adapters and frozen layers are chosen."""

from __future__ import annotations

# Llama, Qwen, Gemma, Mistral and OPT; BERT, RoBERTa and ViT; DistilBERT; T5; GPT-2; Phi-3; Falcon; MPT.
QUERY_VALUE = frozenset(
    (
        *("q_proj", "v_proj", "query", "value", "q_lin", "v_lin", "q", "v"),
        *("c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv"),
    )
)


def makes_query_or_value(layer: str) -> bool:
    """Whether a layer makes queries or values, or both in one product.

    >>> makes_query_or_value("model.layers.0.self_attn.q_proj"), makes_query_or_value("model.layers.0.mlp.up_proj")
    (True, False)
    """
    return layer.rpartition(".")[2] in QUERY_VALUE
