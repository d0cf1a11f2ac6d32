"""Try an app at a site before it joins, without a server: data, model, loss, one step of training, and its messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from thinwire.core.text import visible
from thinwire.data.losses import is_classification
from thinwire.errors import ConfigError
from thinwire.federation.federation import Federation
from thinwire.federation.settings import Settings
from thinwire.flower.apps import job_in, own_data
from thinwire.runs.check import check
from thinwire.secure.frames import tolerance


def check_site(experiment: Settings, folder: Path) -> dict[str, Any]:
    """The cost of the experiment (`thinwire check`) for a client with the data of a site, and its examples by class.

    Raises an error of one line if the site could not take part.

    Args:
        experiment: that of the app.
        folder: the folder of the site's data.
    """
    if (own := own_data(experiment)) is None:
        raise ConfigError(
            f"{experiment.task.label} is not the task of an `OwnData`; write `thinwire app METHOD DIR --template "
            "own-data` for an app with data of its own, and in task.py `task = own.task`"
        )
    server, site = (
        Federation(experiment.engine, job_in(experiment, where)) for where in (None, folder.expanduser().absolute())
    )
    if server.contract.schema.digest != site.contract.schema.digest:
        raise ConfigError(
            "the model has other initial weights each time it is made; draw them with torch alone, or read a file"
        )
    task, facts = site.job.task, check(experiment, job=site.job)
    facts["examples"] = len(task.train)
    if site.job.method.secure_aggregation:
        facts["note"] = " ".join(filter(None, (facts["note"], tolerance(site.job.cohort))))
    if is_classification(task.loss) and task.class_names:
        counts = torch.bincount(task.train.targets, minlength=len(task.class_names)).tolist()
        facts["examples_by_class"] = {visible(x, 40): n for x, n in zip(task.class_names, counts, strict=True)}
    if warnings := own.data.warnings(folder.expanduser()):
        facts["warning"] = visible("; ".join(warnings), 1000)
    return facts
