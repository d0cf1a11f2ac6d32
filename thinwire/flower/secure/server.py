"""The phases of secure aggregation on the server: who takes part, whose masks must be removed, and the sum.

    keys       public keys of the cohort                            at least the threshold, else the next attempt
    shares     sealed shares of all, relayed                        the same
    (upload)   masked uploads of those that shared                  fewer: `VersionSpent`
    confirm    signatures of the survivors, if keys were signed     fewer: `VersionSpent`
    unmask     one share of each member from each survivor          fewer: `VersionSpent`

The name of a session follows from run, version and attempt, so a server that was killed repeats its requests and gets
the same answers. Clients answer a version once: if that was in a session that cannot be finished, the version is spent,
and the round is repeated from the next version, which is made with an update of zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np

from thinwire.errors import Diverged, ThinwireError, WireError
from thinwire.flower.client_store import Request, Response
from thinwire.flower.secure import frames
from thinwire.flower.secure.exchange import NeedsState, Opened, PhaseExchange
from thinwire.flower.secure.frames import Advert, Head
from thinwire.flower.secure.totals import WORDS, read_totals
from thinwire.flower.secure.unmask import Closing, check_revealed, remaining_masks
from thinwire.privacy.secagg import hidden_size
from thinwire.protocol.aggregate import Aggregate
from thinwire.protocol.contract import Contract
from thinwire.protocol.next_version import next_version
from thinwire.protocol.state import ServerState
from thinwire.protocol.upload import Upload, decode_upload
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire


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


@dataclass(frozen=True)
class SecureRound:
    """A round of secure aggregation.

    Args:
        link: exchanges messages; it receives uploads whose masks cancel in their sum.
    """

    link: PhaseExchange

    def collect(self, requests: Mapping[int, Request]) -> None:
        """Exchange all phases with the clients of these requests, and fill `got`."""
        for attempt in range(self.link.policy.tries):
            try:
                return self._session(requests, attempt)
            except _SessionFailed as failed:
                self.link.log(f"round {self.link.opened.number}: {failed}")
        raise WireError(
            f"round {self.link.opened.number}: too few clients took part in secure aggregation; `thinwire resume` "
            "continues when they are back"
        )

    def _session(self, requests: Mapping[int, Request], attempt: int) -> None:
        opened = self.link.opened
        head = Head(session_name(opened, attempt), opened.version)
        least = max(frames.threshold(opened.cohort), self.link.policy.needed(len(requests)))
        adverts = self._keys(head, requests.keys(), least)
        threshold = max(least, frames.threshold(len(adverts)))
        sealed = self._shares(head, adverts, threshold)
        uploads = self._uploads(head, requests, sealed, threshold)
        closing = Closing(
            *(head, opened.contract.schema.digest, adverts, threshold),
            *(tuple(sorted(sealed)), tuple(sorted(uploads))),
        )
        try:
            self._finish(closing, uploads)
        except (WireError, Diverged) as error:
            raise VersionSpent(str(error)) from error

    def _keys(self, head: Head, cohort: Set[int], least: int) -> dict[int, Advert]:
        """The adverts of the clients that are there."""

        def read(client: int, response: Response) -> Advert:
            reader = self.link.reader(head, frames.KEYS, response)
            advert = frames.read_advert(reader)
            reader.end()
            if advert.client != client:
                raise WireError(f"it sent the keys of client {advert.client}")
            return advert

        adverts = self.link.ask(frames.KEYS, dict.fromkeys(cohort, head.pack(frames.KEYS)), read, least)
        if len(adverts) < least <= len(adverts) + len(self.link.answered):
            raise VersionSpent(f"{len(self.link.answered)} clients have answered version {head.version}", False)
        self._need(len(adverts), least, "sent keys")
        return {client: adverts[client] for client in sorted(adverts)}

    def _shares(self, head: Head, adverts: Mapping[int, Advert], threshold: int) -> dict[int, dict[int, bytes]]:
        """What each client sealed for each other."""

        def read(client: int, response: Response) -> dict[int, bytes]:
            reader = self.link.reader(head, frames.SHARES, response)
            sealed = frames.read_sealed(reader)
            reader.end()
            if sealed.keys() != adverts.keys() - {client}:
                raise WireError("it sealed shares for other clients than those with keys")
            return sealed

        entries = {client: advert.pack()[4:] for client, advert in adverts.items()}
        frame = head.pack(frames.SHARES) + frames.number(threshold) + frames.pack_list(entries)
        sealed = self.link.ask(frames.SHARES, dict.fromkeys(adverts, frame), read, threshold)
        self._need(len(sealed), threshold, "shared their secrets")
        return sealed

    def _uploads(
        self,
        head: Head,
        requests: Mapping[int, Request],
        sealed: Mapping[int, Mapping[int, bytes]],
        threshold: int,
    ) -> dict[int, Response]:
        """The masked uploads; a client that lost its state is sent the whole one."""
        contract = self.link.opened.contract
        shares = {
            client: head.pack(frames.UPLOAD)
            + frames.pack_list({sender: theirs[client] for sender, theirs in sealed.items() if sender != client})
            for client in sealed
        }

        def read(client: int, response: Response) -> Response:
            if wire.unpack(response.data, contract.schema.sent_by(client), contract.longest_up).kind == wire.LOST:
                self.link.got.drifted += 1
                raise NeedsState(shares[client] + self.link.opened.full_state(response.data, client))
            self._words(client, response)
            return response

        downloads = {client: requests[client].data for client in sealed}
        frame = {client: shares[client] + downloads[client] for client in sealed}
        uploads = self.link.ask(frames.UPLOAD, frame, read, threshold, downloads)
        if len(uploads) < threshold:
            why = f"{len(uploads)} clients sent a masked upload, {threshold} are needed"
            raise VersionSpent(why) if uploads or self.link.answered else _SessionFailed(why)
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
        loss, examples = read_totals(total[-WORDS:])
        began = len(closing.members), closing.threshold
        for client, response in sorted(uploads.items()):
            masked = words[client][:-WORDS].astype("<u4").tobytes()
            self.link.got.uploads[client] = Upload({}, 1.0, {}, {}, {}, masked=masked, began=began)
            # loss and examples of one client are not known: each counts with the mean
            self.link.got.responses[client] = response._replace(loss=loss, examples=max(1, examples // len(words)))
            self.link.got.refused.pop(client, None)

    def _confirm(self, closing: Closing) -> dict[int, bytes]:
        """The signatures of the survivors; none, if keys were not signed."""
        if not all(advert.signature for advert in closing.adverts.values()):
            return {}

        def read(client: int, response: Response) -> bytes:
            reader = self.link.reader(closing.head, frames.CONFIRM, response)
            signature = reader.short()
            reader.end()
            return signature

        frame = closing.head.pack(frames.CONFIRM) + frames.pack_clients(closing.survivors)
        signatures = self.link.ask(frames.CONFIRM, dict.fromkeys(closing.survivors, frame), read, closing.threshold)
        if len(signatures) < closing.threshold:
            raise WireError(f"{len(signatures)} clients confirmed the survivors, {closing.threshold} are needed")
        return signatures

    def _unmask(self, closing: Closing, signatures: Mapping[int, bytes]) -> dict[int, Mapping[int, tuple[int, int]]]:
        """The shares that survivors reveal: of the seeds of survivors, and of the mask keys of all other members."""

        def read(client: int, response: Response) -> Mapping[int, tuple[int, int]]:
            reader = self.link.reader(closing.head, frames.UNMASK, response)
            shares = frames.read_revealed(reader)
            reader.end()
            return check_revealed(closing, shares)

        signed = {client: frames.short(signature) for client, signature in signatures.items()}
        frame = closing.head.pack(frames.UNMASK) + frames.pack_clients(closing.survivors) + frames.pack_list(signed)
        revealed = self.link.ask(frames.UNMASK, dict.fromkeys(closing.survivors, frame), read, closing.threshold)
        if len(revealed) < closing.threshold:
            raise WireError(f"{len(revealed)} clients helped to remove masks, {closing.threshold} are needed")
        return revealed

    def _words(self, client: int, response: Response) -> np.ndarray:
        """The masked words of an upload, as uint32."""
        opened, contract = self.link.opened, self.link.opened.contract
        upload = decode_upload(contract, opened.plan, opened.version, client, response.data)
        size = contract.method.ups[0].size(contract.upload_fields(opened.plan)[1])
        assert size is not None, "a summable codec has a constant size"
        expected = hidden_size(size // 4) + 4 * WORDS
        if len(upload.masked) != expected:
            raise WireError(f"expected {expected} bytes of masked values, got {len(upload.masked)}")
        return np.frombuffer(upload.masked, "<u4").astype(np.uint32)

    def _need(self, found: int, least: int, what: str) -> None:
        if found < least:
            raise _SessionFailed(f"{found} clients {what}, {least} are needed")


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
