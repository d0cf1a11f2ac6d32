"""The settings of a simulation of one's own model and data: those of a method, of a file, or the defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.experiments.experiment import Checkpointing, Cohort, Evaluation
from thinwire.experiments.load import values_from
from thinwire.experiments.resolve import stated_settings
from thinwire.protocol.method import Method
from thinwire.runtime.attacks import Attack
from thinwire.runtime.speed import Speed
from thinwire.simulation.engine import LocalEngine
from thinwire.training.batches import Local


@dataclass(frozen=True)
class Settings:
    """The settings of a simulation, without model and data: those of a method, of a file, or the defaults."""

    name: str | None = None
    method: Method = Method()
    local: Local = Local()
    cohort: Cohort | None = None
    engine: LocalEngine = LocalEngine()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpointing = Checkpointing()
    seed: int = 0
    rounds: int = 10
    attack: Attack | None = None
    speed: Speed = Speed()

    @classmethod
    def of(cls, method: Method | str | None, recipe: str | None = None) -> Settings:
        """The settings of a Method, of methods by name, or of an experiment file; names and files have a recipe.

        >>> Settings.of("mapo+int8").method.up.bits
        8
        """
        if method is None or isinstance(method, Method):
            if recipe is not None:
                raise ConfigError(
                    f"recipe = {recipe!r} is for methods by name and files; a Method is used as it is: set lr_schedule "
                    "and client_opt in it, or write the method's name"
                )
            return cls(method=method or Method())
        if not isinstance(method, str):
            raise ConfigError(
                f"method must be a Method, the name of one or a file (.toml), not {type(method).__name__}; "
                "write for example 'fedavg'"
            )
        name, table = stated_settings(method, recipe)
        given = values_from(table)
        known = {key: value for key, value in given.items() if key in cls.__dataclass_fields__}
        return cls(**{**known, "name": name})

    def changed(self, part: str = "", **given: Any) -> Settings:
        """A copy with other values; None leaves a value unchanged.

        Args:
            part: the field whose values are meant, such as `engine`; "" for the settings themselves.
            **given: the values.

        >>> Settings().changed("eval", every=5, patience=None).eval.every
        5
        """
        known = {key: value for key, value in given.items() if value is not None}
        return replace(self, **({part: replace(getattr(self, part), **known)} if part else known))
