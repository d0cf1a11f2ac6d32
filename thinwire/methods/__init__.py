"""Published methods as functions that return a `Method`; `register("method", name)` adds others.

    fedavg, fedbuff      fedavg, fedsgd, local, fedper | fedbuff
    server_optimizers    fedavgm, fedadam, fedyogi, fedadagrad
    corrections          fedprox, scaffold, feddyn, fednova
    compression          int8, int4, fp16, topk, topk_plain, quantize, sparse, ef, signsgd, fedpaq, fedpaq_fp16,
                         eden, drive, stc, lattice_topk, powersgd
    mapa                 mapa, mapax, mapo, mapa_paper, mapax_paper, mapo_paper, thin
    seeds                decomfl, fedkseed
    mask_spaces          fedpm, fedmrn
    fetchsgd             fetchsgd
    sparseloco           sparseloco, diloco, muloco
    evofed, fedlama      evofed, ferret | fedlama, fedlama_public, fedlama_accelerated
    fedpara              fedpara, fedpara_paper, pfedpara, lowrank, pufferfish
    factorized_fl        factorized_fl, factorized_fl_u, factorized_fl_sparse
    lora                 lora, ffa_lora, fa_lora, fedsa_lora, fedloru, fedsvd, rolora
    exact_lora           fedex_lora, fedmud, flora_stack, fed_sb
    flasc                flasc, full
    pruning, tiers       sparse_adapter, adapter_lth, spdst, fedsparsify, federated_select | hetlora, ...
    two_stages           flora, slora
    privacy              dp_fedadam, ddg

The command line uses the same names with hyphens: `thinwire run fedpaq-fp16`. A method is a value: change it with
`replace`, or join names with `+` (`thinwire run mapo+int8`).

>>> from thinwire.codecs import Quantize
>>> mapo(k=64).replace(up=Quantize(4)).up.bits
4
"""

from thinwire.methods.compression import (
    diloco as diloco,
    drive as drive,
    eden as eden,
    ef as ef,
    fedpaq as fedpaq,
    fedpaq_fp16 as fedpaq_fp16,
    fetchsgd as fetchsgd,
    fp16 as fp16,
    int4 as int4,
    int8 as int8,
    lattice_topk as lattice_topk,
    muloco as muloco,
    powersgd as powersgd,
    quantize as quantize,
    signsgd as signsgd,
    sparse as sparse,
    sparseloco as sparseloco,
    stc as stc,
    topk as topk,
    topk_plain as topk_plain,
)
from thinwire.methods.fedavg import (
    fedadagrad as fedadagrad,
    fedadam as fedadam,
    fedavg as fedavg,
    fedavgm as fedavgm,
    fedbuff as fedbuff,
    feddyn as feddyn,
    fednova as fednova,
    fedper as fedper,
    fedprox as fedprox,
    fedsgd as fedsgd,
    fedyogi as fedyogi,
    local as local,
    on as on,
    scaffold as scaffold,
)
from thinwire.methods.fedlama import (
    fedlama as fedlama,
    fedlama_accelerated as fedlama_accelerated,
    fedlama_public as fedlama_public,
)
from thinwire.methods.fedpara import (
    factorized_fl as factorized_fl,
    factorized_fl_sparse as factorized_fl_sparse,
    factorized_fl_u as factorized_fl_u,
    fedmrn as fedmrn,
    fedpara as fedpara,
    fedpara_paper as fedpara_paper,
    fedpm as fedpm,
    lowrank as lowrank,
    pfedpara as pfedpara,
    pufferfish as pufferfish,
)
from thinwire.methods.flasc import (
    adapter_lth as adapter_lth,
    federated_select as federated_select,
    fedsparsify as fedsparsify,
    flasc as flasc,
    flora as flora,
    full as full,
    hetlora as hetlora,
    highest_tier as highest_tier,
    lowest_tier as lowest_tier,
    slora as slora,
    sparse_adapter as sparse_adapter,
    spdst as spdst,
)
from thinwire.methods.lora import (
    fa_lora as fa_lora,
    fed_sb as fed_sb,
    fedex_lora as fedex_lora,
    fedloru as fedloru,
    fedmud as fedmud,
    fedsa_lora as fedsa_lora,
    fedsvd as fedsvd,
    ffa_lora as ffa_lora,
    flora_stack as flora_stack,
    lora as lora,
    rolora as rolora,
)
from thinwire.methods.mapa import (
    decomfl as decomfl,
    evofed as evofed,
    fedkseed as fedkseed,
    ferret as ferret,
    mapa as mapa,
    mapa_paper as mapa_paper,
    mapax as mapax,
    mapax_paper as mapax_paper,
    mapo as mapo,
    mapo_paper as mapo_paper,
    thin as thin,
)
from thinwire.methods.privacy import ddg as ddg, dp_fedadam as dp_fedadam
