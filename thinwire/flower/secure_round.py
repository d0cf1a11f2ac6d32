"""The phases of secure aggregation on the server: who takes part, whose masks must be removed, and the sum.

    keys       public keys of the cohort                            at least the threshold, else the next attempt
    shares     sealed shares of all, relayed                        the same
    (upload)   masked uploads of those that shared                  fewer: `VersionSpent`
    confirm    signatures of the survivors, if keys were signed     fewer: `VersionSpent`
    unmask     one share of each member from each survivor          fewer: `VersionSpent`

    sum of q_i = sum of y_i - own masks of survivors + masks of dropped clients with survivors   mod 2^32

The name of a session follows from run, version and attempt, so a server that was killed repeats its requests and gets
the same answers. Clients answer a version once: if that was in a session that cannot be finished, the version is spent,
and the round is repeated from the next version, which is made with an update of zero. A survivor's seed is checked
against its commitment, the mask key of a dropped client against its public key, so wrong shares are found, and outvoted
where enough others are right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from thinwire.errors import Diverged, ThinwireError, WireError
from thinwire.flower.collect import Collector, FlowerCollected, check_error, requests_to
from thinwire.flower.policy import Deadline
from thinwire.protocol.contract import Contract
from thinwire.protocol.round import Reply, Request, Response
from thinwire.protocol.server import Aggregate, next_version
from thinwire.protocol.state import ClientState, ServerState
from thinwire.protocol.upload import Upload, decode_upload
from thinwire.schedules.base import Plan
from thinwire.secure import frames
from thinwire.secure.client import AlreadyAnswered, mask_secrets
from thinwire.secure.frames import ANSWERS, CONFIRM, KEYS, REQUESTS, SHARES, UNMASK, UPLOAD, WORDS, Advert, Head
from thinwire.secure.keys import commit, recover, session_key
from thinwire.secure.masks import hidden_size, pair_masks, self_mask, values_of
from thinwire.wire import message as wire

DONE = {
    KEYS: "sent keys",
    SHARES: "shared their secrets",
    UPLOAD: "sent a masked upload",
    CONFIRM: "confirmed the survivors",
    UNMASK: "helped to remove masks",
}


class VersionSpent(ThinwireError):
    """Clients answered this version in a session that cannot be finished, and answer no second time."""

    trained = True  # in this attempt


class VersionAnswered(VersionSpent):
    """Clients had answered this version before."""

    trained = False


class _SessionFailed(ThinwireError):
    """Too few clients took part, before any of them sent an upload: another session can be tried."""


class SecureRound:
    """A round of secure aggregation.

    Args:
        collector: asks the clients.
        got: has the round and its cohort; receives uploads whose masks cancel in their sum, counts of bytes, and who
            was refused.
    """

    def __init__(self, collector: Collector, got: FlowerCollected) -> None:
        self.collector, self.got, self.round, self.version = collector, got, got.round, got.round.version
        self.clients, self.cohort = len(collector.job.task.clients), collector.job.cohort
        self.contract = collector.contract.at(self.version)
        self.answered: set[int] = set()  # clients that have answered this version in another session
        self.downloads = requests_to(got.cohort, got)
        got.downloads = {i: wire.Parts((one.data,)) for i, one in self.downloads.items()}

    def collect(self) -> None:
        """Exchange all phases with the clients of the cohort, and fill `got`."""
        for attempt in range(self.collector.policy.tries):
            try:
                return self._session(attempt)
            except _SessionFailed as failed:
                self.collector.say(self.got, str(failed))
        line = "too few clients took part in secure aggregation; the same command continues when they are back"
        raise WireError(f"round {self.got.number}: {line}")

    def _session(self, attempt: int) -> None:
        self.head = Head(session_name(self.collector.transport.run, self.contract, self.version, attempt), self.version)
        self.least = max(frames.threshold(self.cohort), self.collector.policy.needed(len(self.downloads)))
        self.adverts: dict[int, Advert] = self._ask_all(KEYS, self.downloads)
        self.least = max(self.least, frames.threshold(len(self.adverts)))
        sealed = self._ask_all(SHARES, self.adverts, self.least, self.adverts, check=self._shares_for_all)
        shares = {i: {j: theirs[i] for j, theirs in sealed.items() if j != i} for i in sealed}
        self.framed = {i: frames.pack(REQUESTS, UPLOAD, self.head, theirs) for i, theirs in shares.items()}
        uploads = self._ask(UPLOAD, self.framed, self._upload)
        self.members, self.survivors = tuple(sealed), dict.fromkeys(sorted(uploads), b"")
        try:
            self._finish(uploads)
        except (WireError, Diverged) as error:
            raise VersionSpent(str(error)) from error

    # -- what answers must be --------------------------------------------------------------------------------------

    def _shares_for_all(self, client: int, sealed: dict[int, bytes]) -> dict[int, bytes]:
        if sealed.keys() != self.adverts.keys() - {client}:
            raise WireError("it sealed shares for other clients than those with keys")
        return sealed

    def _upload(self, client: int, response: Response) -> tuple[bytes, Any] | Request:
        """An upload, and its masked words as uint32; a client that lost its state is sent the whole one."""
        contract, plan = self.contract, self.round.plan
        if wire.unpack(response.data, contract.schema.sent_by(client), contract.longest_up).kind == wire.LOST:
            whole = self.framed[client] + self.round.downloads.full_state(response.data, client)
            return self.downloads[client]._replace(data=whole)
        upload = decode_upload(contract, plan, self.version, client, response.data)
        expected = hidden_size(values_of(contract, plan)) + 4 * WORDS
        if len(upload.masked) != expected:
            raise WireError(f"expected {expected} bytes of masked values, got {len(upload.masked)}")
        return response.data, np.frombuffer(upload.masked, "<u4").astype(np.uint32)

    def _one_share_of_each(self, client: int, shares: dict[int, tuple[int, int]]) -> dict[int, int]:
        """Of the seeds of survivors, and of the mask keys of all other members."""
        kinds = {i: frames.SEED if i in self.survivors else frames.MASK_KEY for i in self.members}
        if {i: kind for i, (kind, _) in shares.items()} != kinds:
            raise WireError("it revealed other shares than were requested")
        return {i: share for i, (_, share) in shares.items()}

    # -- the sum ---------------------------------------------------------------------------------------------------

    def _finish(self, uploads: dict[int, tuple[bytes, np.ndarray]]) -> None:
        """Recover what is needed to remove the masks, and fill `got` with uploads whose sum has none."""
        signatures: dict[int, bytes] = {}
        if all(advert.signature for advert in self.adverts.values()):
            signatures = self._ask_all(CONFIRM, self.survivors, self.survivors)
        revealed = self._ask_all(UNMASK, self.survivors, self.survivors, signatures, check=self._one_share_of_each)
        words = {client: masked for client, (_, masked) in uploads.items()}
        first = min(words)
        for client in self.members:
            words[first] = words[first] + self._remaining_mask(client, revealed, len(words[first]))
        total = sum(words.values(), np.zeros_like(words[first]))
        if int(total[-WORDS - 1]) != len(words):  # each client adds 1
            raise WireError("the sum of the uploads is not valid: a client sent another vector than it should have")
        loss, examples = frames.read_totals(total[-WORDS:])
        mean = max(1, examples // len(words))  # those of one client are not known: each counts with the mean
        for client, (data, _) in uploads.items():
            masked, began = words[client][:-WORDS].astype("<u4").tobytes(), (len(self.members), self.least)
            self.got.uploads[client] = Upload({}, 1.0, {}, {}, {}, masked=masked, began=began)
            self.got.replies[client] = Reply(client, self.version, data, loss, mean, ClientState(self.version))
            self.got.refused.pop(client, None)

    def _remaining_mask(self, client: int, revealed: Mapping[int, Mapping[int, int]], count: int) -> np.ndarray:
        """What must be added to the sum of the survivors' uploads so that no mask of a member remains: uint32."""
        advert, context = self.adverts[client], self.contract.schema.digest + self.head.pack(KEYS)
        shares = {who + 1: theirs[client] for who, theirs in revealed.items()}
        if client in self.survivors:
            seed = recover(shares, self.least, lambda secret: commit(secret, context) == advert.commitment)
            return -self_mask(count, seed, self.version)
        key = recover(shares, self.least, lambda secret: session_key(secret) == advert.mask_key)
        secret = mask_secrets(client, key, self.adverts, context)
        return pair_masks(count, client, tuple(self.survivors), self.version, secret)

    # -- messages of one phase -------------------------------------------------------------------------------------

    def _ask_all(
        self, phase: str, clients: Collection[int], *values: Any, check: Callable[..., Any] = lambda _, value: value
    ) -> dict[int, Any]:
        """The answers to one request to all clients; `check` reads the value of an answer."""

        def read(client: int, response: Response) -> Any:
            head, found, _ = frames.read(ANSWERS, phase, response.data, self.clients)
            if head != self.head:
                raise WireError("it answered in another session")
            return check(client, *found)

        request = frames.pack(REQUESTS, phase, self.head, *values)
        return self._ask(phase, dict.fromkeys(clients, request), read)

    def _ask(self, phase: str, framed: Mapping[int, bytes], read: Callable[[int, Response], Any]) -> dict[int, Any]:
        """The answers of a phase; clients that did not answer are asked again while there are too few.

        Args:
            phase: the phase.
            framed: one request for each client; downloads are appended in the phase of uploads.
            read: returns what an answer says, or a request that the client needs before; raises if it is refused.
        """
        collector, answers = self.collector, dict[int, Any]()

        def checked(client: int, response: Response) -> Any:
            collector.asked.pop(client, None)
            if client not in framed or client in answers:
                return None
            if response.error.startswith(AlreadyAnswered.__name__):
                self.answered.add(client)
            check_error(response)
            return read(client, response)

        def refuse(client: int, why: str) -> None:
            collector.refuse(self.got, client, f"{why} (phase {phase or 'upload'!r})")

        for attempt in range(collector.policy.tries):
            if not (missing := framed.keys() - answers.keys() - self.answered):
                break
            here = sorted(collector.wait(missing, self.least - len(answers)))
            downloads = {i: self.downloads[i].data if phase == UPLOAD else b"" for i in here}
            requests = {i: Request(framed[i] + downloads[i], self.downloads[i].accepted, phase) for i in here}
            if not attempt:
                extra = self.round.downloads.split(downloads)[1]
                self.got.count_ordinary(sum(len(one.data) for one in requests.values()) - extra)
            deadline = Deadline(collector.policy.seconds, collector.clock)
            for client, answer in collector.ask(self.got, requests, checked, deadline, refuse=refuse):
                answers[client] = answer
                collector.end_soon(deadline, len(answers), self.least)
            if silent := sorted(requests.keys() - answers.keys() - self.got.refused.keys()):
                collector.say(self.got, f"no answer of {collector.names(silent)} (phase {phase or 'upload'!r})")
                if collector.policy.grace >= 0:  # the next cohort takes others first
                    collector.note(self.got, {i: requests[i] for i in silent})
            if len(answers) >= self.least:
                return dict(sorted(answers.items()))
        why = f"{len(answers)} clients {DONE[phase]}, {self.least} are needed"
        if phase == KEYS and len(answers) + len(self.answered) >= self.least:
            raise VersionAnswered(f"{len(self.answered)} clients have answered version {self.version}")
        # before an upload has left a client, another session can be tried
        is_spent = phase in (CONFIRM, UNMASK) or (phase == UPLOAD and (answers or self.answered))
        raise (VersionSpent if is_spent else _SessionFailed)(why)


def skip_version(contract: Contract, server: ServerState, plan: Plan) -> ServerState:
    """The next version, made with an update of zero, after this one was spent."""
    spec = contract.at(server.public.version).sent(plan).code
    return next_version(contract, server, plan, Aggregate(spec.zeros(), {}, {}, {}), 0.0)


def session_name(run: str, contract: Contract, version: int, attempt: int) -> bytes:
    """The name of a session: the same for the same run, version and attempt, also after the server was restarted."""
    named = ["thinwire secure aggregation: session", run, contract.schema.digest.hex(), version, attempt]
    return hashlib.sha256(json.dumps(named).encode()).digest()[: frames.SESSION_BYTES]
