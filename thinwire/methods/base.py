"""`on`, the decorator for a method that has other arguments on a task.

A method is a function whose arguments all have defaults. `register` gives it a name, under which the command line,
experiment files and `+` expressions find it:

    @register("method", "mapo-paper", paper="MAPO: Reshape-then-factorize")
    @on("cifar10", k=1024, lr=1.0)
    def mapo_paper(k: int = 128, lr: float = 3.0) -> Method: ...

`mapo_paper()` is the method itself. `resolve("mapo-paper", on="cifar10")` uses `mapo_paper(k=1024, lr=1.0)`. Settings
outside of `Method` are stated in `register`: `register("method", "fedsgd", preset={"local": {"steps": 1}})`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from thinwire.protocol.method import Method

T = TypeVar("T", bound=Callable[..., Method])
Arguments = Mapping[str, Any]


def on(task: str, **arguments: Any) -> Callable[[T], T]:
    """Call the function with these arguments when its name is resolved on a task.

    Args:
        task: the name of a task preset, for example `cifar10`.
        **arguments: arguments of the function; those that are not given keep their defaults.

    >>> @on("cifar10", phi=8)
    ... def example(phi: int = 4) -> Method:
    ...     return Method()
    >>> arguments_on_tasks(example)
    {'cifar10': {'phi': 8}}
    """

    def enter(make: T) -> T:
        inspect.signature(make).bind_partial(**arguments)  # a misspelled argument fails at import
        make.__dict__["on_tasks"] = {task: arguments, **arguments_on_tasks(make)}
        return make

    return enter


def arguments_on_tasks(make: Callable[..., Method]) -> dict[str, Arguments]:
    """The arguments that `on` states, by task."""
    return dict(getattr(make, "on_tasks", {}))
