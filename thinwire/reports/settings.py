"""Configurations as flat tables: which settings differ, and unique labels."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.experiments.overrides import flat as flat
from thinwire.experiments.toml import Table as TomlTable


def without_seed(config: TomlTable) -> TomlTable:
    """A configuration without the keys that runs of one group may differ in.

    These are the seed, the byte accounting, and the fingerprint of initial weights and data, which depend on the seed.
    """
    return {key: value for key, value in config.items() if key not in ("seed", "accounting", "fingerprint")}


def differing(configs: Sequence[TomlTable]) -> list[str]:
    """The dotted paths at which some configurations differ.

    >>> differing([{"rounds": 2, "local": {"lr": 0.1}}, {"rounds": 2, "local": {"lr": 0.2}}])
    ['local.lr']
    """
    flats = [flat(config) for config in configs]
    paths = dict.fromkeys(path for values in flats for path in values)
    return [path for path in paths if any(values.get(path) != flats[0].get(path) for values in flats)]


def unique_labels(names: Sequence[str], configs: Sequence[TomlTable]) -> list[str]:
    """Names of configurations; those with the same name also get the settings in which they differ.

    >>> unique_labels(["a", "a", "b"], [{"k": 1}, {"k": 2}, {}])
    ['a (k 1)', 'a (k 2)', 'b']
    """
    labels = []
    for name, config in zip(names, configs, strict=True):
        same_name = [other for other, other_name in zip(configs, names, strict=True) if other_name == name]
        if len(same_name) > 1:
            values, paths = flat(config), differing([without_seed(other) for other in same_name])
            texts = [f"{path.rsplit('.', 1)[-1]} {values[path]}" for path in paths if path in values]
            name = f"{name} ({', '.join(texts[:3])})" if texts else name
        labels.append(name)
    seen: dict[str, int] = {}
    for i, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            labels[i] = f"{label} #{seen[label]}"
    return labels
