"""Try an app at a site before it joins: data, shapes, a local step, the evaluation, time and memory; without a server.

A server without data and a client with the data of the site are made in this process, as in a deployment, and exchange
the messages of two rounds in which this site trains one step.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinwire.aggregators import WeightedMean
from thinwire.core.text import visible
from thinwire.data.losses import is_classification
from thinwire.data.task import Task
from thinwire.errors import ConfigError, WireError
from thinwire.federation.job import Job, RoundRecord
from thinwire.federation.settings import Settings
from thinwire.federation.site_record import SiteRecord
from thinwire.flower.app_folder import site_job
from thinwire.flower.client import Client, InMemory
from thinwire.flower.server import FlowerServer
from thinwire.flower.transport import RoundPolicy
from thinwire.training.batches import plan_batches


def check_site(experiment: Settings, folder: Path) -> dict[str, Any]:
    """Try the data of a site; returns what was found. Raises an error of one line if the site could not take part.

    Args:
        experiment: that of the app.
        folder: the folder of the site's data.
    """
    server_job = site_job(experiment, None)  # tries the model first, and loads code: that is not time of the data
    began = time.perf_counter()
    job = site_job(experiment, folder.expanduser().absolute())
    loaded = time.perf_counter() - began
    client = Client(experiment.engine, _one_step(job))
    client.federation.try_model()
    record, site = _two_rounds(experiment, _one_step(server_job), client)
    unit = 1 if sys.platform == "darwin" else 1024
    steps = plan_batches([len(job.task.clients.client(0))], [client.federation.key], job.local).rows.shape[1]
    return {
        **_data(job.task),
        "parameters": client.federation.model.parameters(),
        "steps_per_round": steps,
        "seconds_to_load": round(loaded, 3),
        "seconds_per_round": round((site.seconds or 0.0) * steps, 3),
        "bytes_up": site.bytes_up,
        "memory_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "evaluation_after_two_steps": next(iter(record.sites_eval.values()), {}),
        "note": job.task.note,
    }


def _one_step(job: Job) -> Job:
    """The job with one client a round and one local step, evaluated in every round."""
    method = replace(job.method, aggregator=WeightedMean(), secure_aggregation=False)
    return replace(job, method=method, cohort=1, eval_every=1, local=replace(job.local, steps=1))


def _two_rounds(experiment: Settings, job: Job, client: Client) -> tuple[RoundRecord, SiteRecord]:
    """The records of the second of two rounds of a server with this site alone; the first also loads code."""
    site, lines, sites = InMemory(client), list[str](), list[SiteRecord]()
    policy = RoundPolicy(60.0, 1.0, 1, wait=0.0)
    server = FlowerServer(experiment.engine, job, lambda *_: site, policy, lines.append, on_sites=sites.extend)
    if server.contract.schema.digest != client.contract.schema.digest:
        raise ConfigError(
            "the model has other initial weights each time it is made; draw them with torch alone, or read a file"
        )
    state, record = server.start(), None
    for _ in range(min(2, job.rounds)):
        site.clients = partial(frozenset, server.sampler.cohort(state.round))  # type: ignore[method-assign]
        try:
            state, record = server.round(state)
        except WireError as error:
            refused = [line.split(": ", 2)[-1] for line in lines if "refused" in line]
            raise ConfigError(f"the local step failed: {visible((refused or [str(error)])[-1], 500)}") from error
    assert record is not None
    return record, sites[-1]


def _data(task: Task) -> dict[str, Any]:
    """Sizes, shapes and classes of the site's examples."""
    own, held = task.clients.client(0), task.client_tests.client(0) if task.client_tests is not None else ()
    inputs, _ = task.train.gather(torch.from_numpy(own[:1]))
    named = inputs if isinstance(inputs, dict) else {"": inputs}
    shapes = {name: list(one.shape[1:]) for name, one in named.items()}
    facts: dict[str, Any] = {"examples_to_train": len(own), "examples_to_evaluate": len(held)}
    facts["input_shape"] = str(shapes.get("", shapes))
    if is_classification(task.loss) and task.class_names:
        counts = torch.bincount(task.train.targets, minlength=len(task.class_names)).tolist()
        facts["examples_by_class"] = {visible(x, 40): n for x, n in zip(task.class_names, counts, strict=True)}
    return facts
