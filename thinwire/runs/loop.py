"""The round loop of a run: from round 1 or a checkpoint, into a directory or in memory.

    run.py, execute.py  ->  RunPlan.train  ->  Loop.train  ->  Loop.round  ->  Federation.round

After every round, in this order: the record is written to `metrics.jsonl`, `on_round` is called, then `stop`; last, a
checkpoint is written if one is due. A deployment goes back where clients destroyed the model (`retry.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from time import monotonic
from typing import Any, Literal

from thinwire.core.tree import Spec, Tree
from thinwire.errors import CheckpointError, Diverged, Unfit
from thinwire.federation.federation import Federation, OnMessage
from thinwire.federation.job import RoundRecord, RunState
from thinwire.federation.settings import Settings
from thinwire.federation.standing import left_out_until
from thinwire.runs.best import Lead, is_improving, selected_by
from thinwire.runs.checkpoint import Checkpoint, save_checkpoint, tensor_bytes
from thinwire.runs.collapse import Verdict, chance_of, judge, news
from thinwire.runs.files import append_json, json_lines, write_json
from thinwire.runs.link_time import seconds_by_link
from thinwire.runs.records import BEST, CLIENTS, totals, troubles
from thinwire.runs.retry import MAX_ROLLBACKS, ROLLED_BACK, Retry, bytes_of, read_retries
from thinwire.runs.run_directory import METRICS, RunFolder, Summary, environment, records_of
from thinwire.runs.summary import layers_of, nonzero_b_of, privacy_of

LONGEST = 60.0  # seconds after which a round writes a checkpoint in any case
OnRound = Callable[[RoundRecord], Any]
EndedBy = Literal["rounds", "target accuracy", "patience", "stop function", "divergence"]


class Loop:
    """A run while it is trained: its state, its records, and the best model if it is kept.

    Args:
        settings: the settings of the run.
        federation: what runs its rounds, as the settings say.
        folder: the run directory; None for a run in memory.
        resume: whether to continue from the newest checkpoint of the directory.
    """

    def __init__(self, settings: Settings, federation: Federation, folder: RunFolder | None, resume: bool) -> None:
        self.settings, self.folder, self.job, self.federation = settings, folder, federation.job, federation
        self.retries = read_retries(folder.path) if folder else []
        self.chance = chance_of(federation)
        self.objective = selected_by(self.job.ranked_by, self.job.task.client_tests is not None)
        self.summary: Summary = {}
        self.clients: list[dict[str, Any]] = []  # the numbers of each client at the end, the worst first
        # a server has a log, and attackers are expected to be refused
        self.warns = self.federation.clients.simulated and self.job.attack is None
        self.trained_by = ("", "")  # the training backend in `environment.json`, and the reason
        found = folder.load(settings.engine.device) if folder and resume else None
        if found:
            check_blocks(federation, found.state)
        self._continue_from(found)

    def _continue_from(self, start: Checkpoint | None) -> None:
        """Continue after a checkpoint, or from the start, with what the times that the run went back have changed."""
        times = [(retry.from_round, retry.left_out) for retry in self.retries]
        self.federation.clients.leave_out(left_out_until(times), len(self.retries))
        self.state = start.state if start else self.federation.start()
        self.saved, self.saved_at = self.state.round, monotonic()  # the round of the newest checkpoint, and when
        self.due = False  # whether a checkpoint is
        self.lines = start.lines if start else []
        if self.folder:
            self.folder.rewind(start, len(self.retries))
        self.verdict = judge(self.lines, self.chance)
        self.lead = Lead(self.objective).along(self.lines)
        keeps_best = self.settings.checkpoint.best
        self.best: Tree = dict(start.best) if start and keeps_best else {}
        if keeps_best and self.lead.round and not self.best:
            raise CheckpointError(f"the best model, of round {self.lead.round}, was not kept; run it again")

    def train(
        self,
        on_round: OnRound | None = None,
        on_message: OnMessage | None = None,
        on_continue: Callable[[int], None] | None = None,
        stop: OnRound | None = None,
    ) -> None:
        """Train the rounds that are left, and write the results.

        Args:
            on_round: is called after every round, first with the records of earlier rounds; after going back, again
                with the rounds that are repeated.
            on_message: is called with every message: `on_message(round, "up" or "down", client, message)`.
            on_continue: is called with the number of rounds that are done, before the others are trained.
            stop: the run ends after a record for which it is true.
        """
        if on_continue:
            on_continue(self.state.round)
        for record in records_of(self.lines) if on_round else ():
            on_round(record)  # type: ignore[misc]
        try:
            while True:
                ended = self.ended_by(stop)
                if self.due or (ended and self.saved < self.state.round):
                    self.save()
                if ended:
                    break
                try:
                    record = self.round(on_message)
                except Unfit as error:
                    self.go_back(error)
                    continue
                if on_round:
                    on_round(record)
        except Diverged as error:
            self.finish("divergence", error)
            raise
        except KeyboardInterrupt:  # the last complete round
            if self.saved < self.state.round:
                self.save()
            raise
        self.finish(ended)

    def round(self, on_message: OnMessage | None) -> RoundRecord:
        """Train one round, and write its record."""
        before, known = self.state, self.verdict
        state, record = self.federation.round(before, on_message)
        lost = sum(retry.bytes_abandoned for retry in self.retries if retry.from_round == before.round)
        contract = self.federation.contract.at(state.server.public.version)
        layers = contract.method.schedule.measured(state.server.schedule, contract.coords)
        record = record._replace(bytes_abandoned=lost, layers=layers)
        self.verdict = judge([*self.lines, record._asdict()], self.chance)
        record = record._replace(alarm=news(known, self.verdict))
        self.lines.append(record._asdict())
        if self.folder:
            append_json(self.folder.path / METRICS, self.lines[-1])
        self.state, self.lead = state, self.lead.after(self.lines[-1])
        if self.settings.checkpoint.best and self.lead.round == record.round:
            self.best = self.weights()
        self.due = self.is_due(before)
        if self.warns and (found := troubles([self.lines[-1]])):
            self.warns = False
            warnings.warn(f"{found}; further rounds are in the records and on the page", stacklevel=2)
        if self.folder and self.trained_by != (state.backend, state.backend_reason):
            self.trained_by = (state.backend, state.backend_reason)
            write_json(self.folder.path / "environment.json", {**environment(), **self.facts()})
        return record

    def is_due(self, before: RunState) -> bool:
        """Whether a checkpoint is due after a round."""
        state = self.state
        # another way to train, such as fewer clients at a time, must not apply to rounds before it: save at once
        changed = (state.backend, state.chunk) != (before.backend, before.chunk)
        late = monotonic() - self.saved_at >= LONGEST
        return changed or late or state.round - self.saved >= self.settings.checkpoint.every

    def save(self) -> None:
        """Write a checkpoint; a run without a directory has none."""
        if folder := self.folder:
            checkpoint = Checkpoint(self.state, self.best, json_lines(*self.lines))
            save_checkpoint(folder.checkpoints, checkpoint, folder.configs[0], folder.keep)
        self.saved, self.saved_at, self.due = self.state.round, monotonic(), False

    def ended_by(self, stop: OnRound | None) -> EndedBy | None:
        """Why the run ends after these records; None if it goes on."""
        if not self.lines:
            return None
        last, wanted = self.lines[-1], self.settings.eval
        if last["round"] >= self.settings.rounds:
            return "rounds"
        if wanted.target_accuracy < 1 and (last["accuracy"] or 0.0) >= wanted.target_accuracy:
            return "target accuracy"
        if 0 < wanted.patience <= self.lead.since:
            return "patience"
        return "stop function" if stop and stop(RoundRecord(**last)) else None

    def go_back(self, error: Unfit) -> None:
        """Go back to a checkpoint, without the clients that were far off.

        Raises:
            Diverged: the error, if the checkpoint is not there, or the run went back too often.
        """
        if len(self.retries) >= MAX_ROLLBACKS:
            raise Diverged(f"{error}; also after {MAX_ROLLBACKS} retries", error.sent) from error
        failed, start = self.state.round + 1, None
        if number := self.state.round if error.back_to is None else error.back_to:
            start = self.folder.load(self.settings.engine.device, number) if self.folder else None
            if start is None:
                raise error
        version = start.state.server.public.version if start else 0
        lr = self.federation.contract.at(version).client_opt(version).lr
        lost, why = bytes_of(self.lines[number:]) + sum(error.sent), str(error).removeprefix(f"round {failed}: ")
        self.retries.append(Retry(failed, ROLLED_BACK, why, number, version, lr, lost, sorted(error.far)))
        if self.folder:
            self.folder.go_back(number, self.retries)
        self._continue_from(start)

    # -- results -----------------------------------------------------------------------------------------------------

    def weights(self) -> Tree:
        """The weights and the buffers of the newest version, or their average, on the CPU."""
        weights, buffers = self.federation.final(self.state)
        return {name: one.detach().cpu() for name, one in {**weights, **buffers}.items()}

    def facts(self) -> dict[str, Any]:
        """How clients are trained on this machine, for `environment.json`."""
        engine, state = self.settings.engine, self.state
        return {
            "device": engine.device,
            "precision": engine.precision,
            "clients_trained_by": state.backend,
            "because": state.backend_reason,
            "note": self.job.task.note,
            "clients_at_a_time": str(state.chunk or engine.chunk or "all"),
            "chance": self.chance._asdict() if self.chance else None,
            "test_examples": len(self.job.task.test or ()),
        }

    def totals(self, error: Diverged | None = None) -> Summary:
        """The totals of the run; if it diverged, with the bytes of the round that failed."""
        settings, federation, lines = self.settings, self.federation, self.lines
        verdict = Verdict("diverged", len(lines) + 1, str(error)) if error else self.verdict
        abandoned = sum(retry.bytes_abandoned for retry in self.retries) + sum(error.sent if error else ())
        sent = {block.name: block for stage in federation.contract.stages for block in stage.coords}
        return {
            "method": settings.name,
            "task": settings.task.label,
            "model": type(self.job.task.model).__name__,
            "seed": settings.seed,
            "rounds": len(lines),
            "status": verdict.status,
            "status_round": verdict.round,
            "status_why": verdict.why,
            **({"chance_accuracy": self.chance.share} if self.chance else {}),
            "parameters": federation.model.parameters(),
            "trainable": Spec.of(federation.first.coords).size,
            **totals(lines, abandoned),
            "objective": self.job.ranked_by.summary(lines),
            **({"still_improving": True} if is_improving(self.job.ranked_by, lines) else {}),
            **({"retries": [retry._asdict() for retry in self.retries]} if self.retries else {}),
            **privacy_of(federation, len(lines)),
            "seconds_by_link": seconds_by_link(lines),
            "layers": layers_of(Spec(tuple(sent.values())), self.state.sync_counts),
            **nonzero_b_of(federation, self.state),
        }

    def finish(self, ended_by: EndedBy, error: Diverged | None = None) -> None:
        """Make the totals, and write them with the models; a run that diverged has no models."""
        self.summary = self.totals(error) | {"ended_by": ended_by}
        if self.settings.checkpoint.best and self.lead.round:
            found = {"round": self.lead.round, "value": self.lead.value, "chosen_by": self.objective.label}
            self.summary["best"] = found
        if not error:
            sites = [{"client": site, **numbers} for site, numbers in self.lines[-1]["sites_eval"].items()]
            rows = self.federation.clients.results(self.state) or sites
            # the lowest accuracy first; of equal ones, or without, the highest loss, which is left out if not finite
            self.clients = sorted(rows, key=lambda row: (row.get("accuracy", 0.0), -row.get("loss", math.inf)))
        results = dict[str, bytes]()
        if self.clients:
            self.summary["worst_client"] = self.clients[0]
            results[CLIENTS] = json_lines(*self.clients).encode()
        if self.folder:
            if not error:
                results["model.safetensors"] = tensor_bytes(self.weights())
            if self.best and not error:
                results[BEST] = tensor_bytes(self.best, round=str(self.lead.round))
            self.folder.finish(self.summary, results)


def check_blocks(federation: Federation, state: RunState) -> None:
    """Refuse a checkpoint whose blocks are not those of this model and method."""
    public, contract = state.server.public, federation.contract.at(state.server.public.version)
    wanted = (Spec.of(federation.first.base), contract.coords, contract.shared, contract.buffers)
    model = (*contract.weights, *contract.buffers) if federation.averages and state.round else ()
    same = {one.name: one.shape for one in model} == {name: tuple(one.shape) for name, one in state.average.items()}
    if not same or any(Spec.of(tree) != spec for tree, spec in zip(public[1:], wanted, strict=True)):
        raise CheckpointError(
            f"the checkpoint of round {state.round} holds other blocks than this model and method; remove it"
        )
