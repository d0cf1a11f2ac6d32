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
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from thinwire.core.text import visible
from thinwire.errors import Diverged, ThinwireError, WireError
from thinwire.protocol.aggregate import Aggregate
from thinwire.protocol.contract import Contract
from thinwire.protocol.next_version import next_version
from thinwire.protocol.round import Request, Response
from thinwire.protocol.state import ServerState
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


class Collected(Protocol):
    """What a round has received so far; the server has it."""

    responses: dict[int, Response]
    uploads: dict[int, Upload]
    refused: dict[int, str]
    logged: set[int]  # refused clients that the log has named
    bytes_up: int
    bytes_down: int
    bytes_catchup: int
    drifted: int


class Opened(NamedTuple):
    """A round that is open, and what exchanges its messages.

    Args:
        number: of the round.
        version: that clients train from.
        contract: the contract at this version.
        plan: the plan of the round.
        clients: number of clients of the job.
        cohort: number of them in a round.
        run: the name of the run.
        tries: how often clients are asked, and sessions are begun.
        needed: the smallest number of uploads.
        exchange: sends requests, and yields clients and their responses as they arrive.
        name: what logs call a client.
        log: receives a line for everything that was refused.
        full_state: the whole state, for a client that requested it.
        available: waits for so many of these clients.
        split: bytes of downloads: ordinary, and catching up.
    """

    number: int
    version: int
    contract: Contract
    plan: Plan
    clients: int
    cohort: int
    run: str
    tries: int
    needed: int
    exchange: Callable[[Mapping[int, Request]], Iterable[tuple[int, Response]]]
    name: Callable[[int], str]
    log: Callable[[str], None]
    full_state: Callable[[bytes, int], bytes]
    available: Callable[[Set[int], int], Set[int]]
    split: Callable[[Mapping[int, bytes]], tuple[int, int]]


class Closing(NamedTuple):
    """A session after its uploads: who is in the sum, and who dropped out."""

    head: Head
    schema: bytes
    adverts: Mapping[int, Advert]
    threshold: int
    members: tuple[int, ...]
    survivors: tuple[int, ...]


@dataclass
class SecureRound:
    """A round of secure aggregation.

    Args:
        opened: the round.
        got: receives uploads whose masks cancel in their sum, counts of bytes, and who was refused.
    """

    opened: Opened
    got: Collected
    answered: set[int] = field(default_factory=set)  # clients that have answered this version in another session
    _accepted: Mapping[int, int] = field(default_factory=dict)  # the version of each client's last accepted upload
    _logged: set[tuple[int, str]] = field(default_factory=set)

    def collect(self, requests: Mapping[int, Request]) -> None:
        """Exchange all phases with the clients of these requests, and fill `got`."""
        self._accepted = {client: request.accepted for client, request in requests.items()}
        for attempt in range(self.opened.tries):
            try:
                return self._session(requests, attempt)
            except _SessionFailed as failed:
                self.opened.log(f"round {self.opened.number}: {failed}")
        raise WireError(
            f"round {self.opened.number}: too few clients took part in secure aggregation; `thinwire resume` "
            "continues when they are back"
        )

    def _session(self, requests: Mapping[int, Request], attempt: int) -> None:
        opened = self.opened
        head = Head(session_name(opened, attempt), opened.version)
        least = max(frames.threshold(opened.cohort), opened.needed)
        adverts = self._keys(head, requests.keys(), least)
        threshold = max(least, frames.threshold(len(adverts)))
        sealed = self._shares(head, adverts, threshold)
        uploads = self._uploads(head, requests, sealed, threshold)
        members = tuple(sorted(sealed)), tuple(sorted(uploads))
        try:
            self._finish(Closing(head, opened.contract.schema.digest, adverts, threshold, *members), uploads)
        except (WireError, Diverged) as error:
            raise VersionSpent(str(error)) from error

    # -- the phases ------------------------------------------------------------------------------------------------

    def _keys(self, head: Head, cohort: Set[int], least: int) -> dict[int, Advert]:
        """The adverts of the clients that are there."""

        def read(client: int, reader: Reader) -> Advert:
            advert = frames.read_advert(reader)
            if advert.client != client:
                raise WireError(f"it sent the keys of client {advert.client}")
            return advert

        adverts = self._ask_all(head, frames.KEYS, b"", cohort, read, least)
        if len(adverts) < least <= len(adverts) + len(self.answered):
            raise VersionSpent(f"{len(self.answered)} clients have answered version {head.version}", False)
        if len(adverts) < least:
            raise _SessionFailed(f"{len(adverts)} clients sent keys, {least} are needed")
        return {client: adverts[client] for client in sorted(adverts)}

    def _shares(self, head: Head, adverts: Mapping[int, Advert], threshold: int) -> dict[int, dict[int, bytes]]:
        """What each client sealed for each other."""

        def read(client: int, reader: Reader) -> dict[int, bytes]:
            sealed = frames.read_sealed(reader)
            if sealed.keys() != adverts.keys() - {client}:
                raise WireError("it sealed shares for other clients than those with keys")
            return sealed

        entries = {client: advert.pack()[4:] for client, advert in adverts.items()}
        listed = frames.number(threshold) + frames.pack_list(entries)
        sealed = self._ask_all(head, frames.SHARES, listed, adverts.keys(), read, threshold)
        if len(sealed) < threshold:
            raise _SessionFailed(f"{len(sealed)} clients shared their secrets, {threshold} are needed")
        return sealed

    def _uploads(
        self,
        head: Head,
        requests: Mapping[int, Request],
        sealed: Mapping[int, Mapping[int, bytes]],
        threshold: int,
    ) -> dict[int, Response]:
        """The masked uploads; a client that lost its state is sent the whole one."""
        contract = self.opened.contract
        shares = {
            client: head.pack(frames.UPLOAD)
            + frames.pack_list({sender: theirs[client] for sender, theirs in sealed.items() if sender != client})
            for client in sealed
        }

        def read(client: int, response: Response) -> Response:
            if wire.unpack(response.data, contract.schema.sent_by(client), contract.longest_up).kind == wire.LOST:
                self.got.drifted += 1
                raise _NeedsState(shares[client] + self.opened.full_state(response.data, client))
            self._words(client, response)
            return response

        downloads = {client: requests[client].data for client in sealed}
        frame = {client: shares[client] + downloads[client] for client in sealed}
        uploads = self._ask(frames.UPLOAD, frame, read, threshold, downloads)
        if len(uploads) < threshold:
            why = f"{len(uploads)} clients sent a masked upload, {threshold} are needed"
            raise VersionSpent(why) if uploads or self.answered else _SessionFailed(why)
        return uploads

    def _finish(self, closing: Closing, uploads: Mapping[int, Response]) -> None:
        """Recover what is needed to remove the masks, and fill `got` with uploads whose sum has none."""
        revealed = self._unmask(closing, self._confirm(closing))
        words = {client: self._words(client, response) for client, response in uploads.items()}
        first = min(words)
        words[first] = words[first] + remaining_masks(closing, revealed, len(words[first]))
        total = sum(words.values(), np.zeros_like(words[first]))
        if int(total[-WORDS - 1]) != len(words):  # each client adds 1
            raise WireError("the sum of the uploads is not valid: a client sent another vector than it should have")
        loss, examples = frames.read_totals(total[-WORDS:])
        began = len(closing.members), closing.threshold
        for client, response in sorted(uploads.items()):
            masked = words[client][:-WORDS].astype("<u4").tobytes()
            self.got.uploads[client] = Upload({}, 1.0, {}, {}, {}, masked=masked, began=began)
            # loss and examples of one client are not known: each counts with the mean
            self.got.responses[client] = response._replace(loss=loss, examples=max(1, examples // len(words)))
            self.got.refused.pop(client, None)

    def _confirm(self, closing: Closing) -> dict[int, bytes]:
        """The signatures of the survivors; none, if keys were not signed."""
        if not all(advert.signature for advert in closing.adverts.values()):
            return {}
        left, least = closing.survivors, closing.threshold
        listed = frames.pack_clients(left)
        found = self._ask_all(closing.head, frames.CONFIRM, listed, left, lambda _, reader: reader.short(), least)
        if len(found) < least:
            raise WireError(f"{len(found)} clients confirmed the survivors, {least} are needed")
        return found

    def _unmask(self, closing: Closing, signatures: Mapping[int, bytes]) -> Revealed:
        """The shares that survivors reveal: of the seeds of survivors, and of the mask keys of all other members."""
        left, least = closing.survivors, closing.threshold
        kinds = {client: frames.SEED if client in left else frames.MASK_KEY for client in closing.members}

        def read(client: int, reader: Reader) -> Mapping[int, tuple[int, int]]:
            shares = frames.read_revealed(reader)
            if {client: kind for client, (kind, _) in shares.items()} != kinds:
                raise WireError("it revealed other shares than were requested")
            return shares

        signed = {client: frames.short(signature) for client, signature in signatures.items()}
        listed = frames.pack_clients(left) + frames.pack_list(signed)
        revealed = self._ask_all(closing.head, frames.UNMASK, listed, left, read, least)
        if len(revealed) < least:
            raise WireError(f"{len(revealed)} clients helped to remove masks, {least} are needed")
        return revealed

    def _words(self, client: int, response: Response) -> np.ndarray:
        """The masked words of an upload, as uint32."""
        opened, contract = self.opened, self.opened.contract
        upload = decode_upload(contract, opened.plan, opened.version, client, response.data)
        size = contract.method.ups[0].size(contract.upload_fields(opened.plan)[1])
        assert size is not None, "a summable codec has a constant size"
        expected = hidden_size(size // 4) + 4 * WORDS
        if len(upload.masked) != expected:
            raise WireError(f"expected {expected} bytes of masked values, got {len(upload.masked)}")
        return np.frombuffer(upload.masked, "<u4").astype(np.uint32)

    # -- messages of one phase -------------------------------------------------------------------------------------

    def _ask_all(
        self,
        head: Head,
        phase: str,
        content: bytes,
        clients: Iterable[int],
        read: Callable[[int, Reader], _Answer],
        least: int,
    ) -> dict[int, _Answer]:
        """The answers to one request to all clients; `read` reads what follows the head of an answer."""

        def answer(client: int, response: Response) -> _Answer:
            found, reader = frames.read_head(response.data, phase, self.opened.clients)
            if found != head:
                raise WireError("it answered in another session")
            content = read(client, reader)
            reader.end()
            return content

        return self._ask(phase, dict.fromkeys(clients, head.pack(phase) + content), answer, least)

    def _ask(
        self,
        phase: str,
        requests: dict[int, bytes],
        read: Callable[[int, Response], _Answer],
        least: int,
        downloads: Mapping[int, bytes] | None = None,
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
        for attempt in range(self.opened.tries):
            missing = requests.keys() - answers.keys() - self.answered
            asked = sorted(self.opened.available(missing, least - len(answers))) if missing else []
            sent = sum(len(requests[client]) for client in asked)
            more = self.opened.split({client: downloads[client] for client in asked})[1] if downloads else 0
            more = sent if attempt else more  # a repeated message counts as catching up
            self.got.bytes_down += sent - more
            self.got.bytes_catchup += more
            again = self._exchange(phase, {client: requests[client] for client in asked}, read, answers)
            self.got.bytes_catchup += sum(len(data) for data in again.values())
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
        sent = {client: Request(data, self._accepted[client], phase) for client, data in requests.items()}
        for client, response in self.opened.exchange(sent) if sent else ():
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
            name = self.opened.name(client)
            self.opened.log(f"round {self.opened.number}: refused {name} in phase {phase or 'upload'!r}: {why}")


def remaining_masks(closing: Closing, revealed: Revealed, count: int) -> np.ndarray:
    """What must be added to the sum of the survivors' uploads so that no mask remains: (count,) uint32."""
    head, left = closing.head, frozenset(closing.survivors)
    context = closing.schema + head.pack(frames.KEYS)
    total = np.zeros(count, np.uint32)
    for client in closing.members:
        advert = closing.adverts[client]
        shares = {who + 1: theirs[client][1] for who, theirs in revealed.items()}
        if client in left:
            is_seed = partial(is_committed, context=context, commitment=advert.commitment)
            total -= self_mask(count, recover(shares, closing.threshold, is_seed), head.version)
        else:
            key = recover(shares, closing.threshold, partial(is_private_key, public=advert.mask_key))

            def secret(i: int, j: int, own: bytes = key, me: int = client) -> bytes:
                other = closing.adverts[j if i == me else i]
                return mask_secret(own, other.mask_key, context, i, j)

            total += pair_masks(count, client, closing.survivors, head.version, secret)
    return total


def skip_version(contract: Contract, server: ServerState, plan: Plan) -> ServerState:
    """The next version, made with an update of zero, after this one was spent."""
    spec = contract.at(server.public.version).upload_fields(plan)[1]
    return next_version(contract, server, plan, Aggregate(spec.zeros(), {}, {}, {}), 0.0)


def session_name(opened: Opened, attempt: int) -> bytes:
    """The name of a session: the same for the same run, version and attempt, also after the server was restarted."""
    parts = (opened.run.encode(), opened.contract.schema.digest, frames.number(opened.version), frames.number(attempt))
    digest = hashlib.sha256(b"thinwire secure aggregation: session")
    for part in parts:
        digest.update(frames.number(len(part)) + part)
    return digest.digest()[: frames.SESSION_BYTES]
