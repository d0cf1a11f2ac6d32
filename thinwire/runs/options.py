"""The options of a run: the keyword arguments of `tw.run`, `tw.simulate`, `tw.compare`, `tw.sweep` and `tw.tune`.

The verbs of the command line are made from them, too (`cli/options.py`), so this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, get_args, get_type_hints

from thinwire.errors import ConfigError
from thinwire.runs.toml import parse_overrides

if TYPE_CHECKING:
    from thinwire.federation.federation import OnMessage
    from thinwire.federation.job import RoundRecord
    from thinwire.federation.speed import Speed
    from thinwire.metrics.base import Metric
    from thinwire.training.batches import Local
else:
    OnMessage = RoundRecord = Speed = Metric = Local = Any  # not needed to read the options

PYTHON_ONLY = ""


class At(NamedTuple):
    """Where an option belongs.

    Args:
        path: the setting that it changes, by dotted path; "" for an option that decides no results.
        help: one sentence.
        flag: its flag on the command line, if it is not its name; `PYTHON_ONLY` for none.
    """

    path: str
    help: str
    flag: str | None = None


class Options(TypedDict, total=False):
    """Options of a run; those that are not given are settings of the task, the method, the file and the recipe."""

    rounds: Annotated[int, At("rounds", "Number of communication rounds.")]
    clients: Annotated[int, At("task.clients", "Number of clients.")]
    cohort: Annotated[int, At("cohort.size", "Number of clients sampled per round.")]
    seed: Annotated[int, At("seed", "Random seed of data partition, initial weights, sampling and batches.")]
    recipe: Annotated[
        str,
        At(
            "",
            "Training settings where nothing else states them (`thinwire list recipes`): default (clipping, warm-up, "
            "cosine, standardized images) or paper (none of these). Default: that of the file, or default.",
        ),
    ]
    device: Annotated[str, At("engine.device", "cpu or cuda.")]
    backend: Annotated[str, At("engine.backend", "auto, graph, threads, vmap or loop.", PYTHON_ONLY)]
    chunk: Annotated[int, At("engine.chunk", "Clients trained together; 0 for the whole cohort.", PYTHON_ONLY)]
    precision: Annotated[str, At("engine.precision", "float32; on a GPU also tf32 or bf16.", PYTHON_ONLY)]
    lr: Annotated[
        float | str,
        At("method.client_opt.lr", "Learning rate of clients; auto: found by short trials before the first round."),
    ]
    optimizer: Annotated[Any, At("method.client_opt", "Optimizer of clients: sgd, adam, adamw.", PYTHON_ONLY)]
    schedule: Annotated[Any, At("method.lr_schedule", "Schedule of the learning rate over rounds.", PYTHON_ONLY)]
    local: Annotated[Local, At("local", "Local training of a client in a round.", PYTHON_ONLY)]
    trainer: Annotated[
        str | Callable[..., Any],
        At("local.trainer", "A function `fit(model, records)` that trains a client, or a reference.", PYTHON_ONLY),
    ]
    speed: Annotated[Speed, At("speed", "How long simulated clients take.", PYTHON_ONLY)]
    objective: Annotated[str, At("eval.objective", "What rounds and runs are ranked by: accuracy, loss or a metric.")]
    metrics: Annotated[
        Sequence[str] | Mapping[str, Metric],
        At("", "Another metric to compute (`thinwire list metrics`); may be repeated.", "--metric"),
    ]
    validation_fraction: Annotated[
        float,
        At("task.validation_fraction", "Fraction of each client's examples that is kept from training."),
    ]
    eval_every: Annotated[int, At("eval.every", "Rounds between two evaluations.", PYTHON_ONLY)]
    patience: Annotated[
        int,
        At(
            "eval.patience",
            "End after so many evaluations without a new best one: of the objective or, if clients keep validation "
            "examples (task.validation_fraction), of these.",
        ),
    ]
    target_accuracy: Annotated[float, At("eval.target_accuracy", "End at this accuracy on the test set.", PYTHON_ONLY)]
    stop: Annotated[Callable[[RoundRecord], Any], At("", "End after a record for which it is true.", PYTHON_ONLY)]
    checkpoint_every: Annotated[int, At("checkpoint.every", "Rounds between two checkpoints.", PYTHON_ONLY)]
    keep_best: Annotated[bool, At("checkpoint.best", "Keep the model of the best round: best.safetensors.")]
    set: Annotated[Mapping[str, Any], At("", "Set any setting, as KEY=VALUE; may be repeated.")]
    name: Annotated[str, At("name", "The label of the run in reports.", PYTHON_ONLY)]
    out: Annotated[Path | str, At("", "Run directory, or the folder of the run directories of several runs.")]
    data_dir: Annotated[Path | str, At("", "Folder that holds the datasets.")]
    resume: Annotated[bool, At("", "Continue the run in the directory.", PYTHON_ONLY)]
    overwrite: Annotated[bool, At("", "Delete the run in the directory and start again.")]
    progress: Annotated[bool, At("", "A progress bar: None for terminals and notebooks.", PYTHON_ONLY)]
    log: Annotated[str, At("", "Also log every round to a tracker: tensorboard, mlflow or wandb.")]
    on_round: Annotated[Callable[[RoundRecord], Any], At("", "Is called with every record.", PYTHON_ONLY)]
    on_message: Annotated[OnMessage, At("", "Is called with every message.", PYTHON_ONLY)]


OPTIONS: dict[str, tuple[Any, At]] = {
    name: get_args(hint)[:2]  # type: ignore[misc]
    for name, hint in get_type_hints(Options, include_extras=True).items()
}


def overrides_of(options: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings that options change, by dotted path; None leaves one as it is.

    Args:
        options: the options; `set` takes precedence, a mapping or the words of a command line.
        changes: further settings by dotted path.

    >>> overrides_of({"cohort": 5, "seed": None, "set": ["local.epochs=1"]}, {"rounds": 3})
    {'cohort.size': 5, 'local.epochs': 1, 'rounds': 3}
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := set(given) - set(OPTIONS):
        raise ConfigError(f"unknown option {min(unknown)}; write one of {', '.join(OPTIONS)}")
    words = given.get("set", {})
    stated = words if isinstance(words, Mapping) else parse_overrides(words)
    own = {path: _named(name, value) for name, value in given.items() if (path := OPTIONS[name][1].path)}
    if given.get("lr") == "auto":
        del own["method.client_opt.lr"]
        own["auto_lr"] = True
    return {**own, **stated, **(changes or {})}


_OF_TORCH = {"CosineAnnealingLR": "cosine", "ExponentialLR": "exponential", "ConstantLR": "constant"}


def _named(option: str, value: Any) -> Any:
    """The name of a class of `torch.optim`, or a table of a `partial` of one; other values as they are.

    >>> from functools import partial
    >>> import torch
    >>> _named("optimizer", torch.optim.AdamW), _named("optimizer", partial(torch.optim.SGD, momentum=0.9))
    ('adamw', {'kind': 'sgd', 'momentum': 0.9})
    """
    if option == "lr" and isinstance(value, str) and value != "auto":
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"lr must be a number or 'auto', not {value!r}; write for example 0.1") from None
    if option not in ("optimizer", "schedule") or isinstance(value, str | Mapping):
        return value
    make, options = (value.func, value.keywords) if isinstance(value, partial) else (value, {})
    if isinstance(make, type) and make.__module__.startswith("torch.optim"):
        name = _OF_TORCH.get(make.__name__, make.__name__.lower())
        return {"kind": name, **options} if options else name
    if callable(value) or type(value).__module__.startswith("torch.optim"):
        example = "'adam' or torch.optim.Adam" if option == "optimizer" else "'cosine' or a part of thinwire.optimizers"
        raise ConfigError(f"{option} must be a name, a part or a class of torch.optim, not {value!r}; write {example}")
    return value
