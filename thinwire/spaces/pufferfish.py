"""Late convolutions of low rank, early layers dense (Pufferfish).

Paper: Wang, Agarwal and Papailiopoulos, Pufferfish, MLSys 2021; a baseline of FedPara (ICLR 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space
from thinwire.spaces.factor_init import draw_exact, initial_std, matrix_factor_std
from thinwire.spaces.factors import check_fraction, is_matrix, none_smaller, out_in_kernel, select_weights


@register("space", "pufferfish", paper="Wang et al., MLSys 2021")
@dataclass(frozen=True)
class Pufferfish(Space):
    """Train late convolutions as a thin convolution followed by a 1x1 one; early and linear layers stay dense.

        W[o, i, k] = sum_r U[o, r] V[r, i, k],      r = ratio O       U: (O, r)   V: (r, I, K, K)

    In a network without convolutions, all its matrices except the last take their place. Weights that would not become
    smaller stay dense. The original trains dense weights first and then factorizes them by singular values; this one,
    as FedPara's baseline, starts with random factors such that W has its usual scale (He's; for gates, that of the
    dense weight).

    Args:
        ratio: r as a share of the outputs.
        first_dense: number of convolutions, counted from the input, that stay dense.
        target_modules: selectors of weights to factorize.
        modules_to_save: selectors of weights to leave dense.

    >>> import torch
    >>> base = {f"conv{i}.weight": torch.zeros(8, 8, 3, 3) for i in (1, 2)}
    >>> {name: tuple(w.shape) for name, w in Pufferfish(first_dense=1).init(base, {}, Key(0)).items()}
    {'conv1.weight': (8, 8, 3, 3), 'conv2.weight/u': (8, 2), 'conv2.weight/v': (2, 8, 3, 3)}

    Not `LowRank`, whose convolutions are thin at inputs and outputs (Tucker-2).
    """

    ratio: float = 0.25
    first_dense: int = 5
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fraction(ratio=self.ratio)
        if not self.ratio:
            raise ConfigError("ratio must be above 0; write for example ratio = 0.25")
        if isinstance(self.first_dense, bool) or not isinstance(self.first_dense, int) or self.first_dense < 0:
            raise ConfigError(f"first_dense must be an integer of 0 or more, not {self.first_dense!r}")

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError unless at least one weight becomes smaller."""
        self.ranks(spec)

    def ranks(self, spec: Spec) -> dict[str, int]:
        """Return the rank of every factorized weight, by name."""
        chosen = select_weights(spec, self.target_modules, self.modules_to_save, "Pufferfish")
        chosen = tuple(block for block in chosen if not is_matrix(block.shape)) or chosen[:-1] or chosen
        late = chosen[self.first_dense :]
        if not late:
            raise ConfigError(
                f"Pufferfish: first_dense = {self.first_dense} leaves nothing to factorize of {len(chosen)} weights "
                f"({', '.join(block.name for block in chosen[:6])}); write a smaller first_dense"
            )
        ranks = {}
        for block in late:
            o, i, k = out_in_kernel(block.shape)
            rank = max(1, int(o * self.ratio))
            if rank * (o + i * k) < block.numel:
                ranks[block.name] = rank
        if not ranks:
            raise none_smaller("Pufferfish", late)
        return ranks

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return an empty basis: factors are coordinates."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return random factors, and dense weights from the base."""
        ranks = self.ranks(Spec.of(base))
        coords: Tree = {}
        for name, w in base.items():
            if name not in ranks:
                coords[name] = w
                continue
            rank = ranks[name]
            std = matrix_factor_std(initial_std(name, w), rank)
            coords[f"{name}/u"] = draw_exact(key, name, "u", (w.shape[0], rank), std, w)
            coords[f"{name}/v"] = draw_exact(key, name, "v", (rank, *w.shape[1:]), std, w)
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return products of factors, and dense weights."""
        out: Tree = {}
        for name, w in base.items():
            if name in coords:
                out[name] = coords[name]
            else:
                thin = coords[f"{name}/v"]
                out[name] = (coords[f"{name}/u"] @ thin.reshape(thin.shape[0], -1)).reshape(w.shape)
        return out
