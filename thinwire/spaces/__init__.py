"""Spaces: trainable coordinates and how they become weights."""

from thinwire.spaces.base import Space as Space
from thinwire.spaces.dora import DoRA as DoRA
from thinwire.spaces.factorized import FactorizedFL as FactorizedFL
from thinwire.spaces.fedmrn import FedMRN as FedMRN
from thinwire.spaces.fedpara import FedPara as FedPara
from thinwire.spaces.fedpm import FedPM as FedPM
from thinwire.spaces.frozen import Frozen as Frozen
from thinwire.spaces.full import Full as Full
from thinwire.spaces.lora import LoRA as LoRA
from thinwire.spaces.lora_sb import LoRASB as LoRASB
from thinwire.spaces.lowrank import LowRank as LowRank
from thinwire.spaces.peft_config import lora_from_peft as lora_from_peft
from thinwire.spaces.projection import MAPA as MAPA
from thinwire.spaces.projection import MAPAX as MAPAX
from thinwire.spaces.projection import MAPO as MAPO
from thinwire.spaces.pufferfish import Pufferfish as Pufferfish
from thinwire.spaces.route import Route as Route
from thinwire.spaces.stacked import LoRAResidual as LoRAResidual
from thinwire.spaces.stacked import LoRAStack as LoRAStack
