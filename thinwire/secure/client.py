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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from secrets import token_bytes
from typing import Any, NamedTuple

from thinwire.core.key import SecretKey
from thinwire.errors import WireError
from thinwire.protocol.round import Request, Response
from thinwire.secure import frames
from thinwire.secure.frames import (
    ANSWERS,
    CONFIRM,
    KEYS,
    MASK_KEY,
    REQUESTS,
    SEED,
    SHARES,
    UNMASK,
    UPLOAD,
    Advert,
    Head,
    Reader,
    Shares,
)
from thinwire.secure.keys import KEY_BYTES, SiteKeys, agree, commit, seal, session_key, split, unseal
from thinwire.secure.masks import SecAggCohort, Secret
from thinwire.wire import message as wire


class AlreadyAnswered(WireError):
    """This client may have sent an upload for this version in another session, and sends no second one."""


class Session(NamedTuple):
    """One session of secure aggregation on a client."""

    head: Head
    mask_key: bytes  # private keys
    seal_key: bytes
    seed: bytes  # of its own mask
    keys: bytes = b""  # its answer with its public keys
    listed: bytes = b""  # the request with those of all clients
    shares: bytes = b""  # its answer with the shares for others
    own: bytes = b""  # its shares of its own secrets
    received: bytes = b""  # the sealed shares of others
    uploaded: bool = False
    survivors: tuple[int, ...] = ()


class SecureStore(NamedTuple):
    """What a client stores of secure aggregation between messages."""

    answered: int = 0  # uploads for lower versions left this client, or may have
    session: Session | None = None


Store = Any  # a NamedTuple: `response`, the last upload of a client; `secure`, a `SecureStore`
MakeCohort = Callable[[float, int], SecAggCohort]  # loss and number of examples, which are summed, too
Train = Callable[[int, Request, Store, MakeCohort], tuple[Response, Store]]


class _Listed(NamedTuple):
    """The clients of a session, as its list of keys names them."""

    threshold: int
    adverts: Mapping[int, Advert]
    digest: bytes  # all clients must have received the same list


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
        phase, kept = request.phase, store.secure
        head, values, download = frames.read(REQUESTS, phase, request.data, self.clients)
        if kept == SecureStore() and request.accepted >= 0:  # it took part, and its disk was lost
            why = f"its state was lost, so it may have answered version {head.version}; it takes part from the next on"
            lost = SecureStore(answered=head.version + 1)
            return Response(b"", error=f"{AlreadyAnswered.__name__}: {why}"), store._replace(secure=lost)
        if phase == KEYS:
            session = self._keys(client, head, kept)
            answer = session.keys
        elif kept.session is None or kept.session.head != head:
            raise WireError("this client has no keys in this session")
        elif phase == UPLOAD:
            return self._upload(client, request._replace(data=download), values[0], store, train)
        else:
            step: Any = {SHARES: self._shares, CONFIRM: self._confirm, UNMASK: self._unmask}[phase]
            answer, session = step(client, kept.session, *values)
        return Response(answer), store._replace(secure=kept._replace(session=session))

    # -- before the upload -----------------------------------------------------------------------------------------

    def _keys(self, client: int, head: Head, kept: SecureStore) -> Session:
        """New keys for a new session; the same for the same."""
        if kept.session is not None and kept.session.head == head:
            return kept.session
        _check_new(head, kept)
        session = Session(head, token_bytes(KEY_BYTES), token_bytes(KEY_BYTES), token_bytes(KEY_BYTES))
        public = session_key(session.mask_key), session_key(session.seal_key)
        advert = Advert(*public, commit(session.seed, self._context(head)))
        if self.site_keys is not None:
            advert = advert._replace(signature=self.site_keys.sign(advert.statement(client, head, self.schema.digest)))
        return session._replace(keys=frames.pack(ANSWERS, KEYS, head, advert))

    def _shares(
        self, client: int, session: Session, threshold: int, adverts: Mapping[int, Advert]
    ) -> tuple[bytes, Session]:
        """Shares of both secrets for each other client of the list, sealed."""
        request = frames.pack(REQUESTS, SHARES, session.head, threshold, adverts)
        if session.listed:
            if session.listed != request:
                raise WireError("this session has another list of keys")
            return session.shares, session
        session = session._replace(listed=request)
        listed = self._listed(client, session)
        points = [other + 1 for other in adverts]  # a share at 0 would be the secret
        keys, seeds = (split(secret, points, threshold) for secret in (session.mask_key, session.seed))
        texts = {i: frames.BOTH_SHARES.write((keys[i + 1], seeds[i + 1])) for i in adverts}
        own = texts.pop(client)
        sealed = {i: seal(*self._box(session, listed, i, client, i, text)) for i, text in texts.items()}
        shares = frames.pack(ANSWERS, SHARES, session.head, sealed)
        return shares, session._replace(own=own, shares=shares)

    def _listed(self, client: int, session: Session) -> _Listed:
        """The list of keys of a session, checked: sites may have been revoked."""
        head, (threshold, adverts), _ = frames.read(REQUESTS, SHARES, session.listed, self.clients)
        least = frames.threshold(max(len(adverts), self.cohort))
        if not least <= threshold <= len(adverts):
            raise WireError(
                f"a threshold of {threshold} for {len(adverts)} clients; with a cohort of {self.cohort} it must be "
                f"{least} or more, and at most the number of clients"
            )
        own = adverts.get(client)
        if own is None or frames.pack(ANSWERS, KEYS, head, own) != session.keys:
            raise WireError("the list of keys does not have the key of this client")
        if self.site_keys is not None:
            for other, advert in adverts.items():
                self.site_keys.check(other, advert.statement(other, head, self.schema.digest), advert.signature)
        return _Listed(threshold, adverts, hashlib.sha256(session.listed).digest())

    # -- the upload ------------------------------------------------------------------------------------------------

    def _upload(
        self, client: int, request: Request, sealed: Mapping[int, bytes], store: Store, train: Train
    ) -> tuple[Response, Store]:
        """Train, and upload under the masks of the members; the same upload again, if it was made."""
        kept, session, received = store.secure, store.secure.session, frames.SEALED.write(sealed)
        if not session.listed:
            raise WireError("this client has shared no secrets in this session")
        if session.received and session.received != received:
            raise WireError("this session has other members")
        if session.uploaded and store.response is not None:
            return store.response, store
        _check_new(session.head, kept)
        if wire.unpack(request.data, self.schema).version != session.head.version:
            raise WireError("the download is of another version than the session")
        session = session._replace(received=received)
        listed = self._listed(client, session)
        members = tuple(sorted(self._members(client, session, listed)))

        secret = mask_secrets(client, session.mask_key, listed.adverts, self._context(session.head))

        def cohort(loss: float, examples: int) -> SecAggCohort:
            extra = frames.pack_totals(loss, examples, len(members))
            return SecAggCohort(members, secret, SecretKey.draw(), session.seed, extra, listed.threshold)

        response, after = train(client, request, store, cohort)
        uploaded = after.response is response  # else it is a request for the whole state
        if uploaded:
            response = Response(response.data)  # loss, examples and accuracy of one client stay on it
            after, kept = after._replace(response=response), kept._replace(answered=session.head.version + 1)
        return response, after._replace(secure=kept._replace(session=session._replace(uploaded=uploaded)))

    def _members(self, client: int, session: Session, listed: _Listed) -> dict[int, Shares]:
        """The shares of the clients whose masks are in the sum: those that shared their secrets, and this one."""
        sealed = frames.SEALED.read(Reader(session.received, self.clients))
        if client in sealed or not listed.adverts.keys() >= sealed.keys():
            raise WireError("sealed shares of a client that is not on the list of keys")
        if len(sealed) + 1 < listed.threshold:
            raise WireError(f"{len(sealed) + 1} clients shared their secrets, {listed.threshold} are needed")
        texts = {client: session.own}
        for sender, data in sealed.items():
            try:
                texts[sender] = unseal(*self._box(session, listed, sender, sender, client, data))
            except WireError as error:
                raise WireError(f"the shares of client {sender} cannot be read: {error}") from error
        return {i: frames.BOTH_SHARES.read(Reader(text, self.clients)) for i, text in texts.items()}

    # -- after the upload ------------------------------------------------------------------------------------------

    def _confirm(self, client: int, session: Session, left: Mapping[int, bytes]) -> tuple[bytes, Session]:
        """The signature of the survivors, which are fixed by it."""
        if self.site_keys is None:
            raise WireError("this client has no site key to confirm survivors with")
        statement, _, _ = self._survivors(client, session, left)
        answer = frames.pack(ANSWERS, CONFIRM, session.head, self.site_keys.sign(statement))
        return answer, session._replace(survivors=tuple(left))

    def _unmask(
        self, client: int, session: Session, left: Mapping[int, bytes], signatures: Mapping[int, bytes]
    ) -> tuple[bytes, Session]:
        """For each member one share: of the seed, if it is a survivor, else of the mask key."""
        statement, listed, shares = self._survivors(client, session, left)
        if self.site_keys is not None:
            confirmed = signatures.keys() & left.keys()
            for other in confirmed:
                self.site_keys.check(other, statement, signatures[other])
            if len(confirmed) < listed.threshold:
                raise WireError(f"{len(confirmed)} clients confirmed the survivors, {listed.threshold} are needed")
        revealed = {
            other: (SEED, one.seed) if other in left else (MASK_KEY, one.mask_key) for other, one in shares.items()
        }
        answer = frames.pack(ANSWERS, UNMASK, session.head, revealed)
        return answer, session._replace(survivors=tuple(left))

    def _survivors(
        self, client: int, session: Session, left: Mapping[int, bytes]
    ) -> tuple[bytes, _Listed, dict[int, Shares]]:
        """What sites sign before masks are recovered: which clients began the sum, and which are in it; the list of
        keys; the members' shares. Refused if the session has other survivors, or too few.
        """
        if not session.uploaded:
            raise WireError("this client has sent no upload in this session")
        listed = self._listed(client, session)
        shares = self._members(client, session, listed)
        if session.survivors and session.survivors != tuple(left):
            raise WireError("this session has other survivors")
        if client not in left or not shares.keys() >= left.keys() or len(left) < listed.threshold:
            raise WireError(
                f"{len(left)} survivors of {len(shares)} clients; this client and {listed.threshold} or more must be "
                "in it"
            )
        lists = (frames.CLIENTS.write(dict.fromkeys(clients, b"")) for clients in (shares, left))
        context = self.schema.digest + session.head.pack(CONFIRM) + listed.digest
        statement = b"thinwire secure aggregation: survivors\n" + context + b"".join(lists)
        return statement, listed, shares

    # -- keys of two clients ---------------------------------------------------------------------------------------

    def _context(self, head: Head) -> bytes:
        """What distinguishes one session from all others."""
        return self.schema.digest + head.pack(KEYS)

    def _box(
        self, session: Session, listed: _Listed, other: int, sender: int, receiver: int, content: bytes
    ) -> tuple[bytes, bytes, bytes]:
        """Key, content and context of what one client seals for another: all must have received the same list."""
        pair = self._context(session.head) + frames.number(sender) + frames.number(receiver)
        key = agree(session.seal_key, listed.adverts[other].seal_key, b"thinwire secure aggregation: shares", pair)
        return key, content, pair + listed.digest


def _check_new(head: Head, kept: SecureStore) -> None:
    if head.version < kept.answered:
        raise AlreadyAnswered(f"it answered version {kept.answered - 1}, and answers each version once")


def mask_secrets(client: int, private: bytes, adverts: Mapping[int, Advert], context: bytes) -> Secret:
    """The secrets of the masks that a client shares with others, from its private key and their public ones."""

    @lru_cache(None)
    def secret(i: int, j: int) -> bytes:
        other = adverts[j if i == client else i]
        pair = context + frames.number(i) + frames.number(j)
        return agree(private, other.mask_key, b"thinwire secure aggregation: mask", pair)

    return secret
