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
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import partial
from typing import TypeVar

import numpy as np

from thinwire.core.text import visible
from thinwire.errors import Diverged, ThinwireError, WireError
from thinwire.federation.job import Job
from thinwire.flower.collect import Collector, FlowerCollected
from thinwire.flower.transport import Deadline
from thinwire.protocol.contract import Contract
from thinwire.protocol.round import Reply, Request, Response
from thinwire.protocol.server import Aggregate, next_version
from thinwire.protocol.state import ClientState, ServerState
from thinwire.protocol.upload import Upload, decode_upload
from thinwire.schedules.base import Plan
from thinwire.secure import frames
from thinwire.secure.client import AlreadyAnswered, mask_secret
from thinwire.secure.frames import WORDS, Advert, Head, Reader
from thinwire.secure.keys import is_committed, is_private_key, recover
from thinwire.secure.masks import hidden_size, pair_masks, self_mask
from thinwire.wire import message as wire

_Answer = TypeVar("_Answer")
Revealed = Mapping[int, Mapping[int, tuple[int, int]]]  # by who revealed it: kind and share of each member


class VersionSpent(ThinwireError):
    """Clients answered this version in a session that cannot be finished, and answer no second time.

    Args:
        why: why it cannot be finished.
        trained: whether clients trained in this attempt; else they had answered before.
    """

    def __init__(self, why: str, trained: bool = True) -> None:
        super().__init__(why)
        self.trained = trained


class _SessionFailed(ThinwireError):
    """Too few clients took part, before any of them sent an upload: another session can be tried."""


class _NeedsState(Exception):
    """A client requested the whole state; the request to send it."""


class SecureRound:
    """A round of secure aggregation.

    Args:
        collector: has the contract, the transport, the policy and the log of the server.
        job: what is trained.
        got: has the round and its cohort; receives uploads whose masks cancel in their sum, counts of bytes, and who
            was refused.
    """

    def __init__(self, collector: Collector, job: Job, got: FlowerCollected) -> None:
        self.collector, self.policy, self.got, self.round = collector, collector.policy, got, got.round
        self.clients, self.cohort = len(job.task.clients), job.cohort
        self.contract = collector.contract.at(got.round.version)
        self.answered: set[int] = set()  # clients that have answered this version in another session
        self._logged: set[tuple[int, str]] = set()
        self.requests = collector.requests(got)
        got.bytes_down = got.bytes_catchup = 0  # each phase counts what it sends

    def collect(self) -> None:
        """Exchange all phases with the clients of the cohort, and fill `got`."""
        for attempt in range(self.policy.tries):
            try:
                return self._session(attempt)
            except _SessionFailed as failed:
                self._log(str(failed))
        raise WireError(
            f"round {self.got.number}: too few clients took part in secure aggregation; `thinwire resume` "
            "continues when they are back"
        )

    def _session(self, attempt: int) -> None:
        version = self.round.version
        name = session_name(str(getattr(self.collector.transport, "run", "")), self.contract, version, attempt)
        self.head = Head(name, version)
        least = max(frames.threshold(self.cohort), self.policy.needed(len(self.requests)))
        self.adverts = self._keys(least)
        self.threshold = max(least, frames.threshold(len(self.adverts)))
        sealed = self._shares()
        uploads = self._uploads(sealed)
        self.members, self.survivors = tuple(sorted(sealed)), tuple(sorted(uploads))
        try:
            self._finish(uploads)
        except (WireError, Diverged) as error:
            raise VersionSpent(str(error)) from error

    # -- the phases ------------------------------------------------------------------------------------------------

    def _keys(self, least: int) -> dict[int, Advert]:
        """The adverts of the clients that are there."""

        def read(client: int, reader: Reader) -> Advert:
            advert = frames.read_advert(reader)
            if advert.client != client:
                raise WireError(f"it sent the keys of client {advert.client}")
            return advert

        adverts = self._ask_all(frames.KEYS, b"", self.requests, read, least)
        if len(adverts) < least <= len(adverts) + len(self.answered):
            raise VersionSpent(f"{len(self.answered)} clients have answered version {self.head.version}", False)
        _need(least, adverts, "sent keys", _SessionFailed)
        return dict(sorted(adverts.items()))

    def _shares(self) -> dict[int, dict[int, bytes]]:
        """What each client sealed for each other."""

        def read(client: int, reader: Reader) -> dict[int, bytes]:
            sealed = frames.read_sealed(reader)
            if sealed.keys() != self.adverts.keys() - {client}:
                raise WireError("it sealed shares for other clients than those with keys")
            return sealed

        entries = {client: advert.pack()[4:] for client, advert in self.adverts.items()}
        listed = frames.number(self.threshold) + frames.pack_list(entries)
        sealed = self._ask_all(frames.SHARES, listed, self.adverts, read, self.threshold)
        _need(self.threshold, sealed, "shared their secrets", _SessionFailed)
        return sealed

    def _uploads(self, sealed: Mapping[int, Mapping[int, bytes]]) -> dict[int, Response]:
        """The masked uploads; a client that lost its state is sent the whole one."""
        contract = self.contract
        shares = {
            client: self.head.pack(frames.UPLOAD)
            + frames.pack_list({sender: theirs[client] for sender, theirs in sealed.items() if sender != client})
            for client in sealed
        }

        def read(client: int, response: Response) -> Response:
            if wire.unpack(response.data, contract.schema.sent_by(client), contract.longest_up).kind == wire.LOST:
                self.got.drifted += 1
                whole = self.round.full_state(response.data, client)
                raise _NeedsState(shares[client] + whole)
            self._words(client, response)
            return response

        downloads = {client: self.requests[client].data for client in sealed}
        frame = {client: shares[client] + downloads[client] for client in sealed}
        uploads = self._ask(frames.UPLOAD, frame, read, self.threshold, downloads)
        spent = VersionSpent if uploads or self.answered else _SessionFailed
        _need(self.threshold, uploads, "sent a masked upload", spent)
        return uploads

    def _finish(self, uploads: Mapping[int, Response]) -> None:
        """Recover what is needed to remove the masks, and fill `got` with uploads whose sum has none."""
        revealed = self._unmask(self._confirm())
        words = {client: self._words(client, response) for client, response in uploads.items()}
        first = min(words)
        words[first] = words[first] + self._remaining_masks(revealed, len(words[first]))
        total = sum(words.values(), np.zeros_like(words[first]))
        if int(total[-WORDS - 1]) != len(words):  # each client adds 1
            raise WireError("the sum of the uploads is not valid: a client sent another vector than it should have")
        loss, examples = frames.read_totals(total[-WORDS:])
        began = len(self.members), self.threshold
        for client, response in sorted(uploads.items()):
            masked = words[client][:-WORDS].astype("<u4").tobytes()
            self.got.uploads[client] = Upload({}, 1.0, {}, {}, {}, masked=masked, began=began)
            # loss and examples of one client are not known: each counts with the mean
            version, mean = self.round.version, max(1, examples // len(words))
            self.got.replies[client] = Reply(client, version, response.data, loss, mean, ClientState(version))
            self.got.refused.pop(client, None)

    def _confirm(self) -> dict[int, bytes]:
        """The signatures of the survivors; none, if keys were not signed."""
        if not all(advert.signature for advert in self.adverts.values()):
            return {}
        listed = frames.pack_clients(self.survivors)
        found = self._ask_all(frames.CONFIRM, listed, self.survivors, lambda _, reader: reader.short(), self.threshold)
        _need(self.threshold, found, "confirmed the survivors")
        return found

    def _unmask(self, signatures: Mapping[int, bytes]) -> Revealed:
        """The shares that survivors reveal: of the seeds of survivors, and of the mask keys of all other members."""
        left = self.survivors
        kinds = {client: frames.SEED if client in left else frames.MASK_KEY for client in self.members}

        def read(client: int, reader: Reader) -> Mapping[int, tuple[int, int]]:
            shares = frames.read_revealed(reader)
            if {client: kind for client, (kind, _) in shares.items()} != kinds:
                raise WireError("it revealed other shares than were requested")
            return shares

        signed = {client: frames.short(signature) for client, signature in signatures.items()}
        listed = frames.pack_clients(left) + frames.pack_list(signed)
        revealed = self._ask_all(frames.UNMASK, listed, left, read, self.threshold)
        _need(self.threshold, revealed, "helped to remove masks")
        return revealed

    def _remaining_masks(self, revealed: Revealed, count: int) -> np.ndarray:
        """What must be added to the sum of the survivors' uploads so that no mask remains: (count,) uint32."""
        version, context = self.head.version, self.contract.schema.digest + self.head.pack(frames.KEYS)
        total = np.zeros(count, np.uint32)
        for client in self.members:
            advert = self.adverts[client]
            shares = {who + 1: theirs[client][1] for who, theirs in revealed.items()}
            if client in self.survivors:
                is_seed = partial(is_committed, context=context, commitment=advert.commitment)
                total -= self_mask(count, recover(shares, self.threshold, is_seed), version)
            else:
                key = recover(shares, self.threshold, partial(is_private_key, public=advert.mask_key))

                def secret(i: int, j: int, own: bytes = key, me: int = client) -> bytes:
                    return mask_secret(own, self.adverts[j if i == me else i].mask_key, context, i, j)

                total += pair_masks(count, client, self.survivors, version, secret)
        return total

    def _words(self, client: int, response: Response) -> np.ndarray:
        """The masked words of an upload, as uint32."""
        contract = self.contract
        upload = decode_upload(contract, self.round.plan, self.head.version, client, response.data)
        size = contract.method.ups[0].size(contract.upload_fields(self.round.plan)[1])
        assert size is not None, "a summable codec has a constant size"
        expected = hidden_size(size // 4) + 4 * WORDS
        if len(upload.masked) != expected:
            raise WireError(f"expected {expected} bytes of masked values, got {len(upload.masked)}")
        return np.frombuffer(upload.masked, "<u4").astype(np.uint32)

    # -- messages of one phase -------------------------------------------------------------------------------------

    def _ask_all(
        self, phase: str, content: bytes, clients: Iterable[int], read: Callable[[int, Reader], _Answer], least: int
    ) -> dict[int, _Answer]:
        """The answers to one request to all clients; `read` reads what follows the head of an answer."""

        def answer(client: int, response: Response) -> _Answer:
            found, reader = frames.read_head(response.data, phase, self.clients)
            if found != self.head:
                raise WireError("it answered in another session")
            content = read(client, reader)
            reader.end()
            return content

        return self._ask(phase, dict.fromkeys(clients, self.head.pack(phase) + content), answer, least)

    def _ask(
        self,
        phase: str,
        requests: dict[int, bytes],
        read: Callable[[int, Response], _Answer],
        least: int,
        downloads: Mapping[int, bytes] = {},
    ) -> dict[int, _Answer]:
        """The answers of a phase; clients that did not answer are asked again while there are too few.

        Args:
            phase: the phase.
            requests: one for each client.
            read: returns what an answer says; raises if it is refused.
            least: how many answers are needed.
            downloads: the parts of the requests that are downloads; some of these are catching up.
        """
        answers: dict[int, _Answer] = {}
        for attempt in range(self.policy.tries):
            if not (missing := requests.keys() - answers.keys() - self.answered):
                break
            here = self.collector.available(missing, least - len(answers))
            asked = {client: requests[client] for client in sorted(here)}
            given = {client: data for client, data in downloads.items() if client in here}
            sent = sum(map(len, asked.values()))
            catchup = self.round.split(given)[1]
            more = sent if attempt else catchup  # a repeated message counts as catching up
            self.got.bytes_down += sent - more
            again = self._exchange(phase, asked, read, answers)
            self.got.bytes_catchup += more + sum(map(len, again.values()))
            self._exchange(phase, again, read, answers)
            if len(answers) >= least:
                break
        return answers

    def _exchange(
        self,
        phase: str,
        requests: Mapping[int, bytes],
        read: Callable[[int, Response], _Answer],
        answers: dict[int, _Answer],
    ) -> dict[int, bytes]:
        """Exchange messages once; returns what clients need that requested the whole state."""
        again: dict[int, bytes] = {}
        sent = {client: Request(data, self.requests[client].accepted, phase) for client, data in requests.items()}
        deadline = Deadline(self.policy.seconds)
        for client, response in self.collector.transport.exchange(sent, deadline) if sent else ():
            self.got.bytes_up += len(response.data)
            if client not in sent or client in answers or client in again or frames.is_late(response.data, phase):
                continue
            try:
                if response.error:
                    raise WireError(f"it could not respond: {visible(response.error, 300)}")
                answers[client] = read(client, response)
            except _NeedsState as lost:
                again[client] = lost.args[0]
            except (WireError, Diverged) as error:
                if response.error.startswith(AlreadyAnswered.__name__):
                    self.answered.add(client)
                self._refuse(client, phase, str(error))
        return again

    def _refuse(self, client: int, phase: str, why: str) -> None:
        """Count a client as refused, and log each reason once."""
        self.got.refused[client] = why
        if (client, why) not in self._logged:
            self._logged.add((client, why))
            self.got.logged.add(client)
            name = self.collector.transport.name(client)
            self._log(f"refused {name} in phase {phase or 'upload'!r}: {why}")

    def _log(self, line: str) -> None:
        self.collector.log(f"round {self.got.number}: {line}")


def _need(least: int, found: Sized, what: str, error: type[ThinwireError] = WireError) -> None:
    """Raise if fewer clients did something than are needed."""
    if len(found) < least:
        raise error(f"{len(found)} clients {what}, {least} are needed")


def skip_version(contract: Contract, server: ServerState, plan: Plan) -> ServerState:
    """The next version, made with an update of zero, after this one was spent."""
    spec = contract.at(server.public.version).upload_fields(plan)[1]
    return next_version(contract, server, plan, Aggregate(spec.zeros(), {}, {}, {}), 0.0)


def session_name(run: str, contract: Contract, version: int, attempt: int) -> bytes:
    """The name of a session: the same for the same run, version and attempt, also after the server was restarted."""
    digest = hashlib.sha256(b"thinwire secure aggregation: session")
    for part in (run.encode(), contract.schema.digest, frames.number(version), frames.number(attempt)):
        digest.update(frames.number(len(part)) + part)
    return digest.digest()[: frames.SESSION_BYTES]
