"""The phases of secure aggregation on a client, what it stores between them, and everything that it refuses.

    keys      new secrets for a new session; the same answer for the same session
    shares    the list of keys is fixed
    upload    the members are fixed; the version counts as answered before the upload leaves
    unmask    the survivors are fixed: for each client either one secret or the other, never both

    another list of keys, other members or other survivors in one session      refused
    a second session for a version that it has answered                        refused: `AlreadyAnswered`
    a threshold of two thirds of the clients or less, fewer members than that  refused
    with site keys: a key without a valid signature, survivors that fewer      refused
      than the threshold confirmed

Everything is stored before an answer leaves, so a client that was killed continues with the same values, and sends, for
each version, one upload under one set of masks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from secrets import token_bytes
from typing import Any, NamedTuple

from thinwire.core.key import SecretKey
from thinwire.errors import CheckpointError, WireError
from thinwire.protocol.round import Request, Response
from thinwire.secure import frames
from thinwire.secure.frames import Advert, Head, Reader, Shares
from thinwire.secure.keys import KEY_BYTES, SiteKeys, agree, commit, seal, session_key, split, unseal
from thinwire.secure.masks import SecAggCohort
from thinwire.wire import message as wire


class AlreadyAnswered(WireError):
    """This client may have sent an upload for this version in another session, and sends no second one."""


class Session(NamedTuple):
    """One session of secure aggregation on a client."""

    head: Head
    mask_key: bytes  # private keys
    seal_key: bytes
    seed: bytes  # of its own mask
    advert: bytes = b""  # as it was sent
    listed: bytes = b""  # the request with all adverts
    sealed: bytes = b""  # its answer with the shares for others
    received: bytes = b""  # the sealed shares of others
    own: Shares = Shares(0, 0)  # its shares of its own secrets
    uploaded: bool = False
    survivors: tuple[int, ...] = ()

    @property
    def listed_hash(self) -> bytes:
        """The hash of the list of adverts: all clients must have received the same."""
        return hashlib.sha256(self.listed).digest()


class SecureStore(NamedTuple):
    """What a client stores of secure aggregation between messages."""

    answered: int = -1  # the highest version for which an upload left this client
    session: Session | None = None

    def dump(self) -> bytes:
        """As bytes: JSON, with byte strings in hexadecimal digits."""
        return json.dumps(self, default=bytes.hex).encode()

    @classmethod
    def load(cls, data: bytes) -> SecureStore:
        """From bytes; empty bytes are those of a client that has not taken part."""
        if not data:
            return cls()
        try:
            answered, session = json.loads(data)
            if session is None:
                return cls(int(answered))
            (name, version), *texts, own, uploaded, left = session
            head, shares = Head(bytes.fromhex(name), int(version)), Shares(*map(int, own))
            rest = (*map(bytes.fromhex, texts), shares, bool(uploaded), tuple(map(int, left)))
            return cls(int(answered), Session._make((head, *rest)))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"what this client stored of secure aggregation cannot be read ({error})") from error


Store = Any  # a NamedTuple: `response`, the last upload of a client; `secure`, a `SecureStore` as bytes
MakeCohort = Callable[[float, int], SecAggCohort]  # loss and number of examples, which are summed, too
Train = Callable[[int, Request, Store, MakeCohort], tuple[Response, Store]]


@dataclass(frozen=True)
class SecureClient:
    """The phases on a client.

    Args:
        schema: the hash of method, model and seed.
        clients: number of clients of the task.
        cohort: clients of a round; a sum of two thirds of them or fewer is refused.
        site_keys: the keys of sites; without them, signatures are neither made nor required.
    """

    schema: wire.Schema
    clients: int
    cohort: int
    site_keys: SiteKeys | None = None

    def respond(self, client: int, request: Request, store: Store, train: Train) -> tuple[Response, Store]:
        """The response in any phase, and what is stored before it leaves.

        Args:
            client: the number of this client.
            request: the request, not trusted.
            store: what it stored.
            train: trains from a download and makes an upload under the masks of a cohort.
        """
        head, reader = frames.read_head(request.data, request.phase, self.clients)
        if not store.secure and request.accepted >= 0:  # it took part, and its disk was lost
            kept = SecureStore(answered=head.version)
            why = f"its state was lost, so it may have answered version {head.version}; it takes part from the next on"
            return Response(b"", error=f"{AlreadyAnswered.__name__}: {why}"), store._replace(secure=kept.dump())
        kept = SecureStore.load(store.secure)
        if request.phase == frames.KEYS:
            reader.end()
            session = self._keys(client, head, kept)
            answer = session.advert
        elif kept.session is None or kept.session.head != head:
            raise WireError("this client has no keys in this session")
        elif request.phase == frames.UPLOAD:
            return self._upload(client, request, reader, kept.session, store, train)
        else:
            phases = {frames.SHARES: self._shares, frames.CONFIRM: self._confirm, frames.UNMASK: self._unmask}
            answer, session = phases[request.phase](client, kept.session, reader)
        return Response(head.pack(request.phase) + answer), store._replace(secure=kept._replace(session=session).dump())

    # -- before the upload -----------------------------------------------------------------------------------------

    def _keys(self, client: int, head: Head, kept: SecureStore) -> Session:
        """New keys for a new session; the same for the same."""
        if kept.session is not None and kept.session.head == head:
            return kept.session
        if head.version <= kept.answered:
            raise AlreadyAnswered(f"it answered version {kept.answered}, and answers each version once")
        session = Session(head, token_bytes(KEY_BYTES), token_bytes(KEY_BYTES), token_bytes(KEY_BYTES))
        public = session_key(session.mask_key), session_key(session.seal_key)
        advert = Advert(client, *public, commit(session.seed, self._context(head)))
        if self.site_keys is not None:
            advert = advert._replace(signature=self.site_keys.sign(advert.statement(head, self.schema.digest)))
        return session._replace(advert=advert.pack())

    def _shares(self, client: int, session: Session, reader: Reader) -> tuple[bytes, Session]:
        """Shares of both secrets for each other client of the list, sealed."""
        if session.listed:
            if session.listed != reader.data:
                raise WireError("this session has another list of keys")
            return session.sealed, session
        session = session._replace(listed=reader.data)
        adverts, threshold = self._listed(client, session)
        points = [other + 1 for other in adverts]  # a share at 0 would be the secret
        keys, seeds = (split(secret, points, threshold) for secret in (session.mask_key, session.seed))
        shares = {other: Shares(keys[other + 1], seeds[other + 1]) for other in adverts}
        sealed = {}
        for other in adverts.keys() - {client}:
            text = frames.pack_shares(client, other, shares[other])
            sealed[other] = seal(*self._box(session, adverts[other], client, other, text))
        session = session._replace(own=shares[client], sealed=frames.pack_list(sealed))
        return session.sealed, session

    def _listed(self, client: int, session: Session) -> tuple[dict[int, Advert], int]:
        """The adverts of the list, and the threshold, both checked."""
        head, reader = frames.read_head(session.listed, frames.SHARES, self.clients)
        threshold, adverts = reader.number(), frames.read_adverts(reader)
        reader.end()
        least = frames.threshold(max(len(adverts), self.cohort))
        if not least <= threshold <= len(adverts):
            raise WireError(
                f"a threshold of {threshold} for {len(adverts)} clients; with a cohort of {self.cohort} it must be "
                f"{least} or more, and at most the number of clients"
            )
        if client not in adverts or adverts[client].pack() != session.advert:
            raise WireError("the list of keys does not have the key of this client")
        if self.site_keys is not None:
            for other in adverts.values():
                self.site_keys.check(other.client, other.statement(head, self.schema.digest), other.signature)
        return adverts, threshold

    # -- the upload ------------------------------------------------------------------------------------------------

    def _upload(
        self, client: int, request: Request, reader: Reader, session: Session, store: Store, train: Train
    ) -> tuple[Response, Store]:
        """Train, and upload under the masks of the members; the same upload again, if it was made."""
        kept, start = SecureStore.load(store.secure), reader.at
        sealed = frames.read_sealed(reader)
        received, download = reader.data[start : reader.at], reader.rest()
        if not session.listed:
            raise WireError("this client has shared no secrets in this session")
        if session.received and session.received != received:
            raise WireError("this session has other members")
        if session.uploaded and store.response is not None:
            return store.response, store
        if session.head.version <= kept.answered:
            raise AlreadyAnswered(f"it answered version {kept.answered}, and answers each version once")
        if wire.unpack(download, self.schema).version != session.head.version:
            raise WireError("the download is of another version than the session")
        session = session._replace(received=received)
        adverts, threshold = self._listed(client, session)
        members = self._members(client, session, adverts, threshold)
        for sender in sealed:
            self._shares_of(client, session, adverts, sender, sealed[sender])

        @lru_cache(None)
        def secret(i: int, j: int) -> bytes:
            other = adverts[j if i == client else i]
            return mask_secret(session.mask_key, other.mask_key, self._context(session.head), i, j)

        def cohort(loss: float, examples: int) -> SecAggCohort:
            extra = frames.pack_totals(loss, examples, len(members))
            return SecAggCohort(members, secret, SecretKey.draw(), session.seed, extra, threshold)

        response, after = train(client, request._replace(data=download), store, cohort)
        uploaded = after.response is response  # else it is a request for the whole state
        if uploaded:
            response = Response(response.data)  # loss, examples and accuracy of one client stay on it
            after, kept = after._replace(response=response), kept._replace(answered=session.head.version)
        return response, after._replace(secure=kept._replace(session=session._replace(uploaded=uploaded)).dump())

    def _members(self, client: int, session: Session, adverts: dict[int, Advert], threshold: int) -> tuple[int, ...]:
        """The clients whose masks are in the sum: those that shared their secrets with this one, and itself."""
        senders = frames.read_sealed(Reader(session.received, self.clients))
        members = tuple(sorted({*senders, client}))
        if client in senders or not adverts.keys() >= senders.keys():
            raise WireError("sealed shares of a client that is not on the list of keys")
        if len(members) < threshold:
            raise WireError(f"{len(members)} clients shared their secrets, {threshold} are needed")
        return members

    def _shares_of(
        self, client: int, session: Session, adverts: dict[int, Advert], sender: int, sealed: bytes
    ) -> Shares:
        """The shares that another client sealed for this one."""
        try:
            text = unseal(*self._box(session, adverts[sender], sender, client, sealed))
            return frames.read_shares(text, sender, client)
        except WireError as error:
            raise WireError(f"the shares of client {sender} cannot be read: {error}") from error

    # -- after the upload ------------------------------------------------------------------------------------------

    def _confirm(self, client: int, session: Session, reader: Reader) -> tuple[bytes, Session]:
        """The signature of the survivors, which are fixed by it."""
        if self.site_keys is None:
            raise WireError("this client has no site key to confirm survivors with")
        session, statement = self._survivors(client, session, frames.read_clients(reader))
        reader.end()
        return frames.short(self.site_keys.sign(statement)), session

    def _unmask(self, client: int, session: Session, reader: Reader) -> tuple[bytes, Session]:
        """For each member one share: of the seed, if it is a survivor, else of the mask key."""
        session, statement = self._survivors(client, session, frames.read_clients(reader))
        signatures = frames.read_signatures(reader)
        reader.end()
        adverts, threshold = self._listed(client, session)
        if self.site_keys is not None:
            confirmed = [other for other in signatures if other in session.survivors]
            for other in confirmed:
                self.site_keys.check(other, statement, signatures[other])
            if len(confirmed) < threshold:
                raise WireError(f"{len(confirmed)} clients confirmed the survivors, {threshold} are needed")
        sealed = frames.read_sealed(Reader(session.received, self.clients))
        shares = {other: self._shares_of(client, session, adverts, other, sealed[other]) for other in sealed}
        revealed = {
            other: (frames.SEED, mine.seed) if other in session.survivors else (frames.MASK_KEY, mine.mask_key)
            for other, mine in {**shares, client: session.own}.items()
        }
        return frames.pack_revealed(revealed), session

    def _survivors(self, client: int, session: Session, left: tuple[int, ...]) -> tuple[Session, bytes]:
        """The session with these survivors, and the statement about them; refused if it has others."""
        if not session.uploaded:
            raise WireError("this client has sent no upload in this session")
        adverts, threshold = self._listed(client, session)
        members = self._members(client, session, adverts, threshold)
        if session.survivors and session.survivors != left:
            raise WireError("this session has other survivors")
        if client not in left or not frozenset(members) >= frozenset(left) or len(left) < threshold:
            raise WireError(
                f"{len(left)} survivors of {len(members)} clients; this client and {threshold} or more must be in it"
            )
        statement = frames.survivors_statement(session.head, self.schema.digest, session.listed_hash, members, left)
        return session._replace(survivors=left), statement

    # -- keys of two clients ---------------------------------------------------------------------------------------

    def _context(self, head: Head) -> bytes:
        """What distinguishes one session from all others."""
        return self.schema.digest + head.pack(frames.KEYS)

    def _box(
        self, session: Session, other: Advert, sender: int, receiver: int, content: bytes
    ) -> tuple[bytes, bytes, bytes]:
        """Key, content and context of what one client seals for another: all must have received the same list."""
        pair = self._context(session.head) + frames.number(sender) + frames.number(receiver)
        key = agree(session.seal_key, other.seal_key, b"thinwire secure aggregation: shares", pair)
        return key, content, pair + session.listed_hash


def mask_secret(private: bytes, public: bytes, context: bytes, i: int, j: int) -> bytes:
    """The secret of the mask of clients i < j, from the private key of one and the public key of the other."""
    pair = context + frames.number(i) + frames.number(j)
    return agree(private, public, b"thinwire secure aggregation: mask", pair)
