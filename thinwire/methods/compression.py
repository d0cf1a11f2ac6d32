"""FedAvg with compressed messages: quantization, sparsification, error feedback.

Most of these fill one slot, so that they combine with other methods: `mapo+int8`, `topk+int4`.

FetchSGD: count sketches up, the largest values down.

SparseLoCo: many local AdamW steps, and two bits for the largest values of each chunk of their sum.
"""

from __future__ import annotations

from thinwire.codecs import Chain, Eden, ErrorFeedback, Lattice, LatticeSum, PowerSGD, Quantize, Threshold, TopK
from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.optimizers import SGD, AdamW, Muon
from thinwire.protocol.method import Method
from thinwire.sketches import CountSketch


@register("method", "int8", paper="after Alistarh et al., NeurIPS 2017")
def int8() -> Method:
    """Updates quantized to 8 bits, with a scale for each 256 values.

        q = round(x / s)          s = max |x| / 127 of each 256 values

    Paper: after QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding (Alistarh et al., NeurIPS
    2017).

    >>> int8().up.bits
    8
    """
    return Method(up=Quantize(8))


@register("method", "int4", paper="after Alistarh et al., NeurIPS 2017")
def int4() -> Method:
    """Updates quantized to 4 bits, with a scale for each 256 values.

        q = round(x / s)          s = max |x| / 7 of each 256 values

    Paper: after QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding (Alistarh et al., NeurIPS
    2017).

    >>> int4().up.bits
    4
    """
    return Method(up=Quantize(4))


@register("method", "fp16", paper="Hyeon-Woo et al., ICLR 2022, table 12")
def fp16() -> Method:
    """Updates in half precision: fedpaq-fp16 under a short name, for `+` expressions.

        x ~ float16(x), clipped to the largest finite value

    Paper: FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning (Hyeon-Woo et al., ICLR
    2022), table 12.

    >>> fp16().up.scheme
    'fp16'
    """
    return Method(up=Quantize(scheme="fp16"))


@register("method", "fedpaq-fp16", paper="Hyeon-Woo et al., ICLR 2022, table 12")
def fedpaq_fp16() -> Method:
    """FedPAQ with updates in half precision; downloads are exact.

        x ~ float16(x), clipped to the largest finite value

    Paper: FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning (Hyeon-Woo et al., ICLR
    2022), table 12.

    >>> fedpaq_fp16() == fp16()
    True
    """
    return fp16()


@register("method", "fedpaq", paper="Reisizadeh et al., AISTATS 2020")
def fedpaq(bits: int = 8) -> Method:
    """FedPAQ: FedAvg with updates quantized by QSGD, stochastic and unbiased; downloads are exact.

        q = |x| / |x|_2 * (2^(bits - 1) - 1), rounded up with the probability of its fraction

    Args:
        bits: bits of a value.

    Paper: FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and Quantization
    (Reisizadeh et al., AISTATS 2020).

    >>> fedpaq().up.scheme
    'qsgd'
    """
    return Method(up=Quantize(bits, scheme="qsgd", per="tree"))


@register("method", "quantize", paper="Konecny et al., 2016")
def quantize(bits: int = 8) -> Method:
    """FedAvg with updates quantized uniformly between their minimum and maximum.

        q = round((x - min) / s)          s = (max - min) / (2^bits - 1) of the whole update

    Args:
        bits: bits of a value.

    Paper: Federated Learning: Strategies for Improving Communication Efficiency (Konecny et al., 2016).

    >>> quantize(bits=4).up.bits
    4
    """
    return Method(up=Quantize(bits, scheme="uniform"))


@register("method", "topk", paper="Aji and Heafield, EMNLP 2017; Karimireddy et al., ICML 2019")
def topk(density: float = 0.05) -> Method:
    """Uploads of the 5 % of values with the largest magnitude, with error feedback; topk+int8 also quantizes them.

        send x_j and j for the floor(density n) largest |x_j|,    x: the update and what earlier uploads left out

    Args:
        density: share of the values that are sent.

    Papers: Sparse Communication for Distributed Gradient Descent (Aji and Heafield, EMNLP 2017); Error Feedback Fixes
    SignSGD and other Gradient Compression Schemes (Karimireddy et al., ICML 2019).

    >>> topk(density=0.01).up.parts[1].density
    0.01
    """
    return Method(up=Chain((ErrorFeedback(), TopK(density))))


@register("method", "topk-plain", paper="after Aji and Heafield, EMNLP 2017")
def topk_plain(density: float = 0.05) -> Method:
    """`topk` without error feedback: what an upload leaves out is lost.

        send x_j and j for the floor(density n) largest |x_j|,    x: the update

    Args:
        density: share of the values that are sent.

    Paper: after Sparse Communication for Distributed Gradient Descent (Aji and Heafield, EMNLP 2017).

    >>> topk_plain(density=0.01).up.density
    0.01
    """
    return Method(up=TopK(density))


@register("method", "sparse", paper="Aji and Heafield, EMNLP 2017")
def sparse(density: float = 0.1) -> Method:
    """FedAvg with top-k sparse uploads and downloads: the 10 % of values with the largest magnitude.

        send x_j and j for the ceil(density n) largest |x_j|

    Args:
        density: share of the values that are sent.

    Paper: Sparse Communication for Distributed Gradient Descent (Aji and Heafield, EMNLP 2017).

    >>> sparse().up == sparse().down
    True
    """
    codec = TopK(density, rounding="up")
    return Method(up=codec, down=codec)


@register("method", "ef", paper="Karimireddy et al., ICML 2019")
def ef() -> Method:
    """Error feedback: the compression error is added to the next upload; write it first, as in ef+int4.

        send C(x + e)          e <- x + e - C(x + e)

    Paper: Error Feedback Fixes SignSGD and other Gradient Compression Schemes (Karimireddy et al., ICML 2019).

    >>> type(ef().up).__name__
    'ErrorFeedback'
    """
    return Method(up=ErrorFeedback())


@register("method", "signsgd", paper="Bernstein et al., ICML 2018; Karimireddy et al., ICML 2019")
def signsgd() -> Method:
    """SignSGD with error feedback in both directions: one bit per value and a scale for each 256 values.

        C(x) = mean |x| sign(x)          e <- x + e - C(x + e)

    Papers: signSGD: Compressed Optimisation for Non-Convex Problems (Bernstein et al., ICML 2018); Error Feedback Fixes
    SignSGD and other Gradient Compression Schemes (Karimireddy et al., ICML 2019).

    >>> signsgd().up.inner.scheme
    'sign'
    """
    codec = ErrorFeedback(Quantize(scheme="sign"))
    return Method(up=codec, down=codec)


@register("method", "eden", paper="Vargaftik et al., ICML 2022")
def eden(bits: float = 2.0) -> Method:
    """EDEN: updates rotated at random and rounded to the best levels of a normal distribution, unbiased.

        x ~ s D H c          c = the level nearest to (H D x) / |x|,    s = |x|^2 / <c, H D x>

    Args:
        bits: bits of a value, above 0 and at most 8; fractions and less than one are possible.

    Paper: EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning (Vargaftik et
    al., ICML 2022).

    >>> eden(bits=0.5).up.bits
    0.5
    """
    return Method(up=Eden(bits))


@register("method", "drive", paper="Vargaftik et al., NeurIPS 2021")
def drive() -> Method:
    """DRIVE: one bit for each value of the rotated update, unbiased: eden with one bit.

        x ~ s D H sign(H D x)          s = |x|^2 / |H D x|_1

    Paper: DRIVE: One-bit Distributed Mean Estimation (Vargaftik et al., NeurIPS 2021).

    >>> drive() == eden(bits=1.0)
    True
    """
    return eden(bits=1.0)


@register("method", "stc", paper="Sattler et al., TNNLS 2019")
def stc(density: float = 0.01) -> Method:
    """Sparse ternary compression: the largest values as plus or minus their mean magnitude, in both directions.

        C(x) = mu sign(x_j) for the floor(density n) largest |x_j|,  mu = their mean |x_j|;      e <- x + e - C(x + e)

    Args:
        density: share of the values that are sent.

    Paper: Robust and Communication-Efficient Federated Learning from Non-IID Data (Sattler et al., TNNLS 2019).

    >>> stc().up == stc().down
    True
    """
    codec = ErrorFeedback(TopK(density, inner=Quantize(scheme="sign", per="tree")))
    return Method(up=codec, down=codec)


@register("method", "lattice-topk", paper="composed here: top-k, updates on a lattice, error feedback")
def lattice_topk(density: float = 0.05, step: float = 1.0) -> Method:
    """Top-k with error feedback in both directions, on a lattice: what a client missed is one short sum.

        C(x) = s round(x_j / s) for the floor(density n) largest |x_j|,    s = 2^round(log2(step rms)) of these values
        send C(x + e)          e <- x + e - C(x + e)

    Multiples of powers of two add up exactly, so a client that missed rounds is sent the sum of their broadcasts.

    Args:
        density: share of the values that are sent.
        step: distance of the levels, in root mean squares of the values that are sent.

    Not from a paper: a composition of top-k, rounding to a lattice and error feedback.

    >>> lattice_topk().sends_sums
    True
    """
    codec = ErrorFeedback(TopK(density, inner=Lattice(step)))
    return Method(up=codec, down=codec, merge_codec=LatticeSum())


@register("method", "powersgd", paper="Vogels et al., NeurIPS 2019")
def powersgd(rank: int = 2) -> Method:
    """PowerSGD with error feedback in both directions: two thin factors of the update of each matrix.

        M ~ P Q^T          P = orthogonal(M Q),  Q = M^T P,    twice from a random Q

    Args:
        rank: columns of the factors.

    Paper: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization (Vogels et al., NeurIPS 2019).

    >>> powersgd(rank=4).up.inner.rank
    4
    """
    codec = ErrorFeedback(PowerSGD(rank))
    return Method(up=codec, down=codec)


@register("method", "fetchsgd", paper="Rothchild et al., ICML 2020")
def fetchsgd(rows: int = 5, columns: int = 0, k: int = 0, server_lr: float = 1.0, momentum: float = 0.5) -> Method:
    """FetchSGD: clients upload a count sketch of their update; momentum and error stay in the server's sketch.

        S = mean_i sketch(w_i - w)      M <- momentum M + S      E <- E + server_lr M
        D = the k largest estimates of E      w <- w + D      E, M <- 0 in the cells of D

    Args:
        rows: rows of the sketch.
        columns: cells of a row; 0: all rows together have a quarter as many as the model has weights.
        k: values that the server broadcasts in a round; 0 for a twentieth of the weights.
        server_lr: learning rate of the server.
        momentum: momentum of the server.

    Paper: FetchSGD: Communication-Efficient Federated Learning with Sketching (Rothchild et al., ICML 2020).

    >>> fetchsgd(columns=500_000, k=50_000).sketch.rows
    5
    """
    sketch = CountSketch(rows=rows, columns=columns, k=k)
    return Method(sketch=sketch, down=Threshold(0.0), server_opt=SGD(server_lr, momentum=momentum))


@register("method", "sparseloco", paper="Sarfi et al., 2025", preset={"local": {"steps": 15}})
def sparseloco(k: int = 64, chunk: int = 4096, beta: float = 0.95, lr: float = 0.02, server_lr: float = 2.0) -> Method:
    """SparseLoCo: AdamW state stays at home; the largest values of each chunk go up in two bits, with error feedback.

        client:  H steps of AdamW from w to w_i          e <- beta e + (w_i - w)
                 send c = 2 bits of the k largest of each chunk of e          e <- e - c
        server:  w <- w + server_lr mean(c_i)

    Args:
        k: values of each chunk that are sent.
        chunk: consecutive values of the model among which they are selected.
        beta: factor of the earlier error; what is never large enough to be sent is forgotten.
        lr: learning rate of the local AdamW.
        server_lr: learning rate of the server.

    Paper: Communication Efficient LLM Pre-training with SparseLoCo (Sarfi et al., 2025). H is `local.steps`.

    >>> method = sparseloco()
    >>> method.opt_lifetime, method.up.decay, method.up.inner.density * method.up.inner.chunk
    ('run', 0.95, 64.0)
    """
    if not 1 <= k <= chunk:
        raise ConfigError(f"k must be from 1 to the {chunk} values of a chunk, not {k}")
    sparse = TopK(k / chunk, "chunk", Quantize(2, "sign-magnitude"), "up", chunk)
    return Method(
        up=ErrorFeedback(sparse, decay=beta),
        down=Threshold(0.0),
        client_opt=AdamW(lr),
        opt_lifetime="run",
        server_opt=SGD(server_lr),
    )


@register("method", "diloco", paper="Douillard et al., 2023", preset={"local": {"steps": 30}})
def diloco(lr: float = 0.01, weight_decay: float = 0.1, server_lr: float = 0.7, momentum: float = 0.9) -> Method:
    """DiLoCo: many local steps of AdamW, whose state stays at home, and Nesterov momentum at the server.

        client:  H steps of AdamW from w to w_i          D = mean(w_i - w)
        server:  v <- momentum v + D                     w <- w + server_lr (D + momentum v)

    Differs from the paper: H is `local.steps`, 30 instead of 500; the learning rate is one for small models.

    Args:
        lr: learning rate of the local AdamW.
        weight_decay: its weight decay.
        server_lr: learning rate of the server.
        momentum: Nesterov momentum of the server.

    Paper: DiLoCo: Distributed Low-Communication Training of Language Models (Douillard et al., 2023).

    >>> diloco().server_opt.nesterov
    True
    """
    server = SGD(server_lr, momentum=momentum, nesterov=True)
    return Method(client_opt=AdamW(lr, weight_decay=weight_decay), opt_lifetime="run", server_opt=server)


@register("method", "muloco", paper="Therien et al., 2025", preset={"local": {"steps": 30}})
def muloco(lr: float = 0.01, weight_decay: float = 0.1, server_lr: float = 0.7, momentum: float = 0.9) -> Method:
    """MuLoCo: DiLoCo with Muon on clients: orthogonal steps for matrices, AdamW for all else.

        client:  w <- w - lr (0.2 sqrt(max(rows, columns)) O + weight_decay w)        O: momentum made orthogonal

    Differs from the paper: the server's rate and momentum are DiLoCo's; updates are not compressed (`muloco+ef+int4`).

    Args:
        lr: learning rate of the local Muon.
        weight_decay: its weight decay.
        server_lr: learning rate of the server.
        momentum: Nesterov momentum of the server.

    Paper: MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo (Therien et al., 2025).

    >>> muloco(lr=0.1).client_opt.lr, muloco().opt_lifetime
    (0.1, 'run')
    """
    return diloco(lr, weight_decay, server_lr, momentum).replace(client_opt=Muon(lr, weight_decay=weight_decay))
