"""Time our kernels against those of torch, mostly on a GPU, and compare the results.

    python benchmarks/speed/kernels.py --device cuda --json kernels.json
    python benchmarks/speed/kernels.py --device cuda --tune          # block sizes other than the defaults
    python benchmarks/speed/kernels.py --device cpu                  # MAPA with signs from a lookup table, on a CPU
    python benchmarks/speed/kernels.py --table kernels.json          # write the results of --json to docs/benchmarks.md

Convolutions of a cohort with different weights per client (32 images each): microseconds of the fused kernels and of
grouped cuDNN, each replayed from a CUDA graph, so that launches are not counted. `difference` is the
largest difference from float64 on the first client, relative to the largest value. MAPA: G entries/s of A b and A^T g
at d = 1,146,634, p = 1,024, and the difference from the implementation that stores A.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from thinwire.core.key import Key
from thinwire.kernels import projection as generated
from thinwire.kernels.support import has_triton

IMAGES = 32
# channels in, size, channels out, kernel, stride, padding
SHAPES = {
    "cnn2": [(1, 28, 8, 5, 1, 2), (8, 14, 16, 5, 1, 2)],
    "cnn-cifar": [(3, 32, 64, 5, 1, 2), (64, 16, 128, 5, 1, 2), (128, 8, 128, 5, 1, 2)],
    "resnet20": [(16, 32, 16, 3, 1, 1), (16, 32, 32, 3, 2, 1), (32, 16, 32, 3, 1, 1), (64, 8, 64, 3, 1, 1)],
    "vgg16": [(64, 32, 64, 3, 1, 1), (128, 16, 128, 3, 1, 1), (256, 8, 256, 3, 1, 1), (512, 4, 512, 3, 1, 1)],
}
# model, cohort, precisions; "ieee" multiplies float32 without tensor cores
PLAN = [
    ("cnn2", 10, ("float32", "tf32", "ieee")),
    ("cnn-cifar", 10, ("float32", "tf32", "bf16", "ieee")),
    ("resnet20", 32, ("tf32", "bf16")),
    ("vgg16", 32, ("tf32", "bf16")),
    ("cnn2", 32, ("float32",)),
    ("cnn-cifar", 32, ("tf32",)),
]
OPERATIONS = ("forward", "by input", "by kernel")
D, P = 1_146_634, 1_024
BLOCKS = {
    "sign": [(64, 256, 4), (64, 128, 4), (32, 256, 4), (128, 128, 4), (64, 256, 8), (128, 256, 8), (64, 512, 8)],
    "gaussian": [(32, 128, 4), (16, 128, 4), (64, 64, 4), (32, 64, 4), (32, 128, 8), (64, 128, 8)],
}


class Case(NamedTuple):
    """One convolution."""

    model: str
    clients: int
    shape: tuple[int, int, int, int, int, int]
    precision: str


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Set the precision of float32 products, in torch and in our kernels."""
    from thinwire.kernels import conv_triton as kernels

    kind = "tf32" if precision == "tf32" else "ieee"
    places: Any = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before, exact = [place.fp32_precision for place in places], kernels.EXACT
    for place in places:
        place.fp32_precision = kind
    kernels.EXACT = "ieee" if precision == "ieee" else exact
    yield
    for place, value in zip(places, before, strict=True):
        place.fp32_precision = value
    kernels.EXACT = exact


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, kernel, bias and gradient as in training: channels last, except for the input images."""
    i, size, o, k, stride, padding = case.shape
    c, kind = case.clients, torch.bfloat16 if case.precision == "bf16" else torch.float32
    out = (size + 2 * padding - k) // stride + 1
    make = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, device="cuda").to(kind)

    x = draw(c, IMAGES, size, size, i).permute(0, 1, 4, 2, 3)
    x = x if i > 3 else x.contiguous()
    return x, draw(c, o, i, k, k), draw(c, o), draw(c, IMAGES, out, out, o).permute(0, 1, 4, 2, 3)


def implementations(case: Case) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """The measured functions, by operation, then by implementation."""
    from thinwire.kernels import conv_triton as kernels

    i, size, o, k, stride, padding = case.shape
    x, kernel, bias, grad = operands(case)
    c, s, p = case.clients, (stride, stride), (padding, padding)
    wide = x.transpose(0, 1).reshape(IMAGES, c * i, size, size)  # the layout under vmap
    wide_kernel, wide_grad = kernel.flatten(0, 1), grad.transpose(0, 1).flatten(1, 2)

    def backward(mask: list[bool]) -> Tensor:
        made = torch.ops.aten.convolution_backward(
            wide_grad, wide, wide_kernel, [c * o], s, p, [1, 1], False, [0, 0], c, mask
        )
        return made[0].view(IMAGES, c, i, size, size).transpose(0, 1) if mask[0] else made[1].view(c, o, i, k, k)

    def grouped() -> Tensor:
        out = F.conv2d(wide, wide_kernel, bias.flatten(), s, p, groups=c)
        return out.view(IMAGES, c, o, *out.shape[-2:]).transpose(0, 1)

    made = {
        "forward": {
            "fused": lambda: kernels.forward(x, kernel, bias, s, p),
            "grouped": grouped,
        },
        "by input": {
            "fused": lambda: kernels.input_gradient(grad, kernel, (size, size), s, p),
            "grouped": lambda: backward([True, False, False]),
        },
        "by kernel": {
            "fused": lambda: kernels.kernel_gradient(grad, x, (k, k), s, p, True)[0],
            "grouped": lambda: backward([False, True, True]),
        },
    }
    if i <= 3:
        del made["by input"]  # the gradient of the input images is not needed
    return made


def wanted(case: Case) -> dict[str, Tensor]:
    """The results for the first client, in float64."""
    x, kernel, bias, grad = (block[0].double() for block in operands(case))
    stride, padding = case.shape[4:]
    with torch.enable_grad():
        x, kernel = x.requires_grad_(), kernel.requires_grad_()
        out = F.conv2d(x, kernel, bias, stride, padding)
        by_x, by_kernel = torch.autograd.grad((out * grad).sum(), (x, kernel))
    return {"forward": out.detach(), "by input": by_x, "by kernel": by_kernel}


def microseconds(fn: Callable[[], Any], calls: int = 5) -> float:
    """Time of a call inside a CUDA graph: the best of three replays of several calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    graph.replay()
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / calls)
    del graph
    return best


def first_line(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:150]


def relative_difference(found: Tensor, true: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found.double() - true).abs().max() / true.abs().max())


def measure(case: Case) -> dict[str, Any]:
    """All operations of one convolution."""
    i, size, o, k, stride, padding = case.shape
    row: dict[str, Any] = {**case._asdict()}
    with arithmetic(case.precision):
        true = wanted(case)
        out = (size + 2 * padding - k) // stride + 1
        flops = 2 * case.clients * IMAGES * out * out * o * i * k * k
        for operation, kinds in implementations(case).items():
            mine = row[operation] = {}
            for kind, fn in kinds.items():
                try:
                    mine[kind] = {"us": microseconds(fn), "difference": relative_difference(fn()[0], true[operation])}
                    mine[kind]["tflops"] = flops / mine[kind]["us"] / 1e6
                except Exception as error:
                    mine[kind] = {"error": first_line(error)}
    torch.cuda.empty_cache()
    return row


def line(row: dict[str, Any]) -> str:
    """A row as text: microseconds fused/grouped, then TFLOP/s and difference of the fused one."""
    i, size, o, k, stride, _ = row["shape"]
    text = f"{row['model']:9} c{row['clients']:<3} {i:>3}>{o:<3} k{k} s{stride} {size:>2} {row['precision']:7}"
    errors = []
    for operation in OPERATIONS:
        if operation not in row:
            text += f" |{'':32}"
            continue
        cells = []
        for kind in ("fused", "grouped"):
            found = row[operation][kind]
            cells.append(f"{found['us']:.0f}" if "us" in found else "fail")
            if "error" in found:
                errors.append(f"    {operation} {kind}: {found['error']}")
        mine = row[operation]["fused"]
        more = f"{mine['tflops']:4.0f}T {mine['difference']:.0e}" if "us" in mine else ""
        text += f" | {'/'.join(cells):>17} {more:>13}"
    return "\n".join([text, *errors])


def warm(fns: list[Callable[[], Any]]) -> None:
    """Compile in parallel: most of the compiler runs without Python's lock."""

    def quietly(fn: Callable[[], Any]) -> None:
        with suppress(Exception):  # raised again, and reported, when it is measured
            fn()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(quietly, fns))
    torch.cuda.synchronize()


def convolutions(plan: list[tuple[str, int, tuple[str, ...]]], until: float) -> list[dict[str, Any]]:
    """Measure all convolutions until the time limit."""
    print("us fused/grouped, TFLOP/s and difference of fused: forward | gradient by input | by kernel and bias")
    rows = []
    for model, clients, precisions in plan:
        cases = [Case(model, clients, shape, precision) for precision in precisions for shape in SHAPES[model]]
        for precision in precisions:  # the precision is a setting of the process: compile one at a time
            with arithmetic(precision):
                few = [case for case in cases if case.precision == precision]
                warm([kinds["fused"] for case in few for kinds in implementations(case).values()])
        for case in cases:
            if time.monotonic() > until:
                print("no time left for", *case, flush=True)
                continue
            try:
                rows.append(measure(case))
                print(line(rows[-1]), flush=True)
            except Exception as error:
                print(*case, first_line(error), flush=True)
    return rows


def drawn(until: float) -> list[dict[str, Any]]:
    """Measure MAPA's products: the first blocks are compared with the reference, all are timed."""
    from thinwire.kernels import projection_triton as fused

    words = generated.key_words(Key(5).fold("frame", 1), "cuda")
    print("MAPA: G entries/s of A b and of A^T g, by rows, columns and warps of a block")
    given = {n: (torch.randn(n, P, device="cuda"), torch.randn(n, D, device="cuda")) for n in (1, 10)}
    jobs: dict[tuple, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {}
    for entries, blocks in BLOCKS.items():
        for vectors, block in [(1, blocks[0]), (10, blocks[0]), *((1, block) for block in blocks[1:])]:
            up = partial(fused.expand, given[vectors][0], words, P, D, entries, 1.0, block)
            jobs[entries, vectors, block] = (
                up,
                partial(fused.project, given[vectors][1], words, P, D, entries, 1.0, block),
            )
    warm([fn for pair in jobs.values() for fn in pair])
    rows: list[dict[str, Any]] = []
    for (entries, vectors, block), pair in jobs.items():
        if time.monotonic() > until:
            print("no time left for", entries, vectors, block, flush=True)
            continue
        row: dict[str, Any] = {"entries": entries, "vectors": vectors, "block": block, "deterministic": True}
        try:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            for fn in pair:
                row["deterministic"] &= torch.equal(fn(), fn())
            row["MB"] = (torch.cuda.max_memory_allocated() - before) / 1e6
            for name, fn in zip(("expand", "project"), pair, strict=True):
                row[name] = P * D / microseconds(fn, 2) / 1e3
            text = f"{entries:8} x{vectors:<2} {block!s:14} {row['expand']:6.0f} {row['project']:6.0f}"
            text += f" {row['MB']:5.0f} MB, deterministic {row['deterministic']}"
            if block == BLOCKS[entries][0] and vectors == 1:
                torch.cuda.synchronize()
                began = time.perf_counter()
                far = words.cpu()  # a key on the host stores A in memory
                true = [
                    generated._Product.apply(vector, far, P, D, entries, 1.0, back)
                    for back, vector in zip((False, True), given[1], strict=True)
                ]
                torch.cuda.synchronize()
                row["reference"] = 2 * P * D / (time.perf_counter() - began) / 1e9
                row["difference"] = [
                    relative_difference(fn(), reference.double()) for fn, reference in zip(pair, true, strict=True)
                ]
                text += ", difference {:.0e} {:.0e}".format(*row["difference"])
                text += f"; reference {row['reference']:.0f}"
            rows.append(row)
            print(text, flush=True)
        except Exception as error:
            print(entries, vectors, block, first_line(error), flush=True)
    return rows


def looked_up(turns: int = 5) -> dict[str, float]:
    """MAPA with signs on a CPU: the shortest seconds of A b and of A^T g, and CPU seconds of both."""
    from thinwire.kernels import projection_cpu as packed

    key, b, g = Key(1), Key(2).normal(P), Key(3).normal(D)
    took: list[dict[str, float]] = []
    for _ in range(turns):
        cpu, began = time.process_time(), time.perf_counter()
        packed.expand(b, key, P, D, 1.0)
        middle = time.perf_counter()
        packed.project(g, key, P, D, 1.0)
        end = time.perf_counter()
        took.append({"expand": middle - began, "project": end - middle, "processor": time.process_time() - cpu})
    best = min(took, key=lambda one: one["expand"] + one["project"])
    text = f"expand {best['expand']:.2f} s + project {best['project']:.2f} s = {best['expand'] + best['project']:.2f} s"
    print(f"MAPA d = {D:,}, p = {P:,}, signs: {text}; {best['processor']:.2f} CPU seconds")
    return best


def tune(until: float) -> None:
    """Time other block sizes for the most expensive convolutions."""
    from thinwire.kernels import conv_triton as kernels
    from thinwire.kernels.conv_blocks import Block

    product, gradient = kernels.product_block, kernels.gradient_block
    cases = [
        Case("cnn2", 10, SHAPES["cnn2"][0], "float32"),
        Case("cnn2", 10, SHAPES["cnn2"][1], "float32"),
        Case("cnn-cifar", 10, SHAPES["cnn-cifar"][1], "float32"),
        Case("cnn-cifar", 10, SHAPES["cnn-cifar"][1], "tf32"),
        Case("resnet20", 32, SHAPES["resnet20"][0], "bf16"),
        Case("vgg16", 32, SHAPES["vgg16"][2], "bf16"),
    ]
    print("us by block (m, n, k, warps, stages), the first is the default")
    for case in cases:
        with arithmetic(case.precision):
            for operation, kinds in implementations(case).items():
                chosen: list[Block] = []

                def note(*args: Any, of: Any, chosen: list[Block] = chosen) -> Block:
                    chosen.append(of(*args))
                    return chosen[-1]

                kernels.product_block = lambda *args, note=note: note(*args, of=product)
                kernels.gradient_block = lambda *args, note=note: note(*args, of=gradient)
                kinds["fused"]()
                first = chosen[0]
                others = {first}
                for m in {first.m // 2, first.m, first.m * 2, 128}:
                    for warps, stages in ((4, 3), (8, 3), (4, 2), (4, 4), (8, 4)):
                        others.add(first._replace(m=m, warps=warps, stages=stages))
                for change in ({"k": first.k * 2}, {"k": first.k // 2}, {"n": first.n * 2}, {"n": first.n // 2}):
                    others.add(first._replace(**change))
                took: dict[Block, float] = {}
                for block in sorted(others, key=lambda b: b != first):
                    if min(block[:3]) < 16 or time.monotonic() > until:
                        continue
                    kernels.product_block = kernels.gradient_block = lambda *args, block=block: block
                    try:
                        took[block] = microseconds(kinds["fused"])
                    except Exception as error:
                        print("   ", operation, tuple(block), first_line(error), flush=True)
                best = sorted(took.items(), key=lambda item: item[1])[:3]
                named = ", ".join(f"{tuple(block)} {us:.0f}" for block, us in best)
                print(
                    f"{case.model} {case.shape} {case.precision} {operation}:",
                    f"{tuple(first)} {took.get(first, -1):.0f}; best {named}",
                    flush=True,
                )
    kernels.product_block, kernels.gradient_block = product, gradient


def page(files: list[Path]) -> str:
    """Tables of MAPA's products: on a GPU for every block size, on a CPU in seconds."""
    text = []
    for found in (json.loads(file.read_text()) for file in files):
        if "machine" in found:
            took = found["mapa"]
            text += ["", f"{found['machine']}, torch {found['torch']}, signs: expand {took['expand']:.2f} s, project"]
            text[-1] += f" {took['project']:.2f} s, together {took['expand'] + took['project']:.2f} s."
            continue
        text += ["", f"{found['device']}, torch {found['torch']}:", ""]
        text += [
            "| entries | vectors | block | expand, G entries/s | project | MB besides the vectors | deterministic |"
        ]
        text.append("|" + "---|" * 7)
        for row in found["mapa"]:
            block = " x ".join(map(str, row["block"]))
            speeds = [f"{row['expand']:,.0f}", f"{row['project']:,.0f}", f"{row['MB']:.0f}"]
            cells = [row["entries"], str(row["vectors"]), block, *speeds, "yes" if row["deterministic"] else "**no**"]
            text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no measurement after this many")
    parser.add_argument("--only", choices=("convolutions", "mapa"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="FILE", help="do not measure; write the section of the page"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    if options.table:
        command = "python benchmarks/speed/kernels.py --json kernels.json, then --table kernels.json"
        write_part(options.docs / "benchmarks.md", "kernels", page(options.table), command)
        return
    if torch.device(options.device).type == "cpu":
        found = {"machine": platform.machine(), "torch": torch.__version__, "mapa": looked_up()}
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        return
    if torch.device(options.device).type != "cuda" or not torch.cuda.is_available():
        sys.exit("torch finds no GPU; use --device cpu")
    torch.cuda.set_device(torch.device(options.device).index or 0)
    if not has_triton(torch.device("cuda", torch.cuda.current_device())):
        from thinwire.kernels.sums_triton import run_one

        run_one(torch.device("cuda"))  # reports the reason
    began = time.monotonic()
    until = began + options.seconds
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if options.tune:
        tune(until)
    else:
        if options.only != "convolutions":
            results["mapa"] = drawn(began + options.seconds / 3)
        if options.only != "mapa":
            with torch.no_grad():
                results["convolutions"] = convolutions(PLAN, until)
    print(f"{time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
