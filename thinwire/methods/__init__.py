"""Published methods as functions that return a `Method`; `register("method", name)` adds others.

    fedavg, fedbuff      fedavg, fedsgd, local, fedper | fedbuff
    server_optimizers    fedavgm, fedadam, fedyogi, fedadagrad
    corrections          fedprox, scaffold, feddyn, fednova
    compression          int8, int4, fp16, topk, quantize, sparse, ef, signsgd, fedpaq, fedpaq_fp16,
                         eden, drive, stc, lattice_topk, powersgd
    mapa                 mapa, mapax, mapo, mapa_paper, mapax_paper, mapo_paper, thin
    seeds                decomfl, fedkseed
    mask_spaces          fedpm, fedmrn
    fetchsgd             fetchsgd
    sparseloco           sparseloco
    evofed, fedlama      evofed, ferret | fedlama, fedlama_public, fedlama_accelerated
    fedpara              fedpara, fedpara_paper, pfedpara, lowrank, pufferfish
    factorized_fl        factorized_fl, factorized_fl_u, factorized_fl_sparse
    lora                 lora, ffa_lora, fa_lora, fedsa_lora, fedloru
    exact_lora           flexlora, fedex_lora, flora_stack, fed_sb
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

from thinwire.methods.base import on as on
from thinwire.methods.compression import drive as drive
from thinwire.methods.compression import eden as eden
from thinwire.methods.compression import ef as ef
from thinwire.methods.compression import fedpaq as fedpaq
from thinwire.methods.compression import fedpaq_fp16 as fedpaq_fp16
from thinwire.methods.compression import fp16 as fp16
from thinwire.methods.compression import int4 as int4
from thinwire.methods.compression import int8 as int8
from thinwire.methods.compression import lattice_topk as lattice_topk
from thinwire.methods.compression import powersgd as powersgd
from thinwire.methods.compression import quantize as quantize
from thinwire.methods.compression import signsgd as signsgd
from thinwire.methods.compression import sparse as sparse
from thinwire.methods.compression import stc as stc
from thinwire.methods.compression import topk as topk
from thinwire.methods.corrections import feddyn as feddyn
from thinwire.methods.corrections import fednova as fednova
from thinwire.methods.corrections import fedprox as fedprox
from thinwire.methods.corrections import scaffold as scaffold
from thinwire.methods.evofed import evofed as evofed
from thinwire.methods.evofed import ferret as ferret
from thinwire.methods.exact_lora import fed_sb as fed_sb
from thinwire.methods.exact_lora import fedex_lora as fedex_lora
from thinwire.methods.exact_lora import flexlora as flexlora
from thinwire.methods.exact_lora import flora_stack as flora_stack
from thinwire.methods.factorized_fl import factorized_fl as factorized_fl
from thinwire.methods.factorized_fl import factorized_fl_sparse as factorized_fl_sparse
from thinwire.methods.factorized_fl import factorized_fl_u as factorized_fl_u
from thinwire.methods.fedavg import fedavg as fedavg
from thinwire.methods.fedavg import fedper as fedper
from thinwire.methods.fedavg import fedsgd as fedsgd
from thinwire.methods.fedavg import local as local
from thinwire.methods.fedbuff import fedbuff as fedbuff
from thinwire.methods.fedlama import fedlama as fedlama
from thinwire.methods.fedlama import fedlama_accelerated as fedlama_accelerated
from thinwire.methods.fedlama import fedlama_public as fedlama_public
from thinwire.methods.fedpara import fedpara as fedpara
from thinwire.methods.fedpara import fedpara_paper as fedpara_paper
from thinwire.methods.fedpara import lowrank as lowrank
from thinwire.methods.fedpara import pfedpara as pfedpara
from thinwire.methods.fedpara import pufferfish as pufferfish
from thinwire.methods.fetchsgd import fetchsgd as fetchsgd
from thinwire.methods.flasc import flasc as flasc
from thinwire.methods.flasc import full as full
from thinwire.methods.lora import fa_lora as fa_lora
from thinwire.methods.lora import fedloru as fedloru
from thinwire.methods.lora import fedsa_lora as fedsa_lora
from thinwire.methods.lora import ffa_lora as ffa_lora
from thinwire.methods.lora import lora as lora
from thinwire.methods.mapa import mapa as mapa
from thinwire.methods.mapa import mapa_paper as mapa_paper
from thinwire.methods.mapa import mapax as mapax
from thinwire.methods.mapa import mapax_paper as mapax_paper
from thinwire.methods.mapa import mapo as mapo
from thinwire.methods.mapa import mapo_paper as mapo_paper
from thinwire.methods.mask_spaces import fedmrn as fedmrn
from thinwire.methods.mask_spaces import fedpm as fedpm
from thinwire.methods.privacy import ddg as ddg
from thinwire.methods.privacy import dp_fedadam as dp_fedadam
from thinwire.methods.pruning import adapter_lth as adapter_lth
from thinwire.methods.pruning import federated_select as federated_select
from thinwire.methods.pruning import fedsparsify as fedsparsify
from thinwire.methods.pruning import sparse_adapter as sparse_adapter
from thinwire.methods.pruning import spdst as spdst
from thinwire.methods.seeds import decomfl as decomfl
from thinwire.methods.seeds import fedkseed as fedkseed
from thinwire.methods.server_optimizers import fedadagrad as fedadagrad
from thinwire.methods.server_optimizers import fedadam as fedadam
from thinwire.methods.server_optimizers import fedavgm as fedavgm
from thinwire.methods.server_optimizers import fedyogi as fedyogi
from thinwire.methods.sparseloco import sparseloco as sparseloco
from thinwire.methods.thin import thin as thin
from thinwire.methods.tiers import hetlora as hetlora
from thinwire.methods.tiers import highest_tier as highest_tier
from thinwire.methods.tiers import lowest_tier as lowest_tier
from thinwire.methods.two_stages import flora as flora
from thinwire.methods.two_stages import slora as slora
