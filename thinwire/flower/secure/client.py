"""The phases of secure aggregation on a client, and everything that it refuses.

    another list of keys, other members or other survivors in one session      refused
    a second session for a version that it has answered                        refused: `AlreadyAnswered`
    a threshold of two thirds of the clients or less, fewer members than that  refused
    with site keys: a key without a valid signature, survivors that fewer      refused
      than the threshold confirmed
    a share of the mask key and of the seed of one client                      never sent: survivors are fixed

A client thus sends, for each version, one upload under one set of masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from thinwire.core.secret_key import SecretKey
from thinwire.errors import WireError
from thinwire.flower.client_store import ClientStore, Request, Response
from thinwire.flower.secure import frames
from thinwire.flower.secure.frames import Advert, Head, Reader, Shares
from thinwire.flower.secure.keys import agree, seal, unseal
from thinwire.flower.secure.session import SecureStore, Session
from thinwire.flower.secure.shamir import split
from thinwire.flower.secure.site_keys import SiteKeys
from thinwire.flower.secure.totals import pack_totals
from thinwire.protocol.secagg import SecAggCohort
from thinwire.wire import message as wire


class AlreadyAnswered(WireError):
    """This client may have sent an upload for this version in another session, and sends no second one."""


MakeCohort = Callable[[float, int], SecAggCohort]  # loss and number of examples, which are summed, too
Train = Callable[[int, Request, ClientStore, MakeCohort], tuple[Response, ClientStore]]


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

    def respond(self, client: int, request: Request, store: ClientStore, train: Train) -> tuple[Response, ClientStore]:
        """The response in any phase, and what is stored before it leaves.

        Args:
            client: the number of this client.
            request: the request, not trusted.
            store: what it stored.
            train: trains from a download and makes an upload under the masks of a cohort.
        """
        head, reader = frames.read_head(request.data, frames.known(request.phase), self.clients)
        if not store.secure and request.accepted >= 0:  # it took part, and its disk was lost
            kept = SecureStore(answered=head.version)
            why = f"its state was lost, so it may have answered version {head.version}; it takes part from the next on"
            return Response(b"", error=f"{AlreadyAnswered.__name__}: {why}"), store._replace(secure=kept.dump())
        kept = SecureStore.load(store.secure)
        if request.phase == frames.KEYS:
            reader.end()
            answer, kept = self._keys(client, head, kept)
            return Response(head.pack(frames.KEYS) + answer), store._replace(secure=kept.dump())
        if kept.session is None or kept.session.head != head:
            raise WireError("this client has no keys in this session")
        if request.phase == frames.UPLOAD:
            return self._upload(client, request, reader, (store, kept.session), train)
        phases = {frames.SHARES: self._shares, frames.CONFIRM: self._confirm, frames.UNMASK: self._unmask}
        answer, session = phases[request.phase](client, kept.session, reader)
        return Response(head.pack(request.phase) + answer), store._replace(secure=kept._replace(session=session).dump())

    # -- before the upload -----------------------------------------------------------------------------------------

    def _keys(self, client: int, head: Head, kept: SecureStore) -> tuple[bytes, SecureStore]:
        """New keys for a new session; the same for the same."""
        session = kept.session
        if session is None or session.head != head:
            if head.version <= kept.answered:
                raise AlreadyAnswered(f"it answered version {kept.answered}, and answers each version once")
            session = Session.draw(head)
            advert = session.public(client, self._context(head))
            if self.site_keys is not None:
                advert = advert._replace(signature=self.site_keys.sign(advert.statement(head, self.schema.digest)))
            session = session._replace(advert=advert.pack())
        return session.advert, kept._replace(session=session)

    def _shares(self, client: int, session: Session, reader: Reader) -> tuple[bytes, Session]:
        """Shares of both secrets for each other client of the list, sealed."""
        listed = reader.data
        if session.listed:
            if session.listed != listed:
                raise WireError("this session has another list of keys")
            return session.sealed, session
        session = session._replace(listed=listed)
        adverts, threshold = self._listed(client, session)
        points = {other: other + 1 for other in adverts}  # a share at 0 would be the secret
        keys = split(session.mask_key, list(points.values()), threshold)
        seeds = split(session.seed, list(points.values()), threshold)
        sealed = {}
        for other, point in points.items():
            if other != client:
                text = frames.pack_shares(client, other, Shares(keys[point], seeds[point]))
                sealed[other] = seal(*self._box(session, adverts[other], client, other, text))
        own = Shares(keys[points[client]], seeds[points[client]])
        session = session._replace(own=own, sealed=frames.pack_list(sealed))
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
        self, client: int, request: Request, reader: Reader, stored: tuple[ClientStore, Session], train: Train
    ) -> tuple[Response, ClientStore]:
        """Train, and upload under the masks of the members; the same upload again, if it was made."""
        (store, before), kept = stored, SecureStore.load(stored[0].secure)
        start = reader.at
        sealed = frames.read_sealed(reader)
        received, download = reader.data[start : reader.at], reader.rest()
        if not before.listed:
            raise WireError("this client has shared no secrets in this session")
        if before.received and before.received != received:
            raise WireError("this session has other members")
        if before.uploaded and store.response is not None:
            return store.response, store
        if before.head.version <= kept.answered:
            raise AlreadyAnswered(f"it answered version {kept.answered}, and answers each version once")
        if wire.unpack(download, self.schema).version != before.head.version:
            raise WireError("the download is of another version than the session")
        session = before._replace(received=received)
        adverts, threshold = self._listed(client, session)
        members = self._members(client, session, adverts, threshold)
        for sender in sealed:
            self._shares_of(client, session, adverts, sender, sealed[sender])

        def cohort(loss: float, examples: int) -> SecAggCohort:
            secret = self._pair_secret(client, session, adverts)
            extra = pack_totals(loss, examples, len(members))
            return SecAggCohort(members, secret, SecretKey.draw(), session.seed, extra, threshold)

        response, after = train(client, request._replace(data=download), store, cohort)
        if after.response is response:  # an upload, not a request for the whole state
            response = Response(response.data)  # loss, examples and accuracy of one client stay on it
            after = after._replace(response=response)
            kept = kept._replace(answered=session.head.version)
        ended = session._replace(uploaded=after.response is response)
        return response, after._replace(secure=kept._replace(session=ended).dump())

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

    def _pair_secret(self, client: int, session: Session, adverts: dict[int, Advert]) -> Callable[[int, int], bytes]:
        @lru_cache(None)
        def secret(i: int, j: int) -> bytes:
            other = adverts[j if i == client else i]
            return mask_secret(session.mask_key, other.mask_key, self._context(session.head), i, j)

        return secret

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
        shares[client] = session.own
        left = frozenset(session.survivors)
        revealed = {
            other: (frames.SEED, mine.seed) if other in left else (frames.MASK_KEY, mine.mask_key)
            for other, mine in shares.items()
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
        return context_of(self.schema.digest, head)

    def _box(
        self, session: Session, other: Advert, sender: int, receiver: int, content: bytes
    ) -> tuple[bytes, bytes, bytes]:
        """Key, content and context of what one client seals for another: all must have received the same list."""
        pair = self._context(session.head) + frames.number(sender) + frames.number(receiver)
        key = agree(session.seal_key, other.seal_key, b"thinwire secure aggregation: shares", pair)
        return key, content, pair + session.listed_hash


def context_of(schema: bytes, head: Head) -> bytes:
    """What distinguishes one session from all others."""
    return schema + head.pack(frames.KEYS)


def mask_secret(private: bytes, public: bytes, context: bytes, i: int, j: int) -> bytes:
    """The secret of the mask of clients i < j, from the private key of one and the public key of the other."""
    pair = context + frames.number(i) + frames.number(j)
    return agree(private, public, b"thinwire secure aggregation: mask", pair)
