"""Which layers spoke how often, and what that cost: a table for summaries, and a picture.

Bytes are given where the up codec writes one block after another; where it mixes them, no byte belongs to a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from thinwire.core.spec import Block, Spec, layer_of
from thinwire.errors import ConfigError
from thinwire.rounds.tally import Tally
from thinwire.run.files import write_atomically

Layers = list[dict[str, Any]]
BAR, GAP, HEIGHT, LEFT = 18, 6, 180, 90


def layers_of(coords: Spec, tally: Tally) -> Layers:
    """A row for each layer in the order of the model; blocks of one layer that spoke unequally often have their own.

    >>> import torch
    >>> spec = Spec.of({"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2)})
    >>> layers_of(spec, Tally({"fc.weight": 3, "fc.bias": 3}, {"fc.weight": 48, "fc.bias": 24}))
    [{'layer': 'fc', 'numbers': 6, 'syncs': 3, 'bytes_up': 72}]
    >>> [row["layer"] for row in layers_of(spec, Tally({"fc.weight": 3, "fc.bias": 9}, None))]
    ['fc.weight', 'fc.bias']
    """
    modules: dict[str, list[Block]] = {}
    for block in coords:
        modules.setdefault(layer_of(block.name), []).append(block)
    rows = []
    for module, blocks in modules.items():
        alike = len({tally.syncs.get(block.name, 0) for block in blocks}) == 1
        for name, mine in [(module, blocks)] if alike else [(block.name, [block]) for block in blocks]:
            known = tally.bytes_up
            rows.append(
                {
                    "layer": name,
                    "numbers": sum(block.numel for block in mine),
                    "syncs": tally.syncs.get(mine[0].name, 0),
                    "bytes_up": None if known is None else sum(known.get(block.name, 0) for block in mine),
                }
            )
    return rows


def draw_layers(layers: Layers, rounds: int, title: str, file: Path) -> None:
    """Write a picture of synchronisations by layer, and of bytes where they are known.

    Args:
        layers: the table of a run.
        rounds: how many rounds it had; drawn behind the bars.
        title: what stands above.
        file: where to; its name ends in `.svg`.
    """
    if file.suffix != ".svg":
        raise ConfigError(f"the picture is an SVG file: write --plot {file.with_suffix('.svg')}, not {file}")
    panels = [("synchronisations", [row["syncs"] for row in layers], rounds)]
    if all(row["bytes_up"] is not None for row in layers):
        sizes = [row["bytes_up"] for row in layers]
        panels.append(("bytes up", sizes, max(sizes)))
    names = [row["layer"] for row in layers]
    width = max(LEFT + len(names) * (BAR + GAP) + 20, 8 * len(title))
    tall = 40 + len(panels) * (HEIGHT + 40) + 7 * max(map(len, names))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{tall}" font-family="sans-serif" '
        f'font-size="11" fill="#333"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-size="13">{escape(title)}</text>',
    ]
    for i, (label, values, top) in enumerate(panels):
        out += _panel(label, values, max(top, 1), names, foot=70 + HEIGHT + i * (HEIGHT + 40), behind=i == 0)
    foot = 70 + HEIGHT + (len(panels) - 1) * (HEIGHT + 40)
    for place, name in enumerate(names):
        x = LEFT + place * (BAR + GAP) + BAR / 2 + 4
        out.append(f'<text transform="translate({x},{foot + 8}) rotate(-90)" text-anchor="end">{escape(name)}</text>')
    write_atomically(file, ("\n".join([*out, "</svg>"]) + "\n").encode())


def _panel(label: str, values: Sequence[int], top: int, names: Sequence[str], foot: int, behind: bool) -> list[str]:
    """One row of bars that stand on `foot`; pointing at a bar shows its layer and its number."""
    out = [
        f'<text x="10" y="{foot - HEIGHT - 8}">{label}</text>',
        f'<text x="{LEFT - 6}" y="{foot - HEIGHT + 10}" text-anchor="end">{top:,}</text>',
        f'<text x="{LEFT - 6}" y="{foot}" text-anchor="end">0</text>',
    ]
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        x, high = LEFT + place * (BAR + GAP), HEIGHT * value / top
        if behind:
            out.append(f'<rect x="{x}" y="{foot - HEIGHT}" width="{BAR}" height="{HEIGHT}" fill="#e4e4e4"/>')
        out.append(
            f'<rect x="{x}" y="{foot - high:.1f}" width="{BAR}" height="{high:.1f}" fill="#3a6ea5">'
            f"<title>{escape(name)}: {value:,}</title></rect>"
        )
    return out
