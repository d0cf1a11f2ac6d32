"""Conversations as rows of tokens, with the questions of a test set.

    chat       the chat template of the tokenizer
    plain      prompt and answer on a line each, the end-of-text token behind the answer
    auto       chat if the tokenizer has a template, else plain

Plain text is cut into rows of `length` tokens. A conversation that is longer is an error, or is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from thinwire.data.cache import cached
from thinwire.data.conversations import (
    Conversation,
    Piece,
    RecordForm,
    Template,
    chat,
    conversation,
    plain,
    with_answer,
)
from thinwire.data.questions import Questions
from thinwire.data.reading import one_line
from thinwire.data.records import Record
from thinwire.data.token_rows import TokenRows
from thinwire.errors import ConfigError, DataError

TemplateName = Literal["auto", "chat", "plain"]
TooLong = Literal["error", "drop"]
Learned = Literal["answers", "all"]

_AT_ONCE = 4096  # texts that are tokenized in one call

Tokens = tuple[np.ndarray, np.ndarray]  # ids, and whether each is learned


class Encoded(NamedTuple):
    """Rows of tokens, and which record each is of."""

    rows: TokenRows
    records: np.ndarray
    dropped: int = 0


@dataclass(frozen=True, eq=False)
class Encoder:
    """How records become rows of tokens.

    Args:
        tokenizer: a tokenizer of transformers.
        length: the most tokens of a row.
        template: chat, plain or auto.
        learned: `answers` (tokens of answers only) or `all` tokens.
        too_long: what a conversation of more tokens is: an `error`, or to `drop`.
        files: of the tokenizer, by which its tokens are cached; empty for no cache.
    """

    tokenizer: Any
    length: int = 512
    template: TemplateName = "auto"
    learned: Learned = "answers"
    too_long: TooLong = "error"
    files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        kinds = {"template": TemplateName, "learned": Learned, "too_long": TooLong}
        for name, known in kinds.items():
            if (given := getattr(self, name)) not in get_args(known):
                raise ConfigError(f"task.{name} must be one of {', '.join(get_args(known))}, not {given!r}")
        if not 8 <= self.length <= 1 << 20:
            raise ConfigError(f"task.length must be from 8 to {1 << 20} tokens, not {self.length}")
        if self.template == "chat" and not self._has_template:
            raise ConfigError("task.template = 'chat', but the checkpoint has no chat template; write 'plain'")

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def is_chat(self) -> bool:
        """Whether conversations are written by the chat template."""
        return self.template == "chat" or (self.template == "auto" and self._has_template)

    @property
    def end(self) -> str:
        """The token that ends an answer, as text."""
        return self.tokenizer.eos_token or ""

    @property
    def pad(self) -> int:
        """The token of padding."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((one for one in known if isinstance(one, int)), 0)

    def conversations(self, records: Sequence[Record], form: RecordForm) -> list[Conversation]:
        """The conversation of each record."""
        template: Template = chat(self.tokenizer) if self.is_chat else plain(self.end)
        return [conversation(record, form, template) for record in records]

    def encode(self, records: Sequence[Record], form: RecordForm, window: int = 1) -> Encoded:
        """The rows of records, without questions."""
        return self.rows(records, self.conversations(records, form), form, window)

    def rows(
        self, records: Sequence[Record], found: Sequence[Conversation], form: RecordForm, window: int = 1
    ) -> Encoded:
        """The rows of conversations: of plain texts as many as they need, of others one."""
        rows, owners, dropped = list[Tokens](), list[int](), 0
        for i, (ids, learned) in enumerate(self.tokens([one.pieces for one in found])):
            if form.kind == "text":
                ids, learned = (np.append(ids, self._end_id), np.append(learned, True)) if self.end else (ids, learned)
                for first in range(0, max(1, len(ids) - 1), self.length):  # a row of one token has no label
                    rows.append((ids[first : first + self.length], learned[first : first + self.length]))
                    owners.append(i)
            elif len(ids) <= self.length:
                rows.append((ids, learned | (self.learned == "all")))
                owners.append(i)
            elif self.too_long == "drop":
                dropped += 1
            else:
                raise DataError(
                    f"{records[i].where}: it has {len(ids):,} tokens, more than task.length = {self.length}; shorten "
                    "it, or write task.too_long = 'drop' to leave such records out"
                )
        if not rows:
            raise DataError(f"all {len(records):,} records have more than task.length = {self.length} tokens")
        return Encoded(TokenRows.of(rows, pad=self.pad, window=window), np.array(owners), dropped)

    def questions(
        self, found: Sequence[Conversation], groups: np.ndarray | None, names: Sequence[str], **settings: Any
    ) -> Questions:
        """The questions of conversations: their prompts, and rows of all options.

        Args:
            found: the conversations, one for each row.
            groups: the group of each, or None.
            names: names of the groups.
            **settings: `new_tokens` and `answer_after` of `Questions`.
        """
        prompts = [ids for ids, _ in self.tokens([one.pieces[:-1] for one in found])]
        owners = [i for i, one in enumerate(found) for _ in one.options]
        options = None
        if owners:
            pieces = [with_answer(one, option) for one in found for option in one.options]
            options = TokenRows.of(self.tokens(pieces, last_only=True), pad=self.pad)
        return Questions(
            tuple(prompts),
            tuple(one.answer for one in found),
            tuple(names),
            None if groups is None else torch.from_numpy(groups),
            options,
            torch.tensor(owners, dtype=torch.int64) if owners else None,
            torch.tensor([one.options.index(one.answer) if one.options else -1 for one in found]),
            tokenizer=self.tokenizer,
            **settings,
        )

    def tokens(self, conversations: Iterable[tuple[Piece, ...]], *, last_only: bool = False) -> list[Tokens]:
        """The tokens of each sequence of pieces, and whether each is learned.

        Args:
            conversations: the pieces.
            last_only: whether only the last piece is learned.
        """
        listed = list(conversations)
        texts = list(dict.fromkeys(piece.text for pieces in listed for piece in pieces))
        known = dict(zip(texts, self._ids(texts), strict=True))
        first = [] if self.is_chat else self._first_ids  # a chat template writes it itself
        out = []
        for pieces in listed:
            parts = [np.array(first, np.int32), *(known[piece.text] for piece in pieces)]
            flags = [np.zeros(len(first), bool)]
            flags += [
                np.full(len(part), piece.learned and (not last_only or i == len(pieces) - 1))
                for i, (piece, part) in enumerate(zip(pieces, parts[1:], strict=True))
            ]
            out.append((np.concatenate(parts), np.concatenate(flags)))
        return out

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of texts, each without special tokens; from the cache if there is one."""
        if not texts:
            return []

        def make() -> dict[str, np.ndarray]:
            found: list[np.ndarray] = []
            for first in range(0, len(texts), _AT_ONCE):
                try:
                    made = self.tokenizer(texts[first : first + _AT_ONCE], add_special_tokens=False)["input_ids"]
                except Exception as fault:  # of a tokenizer of another library
                    raise DataError(f"the tokenizer of the checkpoint failed ({one_line(fault)})") from None
                found += [np.asarray(ids, np.int32) for ids in made]
            return {"ids": np.concatenate(found), "lengths": np.array([len(ids) for ids in found], np.int64)}

        def fits(arrays: dict[str, np.ndarray]) -> bool:
            ids, lengths = arrays.get("ids"), arrays.get("lengths")
            if ids is None or lengths is None or ids.dtype != np.int32 or lengths.dtype != np.int64:
                return False
            return len(lengths) == len(texts) and bool((lengths >= 0).all()) and int(lengths.sum()) == len(ids)

        name = f"pieces-v1-{_digest(texts)}"
        arrays = cached(name, self.files, make, fits) if self.files else make()
        return np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])

    @property
    def _first_ids(self) -> list[int]:
        """The tokens that the tokenizer puts before a text: that of its beginning, or none."""
        begin = self.tokenizer.bos_token_id
        return [begin] if begin is not None and self.tokenizer("a")["input_ids"][:1] == [begin] else []

    @property
    def _end_id(self) -> int:
        return int(self.tokenizer.eos_token_id)


def with_questions(encoded: Encoded, questions: Questions, groups: np.ndarray | None) -> TokenRows:
    """Rows with questions and groups."""
    return replace(encoded.rows, questions=questions, groups=None if groups is None else torch.from_numpy(groups))


def load_tokenizer(folder: Path, more: dict[str, Any], transformers: Any) -> Any:
    """The tokenizer of a checkpoint."""
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **more)
    except Exception as fault:  # the type varies: a missing or damaged file, an unknown model family, a missing package
        raise DataError(f"{folder}: no tokenizer there that transformers can read ({one_line(fault)})") from None
    if not len(found):
        raise DataError(f"{folder}: its tokenizer has no vocabulary; copy tokenizer.json from the checkpoint's source")
    return found


def _digest(texts: list[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]
