"""Malicious clients of a simulation: what they send in place of their updates (`federation/attacks.py`)."""

from __future__ import annotations

import torch

from thinwire.core.key import Key
from thinwire.errors import ConfigError
from thinwire.federation.engine import EngineSettings
from thinwire.federation.job import Job
from thinwire.protocol.client import Group, Updates

_LARGEST = torch.finfo(torch.float32).max  # a message with a value that is not finite would be refused


class Attackers:
    """The malicious clients of a job, the same in all rounds.

    Args:
        job: the job; without an attack there are none.
        engine: how the cohort is trained.
    """

    def __init__(self, job: Job, engine: EngineSettings) -> None:
        self.attack, self.key = job.attack, Key(job.seed)
        self.clients = self.attack.attackers(self.key, len(job.task.clients)) if self.attack else frozenset[int]()
        if self.attack and self.attack.knows_others and (engine.chunk or engine.workers):
            raise ConfigError(
                "this attack uses the updates of the whole cohort, which must be trained together; write "
                "engine.chunk = 0 and engine.workers = 0"
            )

    def replaced(self, number: int, group: Group, updates: Updates) -> Updates:
        """The updates of a group, with those of attackers replaced.

        Args:
            number: rounds done before.
            group: the clients.
            updates: the updates that they trained.
        """
        bad = torch.tensor([client in self.clients for client in group.clients])
        if self.attack is None or not bad.any() or (self.attack.knows_others and bad.all()):  # nobody to imitate
            return updates
        blocks = {name: block.reshape(len(bad), -1) for name, block in updates.code.items()}
        rows = torch.cat([block.float() for block in blocks.values()], 1)
        key = self.key.fold("attack", number, group.clients[0])
        sent = self.attack.updates(rows[bad], rows[~bad], key).clamp(-_LARGEST, _LARGEST)
        code = dict(updates.code)
        sizes = [block.shape[1] for block in blocks.values()]
        for (name, block), part in zip(blocks.items(), torch.split(sent, sizes, 1), strict=True):
            changed = block.clone()
            changed[bad] = part.to(block.dtype)
            code[name] = changed.view(updates.code[name].shape)
        return updates._replace(code=code)
