"""Rounding errors of float32 training of VGG16-GN: each layer and each backend against float64.

    python benchmarks/speed/precision.py --device cuda                    all backends of the device
    python benchmarks/speed/precision.py --device cuda --precision tf32   the same with TF32 allowed
    python benchmarks/speed/precision.py --clients 2 --batch 8            smaller, for a CPU
    python benchmarks/speed/precision.py --model resnet20-gn --network    only the network, for any model of speed.py
    python benchmarks/speed/precision.py --saved precision.txt            write a summary of it to docs/benchmarks.md

Backends: `loop` (torch's layers, one client after another), `grouped` (the same under vmap) and, on a GPU
with triton, `fused` (convolutions as matrix products, with the Triton group norm). Weights differ between clients. An
error is |value - reference| / |reference|, as vector norms, the maximum over the clients.

1. **Each layer alone**: inputs, weights and the gradient of the output are those of a float64 pass, rounded to float32;
   the reference computes in float64 from the same rounded values, so that errors of other layers are excluded. Columns:
   output, gradient of the input, gradients of the weights. The first error over --threshold is named.
2. **Layer after layer**: each layer receives the output of the layer before it. `flipped` counts ReLUs and pooling
   maxima that differ from float64. `frozen` repeats the pass with float64's choices: if its gradient is exact, the
   difference is caused by flips alone and no operation is incorrect.
3. **The network**: the error of the gradient of a local step (one call of autograd, or vmap), relative to its norm.

Flips amplify errors: if a share p of the choices flips, gradients change by about sqrt(p), so that 1e-6 in the
activations can be 1e-3 in the gradient. A layer that is incorrect by itself shows in part 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad_and_value, vjp, vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from benchmarks.speed.speed import MODELS
from thinwire.core.parallel import compute_with
from thinwire.core.registry import lookup
from thinwire.core.tree import Tree, stack
from thinwire.data.losses import cross_entropy
from thinwire.kernels.conv import by_products
from thinwire.kernels.support import has_triton
from thinwire.training.functional import Functional

Function = Callable[..., Tensor]  # a function of an input and weights, without a client axis
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
COMMAND = "python benchmarks/speed/precision.py --device cuda > precision.txt, then --saved precision.txt"
SPREAD = 0.05  # distance between the weights of clients, relative to their size


@dataclass(frozen=True, eq=False)
class Layer:
    """One operation of the network: its name, its kind, the names of its weights, and the function."""

    name: str
    kind: str
    weights: tuple[str, ...]
    run: Function


@dataclass(frozen=True, eq=False)
class Passed:
    """The results of one pass at one layer, stacked by client: output, gradients of input and weights."""

    out: Tensor
    by_input: Tensor
    by_weights: tuple[Tensor, ...]


def layers_of(module: nn.Module) -> list[Layer]:
    """The operations of VGG16-GN, in order."""
    made = [_layer(f"features.{i}", part) for i, part in enumerate(module.features)]
    made.append(Layer("aggregator", "aggregator", (), lambda x: x.mean((2, 3))))
    for name in ("fc1", "fc2", "head"):
        made.append(_layer(name, getattr(module, name)))
        if name != "head":
            made.append(Layer(f"{name}.relu", "relu", (), F.relu))
    return made


def _layer(name: str, part: nn.Module) -> Layer:
    names = (f"{name}.weight", f"{name}.bias")
    if isinstance(part, nn.Conv2d):
        return Layer(name, "conv", names, lambda x, w, b: torch.conv2d(x, w, b, part.stride, part.padding))
    if isinstance(part, nn.GroupNorm):
        return Layer(name, "norm", names, lambda x, w, b: F.group_norm(x, part.num_groups, w, b, part.eps))
    if isinstance(part, nn.Linear):
        return Layer(name, "linear", names, F.linear)
    if isinstance(part, nn.MaxPool2d):
        return Layer(name, "pool", (), lambda x: F.max_pool2d(x, part.kernel_size))
    return Layer(name, "relu", (), F.relu)


def frozen(layer: Layer, x: Tensor) -> Function | None:
    """The ReLU or pooling with its choices fixed to those for this input, per client."""
    if layer.kind == "relu":
        chosen = x > 0
        return lambda value, i: torch.where(chosen[i], value, 0)
    if layer.kind == "pool":
        places = [F.max_pool2d(one, 2, return_indices=True)[1] for one in x]
        return lambda value, i: value.flatten(2).gather(2, places[i].flatten(2)).view(places[i].shape)
    return None


def apply(backend: str, run: Function, x: Tensor, weights: Sequence[Tensor], grad: Tensor) -> Passed:
    """Output and gradients of a function with one backend, stacked by client."""

    def one(x: Tensor, weights: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, back = vjp(run, x, *weights)
        return out, back(grad)

    if backend == "loop":
        rows = []
        for i in range(len(x)):
            leaves = [block[i].detach().requires_grad_() for block in (x, *weights)]
            out = run(*leaves)
            rows.append((out.detach(), torch.autograd.grad(out, leaves, grad[i])))
        outs = torch.stack([out for out, _ in rows])
        grads = [torch.stack(blocks) for blocks in zip(*(grads for _, grads in rows), strict=True)]
    else:
        with nullcontext() if backend == "grouped" else by_products():
            outs, grads = vmap(one)(x, tuple(weights), grad)
    return Passed(outs, grads[0], tuple(grads[1:]))


def outputs(backend: str, layers: list[Layer], weights: Tree, x: Tensor) -> list[Tensor]:
    """The input of each layer, and the output of the last, with one backend."""
    seen = [x]
    for layer in layers:
        mine = [weights[name] for name in layer.weights]
        if backend == "loop":
            out = torch.stack([layer.run(seen[-1][i], *(w[i] for w in mine)) for i in range(len(x))])
        else:  # within vjp, as in training: outside it vmap uses other kernels
            with nullcontext() if backend == "grouped" else by_products():
                out = vmap(lambda x, *w: vjp(layer.run, x, *w)[0])(seen[-1], *mine)  # noqa: B023
        seen.append(out)
    return seen


def slope(out: Tensor, targets: Tensor) -> Tensor:
    """The gradient of each client's mean loss with respect to its outputs."""
    out = out.detach().requires_grad_()
    loss = sum(cross_entropy(out[i], targets[i]).mean() for i in range(len(out)))
    return torch.autograd.grad(loss, out)[0]


def through(backend: str, layers: list[Layer], weights: Tree, x: Tensor, targets: Tensor) -> list[Passed]:
    """A forward and backward pass, layer after layer."""
    seen = outputs(backend, layers, weights, x)
    grad, made = slope(seen[-1], targets), []
    for layer, value in reversed(list(zip(layers, seen, strict=False))):
        made.append(apply(backend, layer.run, value, [weights[name] for name in layer.weights], grad))
        grad = made[-1].by_input
    return made[::-1]


def without_flips(
    backend: str, layers: list[Layer], weights: Tree, x: Tensor, targets: Tensor, true: list[Tensor]
) -> list[Passed]:
    """As `through`, with the choices of ReLUs and maxima for the inputs `true`."""
    chosen = [frozen(layer, value) for layer, value in zip(layers, true, strict=False)]
    seen = [x]
    for layer, choice in zip(layers, chosen, strict=True):
        if choice is None:
            seen.append(outputs(backend, [layer], weights, seen[-1])[-1])
        else:
            seen.append(torch.stack([choice(seen[-1][i], i) for i in range(len(x))]))
    grad, made = slope(seen[-1], targets), []
    for layer, choice, value in reversed(list(zip(layers, chosen, seen, strict=False))):
        if choice is None:
            made.append(apply(backend, layer.run, value, [weights[name] for name in layer.weights], grad))
        else:
            leaf = value.detach().requires_grad_()
            out = torch.stack([choice(leaf[i], i) for i in range(len(x))])
            made.append(Passed(out.detach(), torch.autograd.grad(out, leaf, grad)[0], ()))
        grad = made[-1].by_input
    return made[::-1]


def error(value: Tensor, true: Tensor) -> float:
    """The largest relative error of the clients."""
    difference = (value.double() - true).flatten(1).norm(dim=1)
    return float((difference / true.flatten(1).norm(dim=1).clamp(min=1e-300)).max())


def flips(layer: Layer, value: Tensor, true: Tensor) -> tuple[int, int]:
    """How many choices of a ReLU or of pooling differ between two inputs, and how many there are."""
    if layer.kind == "relu":
        return int(((value > 0) != (true > 0)).sum()), value.numel()
    if layer.kind == "pool":
        mine, theirs = (F.max_pool2d(x.flatten(0, 1), 2, return_indices=True) for x in (value, true))
        # a window of zeros only: the choice does not matter, because ReLU passes no gradient
        return int(((mine[1] != theirs[1]) & (theirs[0] > 0)).sum()), mine[0].numel()
    return 0, 0


def cells(passed: Passed, true: Passed) -> list[float]:
    """Errors of the output, of the gradient of the input, and the largest of those of the weights."""
    mine = [error(a, b) for a, b in zip(passed.by_weights, true.by_weights, strict=True)]
    return [error(passed.out, true.out), error(passed.by_input, true.by_input), max(mine, default=0.0)]


def rounded(tree: Tree) -> Tree:
    """Rounded to float32, as float64."""
    return {name: block.float().double() for name, block in tree.items()}


def each_layer(backends: list[str], layers: list[Layer], weights: Tree, x: Tensor, targets: Tensor, over: float) -> str:
    """Part 1. Returns the first error over the threshold, as text."""
    passes = through("loop", layers, weights, x, targets)
    values = outputs("loop", layers, weights, x)[:-1]
    grads = [*(passed.by_input for passed in passes[1:]), slope(passes[-1].out, targets)]
    head("1. each layer alone: output, by input, by weights", backends)
    first = ""
    for layer, value, grad in zip(layers, values, grads, strict=True):
        mine = [weights[name] for name in layer.weights]
        value, grad = value.float(), grad.float()
        true = apply("loop", layer.run, value.double(), mine, grad.double())
        rows = [cells(apply(backend, layer.run, value, [w.float() for w in mine], grad), true) for backend in backends]
        line(f"{layer.name} {layer.kind}", rows)
        for backend, row in zip(backends, rows, strict=True):
            for what, size in zip(("output", "gradient by input", "gradient by weights"), row, strict=True):
                if size > over and not first:
                    first = f"{layer.name} ({layer.kind}) under {backend}: {what} has an error of {size:.2g}"
    return first


def all_layers(backends: list[str], layers: list[Layer], weights: Tree, x: Tensor, targets: Tensor) -> list[str]:
    """Part 2. Returns one line per backend: flips, and the largest gradient error with and without them."""
    true, values = through("loop", layers, weights, x, targets), outputs("loop", layers, weights, x)
    single = {name: block.float() for name, block in weights.items()}
    runs = {backend: through(backend, layers, single, x.float(), targets) for backend in backends}
    still = {backend: without_flips(backend, layers, single, x.float(), targets, values) for backend in backends}
    for name, found in (("2a. layer after layer", runs), ("2b. the same, frozen", still)):
        head(f"{name}: output, by input, by weights", backends)
        for i, layer in enumerate(layers):
            line(f"{layer.name} {layer.kind}", [cells(found[backend][i], true[i]) for backend in backends])
    head("2c. flipped against float64", backends)
    for i, layer in enumerate(layers):
        if layer.kind in ("relu", "pool") and i:
            counts = [flips(layer, runs[backend][i - 1].out, values[i]) for backend in backends]
            print(f"{layer.name + ' ' + layer.kind:24}" + "".join(f"{f'{n} of {of}':>27}" for n, of in counts))
    lines = []
    for backend in backends:
        worst, steady = (
            max(max(cells(found[backend][i], true[i])[1:]) for i in range(len(layers))) for found in (runs, still)
        )
        count = sum(flips(layer, runs[backend][i - 1].out, values[i])[0] for i, layer in enumerate(layers) if i)
        lines.append(
            f"{backend}: {count} flipped, largest gradient error {worst:.2g}, with float64's choices {steady:.2g}"
        )
    return lines


def network(backends: list[str], model: Functional, weights: Tree, x: Tensor, targets: Tensor) -> None:
    """Part 3: the gradient of a local step with each backend against float64 and against the loop."""

    def gradient(backend: str, model: Functional, weights: Tree, x: Tensor) -> Tree:
        model = replace(model, products=None if backend in ("loop", "grouped") else backend)  # type: ignore[arg-type]
        if backend != "loop":
            step = grad_and_value(lambda w, x, y: model.loss(w, {}, x, y, None)[0])
            return vmap(step)(weights, x, targets)[0]
        rows = []
        for i in range(len(x)):
            leaves = {name: block[i].detach().requires_grad_() for name, block in weights.items()}
            loss = model.loss(leaves, {}, x[i], targets[i], None)[0]
            rows.append(dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)))
        return stack(rows)

    twice = replace(model, module=_double(model.module))
    true = gradient("loop", twice, weights, x)
    single = {name: block.float() for name, block in weights.items()}
    found = {backend: gradient(backend, model, single, x.float()) for backend in backends}
    print(f"\n3. the gradient of a step: {'against float64':>20} {'against the loop':>20} {'worst block':>14}")
    for backend in backends:
        flat = {w: torch.cat([b.double().flatten(1) for b in tree.values()], 1) for w, tree in found.items()}
        exact = torch.cat([b.flatten(1) for b in true.values()], 1)
        worst = max(true, key=lambda name: error(found[backend][name], true[name]))
        errors = error(flat[backend], exact), error(flat[backend], flat["loop"])
        largest = error(found[backend][worst], true[worst])
        print(f"{backend:26} {errors[0]:20.3g} {errors[1]:20.3g}   {worst} {largest:.3g}")


def _double(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module).double()


def head(title: str, backends: list[str]) -> None:
    """The first line of a table."""
    print(f"\n{title}\n{'':24}" + "".join(f"{backend:>27}" for backend in backends))


def line(name: str, rows: list[list[float]]) -> None:
    """Print one layer."""
    print(f"{name:24}" + "".join("".join(f"{size:9.1e}" for size in row) for row in rows), flush=True)


def clients_of(module: nn.Module, clients: int, generator: torch.Generator) -> Iterator[Tree]:
    """Weights of several clients, close to those of the module."""
    for _ in range(clients):
        yield {
            name: p.detach().double() * (1 + SPREAD * torch.randn(p.shape, generator=generator).double())
            for name, p in module.named_parameters()
        }


def in_short(printed: str) -> str:
    """The machine, part 2d and the table of part 3 of earlier output, for the page."""
    lines = printed.splitlines()
    start, table = lines.index("2d. in short") + 1, next(i for i, line in enumerate(lines) if line.startswith("3. "))
    end = next((i for i, line in enumerate(lines[table:], table) if not line.strip()), len(lines))
    kept = [*lines[:2], "", *lines[start:end]]
    return "\n".join(["```", *(line for line in kept if not line.startswith("rc ")), "```"])


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="vgg16-gn", choices=list(MODELS))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32"))
    parser.add_argument("--threshold", type=float, default=2e-5, help="relative error above which a layer is reported")
    parser.add_argument("--network", action="store_true", help="only part 3; needed for models other than vgg16-gn")
    parser.add_argument("--saved", type=Path, help="a file with earlier output, to be written to the page")
    options = parser.parse_args()
    if options.saved:
        write_part(PAGE, "precision", in_short(options.saved.read_text()), COMMAND)
        return
    device = torch.device(options.device)
    kind, settings, channels, size, _ = MODELS[options.model]
    torch.manual_seed(0)
    module = lookup("model", kind).make(**settings)
    generator = torch.Generator().manual_seed(1)
    weights = rounded(stack(list(clients_of(module, options.clients, generator))))
    shape = (options.clients, options.batch)
    x = torch.randint(0, 256, (*shape, channels, size, size), generator=generator) / 127.5 - 1
    targets = torch.randint(0, 10, shape, generator=generator).to(device)
    weights, x = {name: block.to(device) for name, block in weights.items()}, x.double().to(device)
    backends = ["loop", "grouped", *(("fused",) if has_triton(device) else ())]
    model = Functional.of(module, device=device)
    print(f"{options.model} on {device}, torch {torch.__version__}, {options.precision}, clients x batch {shape}")
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device), "cuDNN", torch.backends.cudnn.version())
    with compute_with(device, options.precision):
        if device.type == "cuda":
            print("products:", torch.backends.cuda.matmul.fp32_precision, end=", convolutions: ")
            print(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]
        if options.model == "vgg16-gn" and not options.network:
            layers = layers_of(model.module)
            first = each_layer(backends, layers, weights, x, targets, options.threshold)
            print(f"\nfirst over {options.threshold:g}: {first or 'none; every layer alone is exact to rounding'}")
            lines = all_layers(backends, layers, weights, x, targets)
            print("\n2d. in short", f"first layer over {options.threshold:g}: {first or 'none'}", *lines, sep="\n")
        network(backends, model, weights, x, targets)


if __name__ == "__main__":
    main()
