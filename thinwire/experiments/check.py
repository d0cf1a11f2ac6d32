"""The cost of an experiment without training it: trainable parameters, bytes a round, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.core.spec import Spec
from thinwire.core.tree import restrict
from thinwire.experiments.build import build_job
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.forecast import Lengths, forecast
from thinwire.protocol.client import Group, initial_client_state, training_inputs
from thinwire.protocol.round import initial_server_state, plan_round
from thinwire.protocol.server import open_round
from thinwire.schedules.base import Plan
from thinwire.schedules.lama import FedLAMA
from thinwire.simulation.engine import LocalEngine
from thinwire.simulation.simulation import Simulation
from thinwire.training.batches import plan_batches
from thinwire.training.inputs import Backend, UnsupportedModel
from thinwire.training.loop import LoopTrainer
from thinwire.training.memory import Peak, evaluation_bytes, model_bytes, resident_bytes, training_peak
from thinwire.training.vmap import VmapTrainer


def check(experiment: Experiment, data_dir: Path | None = None) -> dict[str, Any]:
    """Build the experiment without training it. Raises the errors that a run would raise.

    The bytes of a client are the lengths of messages with all-zero contents, in a round that synchronizes all blocks;
    for a method with two stages, in the first. Catch-up of returning clients is not included. They are None where the
    length of a message depends on its contents.

    The bytes of all rounds (`forecast.py`) include catch-up, the second stage, and blocks that are not synchronized in
    every round.
    """
    engine = LocalEngine("cpu", experiment.engine.backend, experiment.engine.chunk)
    job = build_job(experiment, data_dir)
    simulation = engine.prepare(job)
    contract, method = simulation.contract, job.method
    state, resident = simulation.start(), resident_bytes()
    plan_round(contract, state.server)  # raises if the method cannot run
    plan = Plan(contract.sendable.named)
    planned = Spec.of(restrict(simulation.federation.first.coords, plan.names))
    code = method.sketch.spec(planned)
    sizes = job.task.clients.sizes()
    steps = [plan_batches([int(n)], [simulation.federation.key], job.local).rows.shape[1] for n in np.unique(sizes)]
    cohort = min(job.cohort, len(simulation.federation.eligible))
    up, down = _message_sizes(simulation, plan, cohort)
    lengths = [Lengths(stage) for stage in contract.stages]
    unknown = "" if all(one.exact for one in lengths) else UNKNOWN
    return {
        "method": experiment.name,
        "task": experiment.task.label,
        "clients": len(job.task.clients),
        "cohort": cohort,
        "examples_per_client": {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())},
        "steps_per_round": {"min": min(steps), "max": max(steps)},
        "parameters": simulation.federation.model.parameters(),
        "trainable": contract.coords.size,
        **_tiers(simulation),
        "values_uploaded": code.size,
        "bytes_up_per_client": up,
        "bytes_down_per_client": down,
        "bytes_per_round": None if up is None or down is None else cohort * (up + down),
        **_stages(simulation),
        **_all_rounds(simulation),
        **_memory(simulation, resident if experiment.engine.device == "cpu" else 0),
        "note": " ".join(filter(None, (job.task.note, _spaces(simulation), unknown, _ends_early(experiment)))),
    }


def _memory(simulation: Simulation, resident: int) -> dict[str, Any]:
    """The memory that a run takes: what is there before the first round, and the peak of a round.

    Args:
        simulation: a simulation that has not begun.
        resident: the memory of this process, with libraries, data and model; 0 for a run on a GPU, whose memory has
            the model alone before the first round.
    """
    job, federation = simulation.job, simulation.federation
    public, backend = federation.first, simulation.backends.initial()[0]
    model, peak = model_bytes(job.task.model, copies=2), Peak(0)  # the one that was given, and a private copy
    together = 0
    if not job.local.trainer:  # what a trainer of somebody else takes is not known
        backend, together, peak = _training(simulation, backend)
    evaluation = 0
    if federation.test is not None and len(federation.test):
        weights = simulation.contract.method.space.evaluation_weights(
            public.base, simulation.contract.basis(0, federation.device), public.coords
        )
        evaluation = evaluation_bytes(federation.model, weights, public.buffers, federation.test)
    heap = peak.heap if resident else 0
    return {
        "memory_before": resident or model,
        "memory_model": model,
        "memory_training": peak.tensors,
        "memory_per_client": peak.tensors // max(1, together),
        "memory_evaluation": evaluation,
        "memory_allocator": max(0, heap - peak.tensors),
        "memory_estimate": (resident or model) + max(peak.tensors, heap, evaluation),
        "clients_at_a_time": together,
    }


def _training(simulation: Simulation, backend: Backend) -> tuple[Backend, int, Peak]:
    """The backend, the clients that it trains at a time, and the peak of their training."""
    federation, engine = simulation.federation, simulation.engine
    cohort = federation.sampler.cohort(0)
    clients = cohort[: engine.chunk or len(cohort)]
    public = federation.first
    states = tuple(initial_client_state(simulation.contract, public, i) for i in clients)
    group = Group(public, Plan(simulation.contract.sendable.named), clients, states)
    work = federation.sampler.workload(0, clients)
    widest = federation.train.widest(torch.arange(len(federation.train)))[:1]
    work = replace(work, index=widest.expand(work.index.shape))
    held = (*public.base.values(), *public.coords.values(), *federation.model.module.parameters())
    try:
        if backend in ("graph", "vmap"):
            inputs = training_inputs(simulation.contract, simulation.backends.models["vmap"], group, work)
            return "vmap", len(clients), training_peak(VmapTrainer(), federation.model, inputs, held)
    except UnsupportedModel:
        if engine.backend != "auto":
            raise
    inputs = training_inputs(simulation.contract, simulation.backends.models["loop"], group, work)
    return "loop", 1, training_peak(LoopTrainer(), federation.model, inputs, held)


UNKNOWN = (
    "Lengths depend on contents: those of all rounds are for Gaussian values; a short run (--rounds 3) measures them."
)


def _spaces(simulation: Simulation) -> str:
    """What the spaces of all stages derive from the model: a rank, a number of segments."""
    stages = simulation.contract.stages
    return " ".join(dict.fromkeys(filter(None, (stage.method.space.note(stage.weights) for stage in stages))))


def _all_rounds(simulation: Simulation) -> dict[str, Any]:
    """The bytes of the whole run, catch-up included; a range for a schedule that depends on training."""
    most, rounds = forecast(simulation), simulation.job.rounds
    facts: dict[str, Any] = {"rounds": rounds, "bytes_up_of_all_rounds": most.up, "bytes_down_of_all_rounds": most.down}
    facts |= {"bytes_catchup_of_all_rounds": most.catchup, "bytes_of_all_rounds": most.total}
    if isinstance(schedule := simulation.job.method.schedule, FedLAMA) and schedule.phi > 1:
        facts["bytes_of_all_rounds_at_least"] = forecast(simulation, waiting=True).total
        facts["layers_that_wait"] = (
            f"depends on training: 1 - (fraction of parameters that wait) (1 - 1/{schedule.phi}) of the bytes"
        )
    return facts


def _stages(simulation: Simulation) -> dict[str, Any]:
    """Rounds, parameters and bytes of each stage of a method with two stages."""
    stages = simulation.contract.stages
    if len(stages) == 1:
        return {}
    ends = [*(stage.since for stage in stages[1:]), simulation.job.rounds]
    facts, samples = {}, simulation.job.task.clients.sizes().tolist()
    for name, stage, end in zip(("first_stage", "second_stage"), stages, ends, strict=True):
        lengths, names = Lengths(stage), stage.sendable.named
        facts[name] = {"rounds": end - stage.since, "trainable": stage.coords.size}
        facts[name] |= {"bytes up per client": _mean([lengths.up(names, 0, stage.since, n) for n in samples])}
    return facts


def _ends_early(experiment: Experiment) -> str:
    goal = experiment.eval.target_accuracy
    return f"A run that reaches {100 * goal:g} % ends before its last round." if goal < 1 else ""


def _message_sizes(simulation: Simulation, plan: Plan, cohort: int) -> tuple[int | None, int | None]:
    """The lengths of an upload, and of a download for a client that took part in the last round.

    Means over all clients, where clients have different budgets or weights of different length.
    """
    contract, method = simulation.contract, simulation.job.method
    tiers = [contract.tier(client) for client in range(len(simulation.job.task.clients))]
    state, lengths = initial_server_state(contract, simulation.federation.first), Lengths(contract)
    code = method.sketch.spec(contract.coords.restrict(plan.names))
    up = down = None
    if all(codec.size(code) is not None for codec in method.ups):
        samples = simulation.job.task.clients.sizes().tolist()
        up = _mean([lengths.up(plan.names, tier, 0, n) for tier, n in zip(tiers, samples, strict=True)])
    if method.download == "full":
        one_of_each = [tiers.index(tier) for tier in sorted(set(tiers))]
        made = open_round(contract, state, dict.fromkeys(one_of_each, 0))
        sizes = {tiers[client]: len(data) for client, data in made.items()}
        down = _mean([sizes[tier] for tier in tiers])
    elif method.down.size(contract.step_of(contract.coords.restrict(plan.names))) is not None:
        down = lengths.next_down(state, plan, cohort)
    return up, down


def _mean(sizes: Sequence[int]) -> int:
    """The mean length over clients, rounded up."""
    return -(-sum(sizes) // len(sizes))


def _tiers(simulation: Simulation) -> dict[str, Any]:
    """The number of clients of each tier, where there are tiers."""
    known = simulation.job.method.budget.tiers
    tiers = [simulation.contract.tier(client) for client in range(len(simulation.job.task.clients))]
    return {"tiers": {f"tier {i}": tiers.count(i) for i in range(len(known))}} if known else {}
