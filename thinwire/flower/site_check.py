"""Try an app at a site before it joins: data, shapes, a local step, the evaluation, time and memory; without a server.

A server without data and a client with the data of the site are made in this process, as in a deployment, and exchange
the messages of two rounds in which this site trains one step.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thinwire.aggregators import WeightedMean
from thinwire.core.text import visible
from thinwire.data.losses import is_classification
from thinwire.errors import ConfigError, WireError
from thinwire.federation.job import Job, RoundRecord
from thinwire.federation.settings import Settings
from thinwire.flower.app_folder import site_job
from thinwire.flower.client import Client, InMemory
from thinwire.flower.server import FlowerServer
from thinwire.flower.transport import RoundPolicy
from thinwire.protocol.round import Request, Response
from thinwire.training.batches import plan_batches


class _Site(InMemory):
    """One site in memory, with the seconds of each response by phase."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.number = 0
        self.seconds: dict[str, float] = {}
        self.bytes_up = 0

    def clients(self) -> Set[int]:
        """The client that is asked."""
        return frozenset((self.number,))

    def respond(self, number: int, request: Request) -> Response:
        """The response, timed; of two rounds the second counts, since the first also loads code."""
        began = time.perf_counter()
        response = super().respond(number, request)
        self.seconds[request.phase or "train"] = time.perf_counter() - began
        self.bytes_up = len(response.data) or self.bytes_up
        return response


def check_site(experiment: Settings, folder: Path) -> dict[str, Any]:
    """Try the data of a site; returns what was found. Raises an error of one line if the site could not take part.

    Args:
        experiment: that of the app.
        folder: the folder of the site's data.
    """
    site_job(experiment, None)  # the model is tried first; this also loads code, whose time is not that of the data
    began = time.perf_counter()
    job = site_job(experiment, folder.expanduser().absolute())
    loaded = time.perf_counter() - began
    site = _Site(Client(experiment.engine, _one_step(job)))
    site.client.federation.try_model()
    sent = dict(next(iter(_two_rounds(experiment, site).sites_eval.values()), {}))
    undefined = ", ".join(name for name in job.all_metrics if sent and name not in sent)
    unit = 1 if sys.platform == "darwin" else 1024
    steps = plan_batches([len(job.task.clients.client(0))], [site.client.federation.key], job.local).rows.shape[1]
    return {
        **_data(job),
        "parameters": site.client.federation.model.parameters(),
        "steps_per_round": steps,
        "seconds_to_load": round(loaded, 3),
        "seconds_per_round": round(site.seconds["train"] * steps, 3),
        **({"seconds_to_evaluate": round(site.seconds["evaluate"], 3)} if "evaluate" in site.seconds else {}),
        "bytes_up": site.bytes_up,
        "memory_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "evaluation_after_two_steps": sent,
        **({"metrics_not_defined_here": undefined} if undefined else {}),
        "note": job.task.note,
    }


def _one_step(job: Job) -> Job:
    """The job with one client a round and one local step, evaluated in every round."""
    method = replace(job.method, aggregator=WeightedMean(), secure_aggregation=False)
    return replace(job, method=method, cohort=1, eval_every=1, local=replace(job.local, steps=1))


def _two_rounds(experiment: Settings, site: _Site) -> RoundRecord:
    """The record of the last of two rounds of a server with this site alone."""
    job, lines = _one_step(site_job(experiment, None)), list[str]()
    server = FlowerServer(experiment.engine, job, lambda *_: site, RoundPolicy(60.0, 1.0, 1, wait=0.0), lines.append)
    if server.contract.schema.digest != site.client.contract.schema.digest:
        raise ConfigError(
            "the model has other initial weights each time it is made; draw them with torch alone, or read a file"
        )
    state, record = server.start(), None
    for _ in range(min(2, job.rounds)):
        site.number = server.sampler.cohort(state.round)[0]
        try:
            state, record = server.round(state)
        except WireError as error:
            refused = [line.split(": ", 2)[-1] for line in lines if "refused" in line]
            raise ConfigError(f"the local step failed: {visible((refused or [str(error)])[-1], 500)}") from error
    assert record is not None
    return record


def _data(job: Job) -> dict[str, Any]:
    """Sizes, shapes and classes of the site's examples."""
    task = job.task
    own, held = (torch.from_numpy(one.client(0)) for one in (task.clients, task.client_tests or task.clients))
    inputs, targets = task.train.gather(own[:1])
    named_inputs = inputs if isinstance(inputs, dict) else {"": inputs}
    shapes = {name: list(one.shape[1:]) for name, one in named_inputs.items()}
    facts: dict[str, Any] = {
        "examples_to_train": len(own),
        "examples_to_evaluate": len(held) if task.client_tests is not None else 0,
        "input_shape": str(shapes.get("", shapes)),
        "target_type": str(targets.dtype),
    }
    if not is_classification(task.loss) or not task.class_names:
        return facts
    counts = torch.bincount(task.train.targets, minlength=len(task.class_names)).tolist()
    named = {visible(name, 40): count for name, count in zip(task.class_names, counts, strict=True)}
    absent = ", ".join(name for name, count in named.items() if not count)
    return {**facts, "examples_by_class": named, "classes_without_examples": absent or "none"}
