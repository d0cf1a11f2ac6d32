"""Spaces: trainable coordinates and how they become weights."""

from thinwire.spaces.base import Frozen as Frozen, Full as Full, Space as Space
from thinwire.spaces.exact_lora import (
    LoRAResidual as LoRAResidual,
    LoRASB as LoRASB,
    LoRAStack as LoRAStack,
    LoRASum as LoRASum,
)
from thinwire.spaces.fedpara import FedPara as FedPara
from thinwire.spaces.lora import LoRA as LoRA
from thinwire.spaces.lowrank import FactorizedFL as FactorizedFL, LowRank as LowRank, Pufferfish as Pufferfish
from thinwire.spaces.peft_config import lora_from_peft as lora_from_peft
from thinwire.spaces.projection import MAPA as MAPA, MAPAX as MAPAX, MAPO as MAPO
from thinwire.spaces.random_masks import FedMRN as FedMRN, FedPM as FedPM
from thinwire.spaces.route import Route as Route
