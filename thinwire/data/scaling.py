"""Standardized inputs: per-channel mean 0 and standard deviation 1, by constants or by sums that clients send.

    x  ->  (x - mean_c) / std_c          mean and standard deviation of channel c over all training images

Constants are those of the dataset (`Source.mean`, `Source.std`). Without constants, every client sends the number, the
sum and the sum of squares of the values of each channel of its own training examples, once, before the first round; the
server adds them up and sends mean and standard deviation back. These are messages as in a round, and their bytes are
counted in the first one:

    kind    body, field                    payload, little endian
    up      report                         count, then per channel the sum, then per channel the sum of squares, float64
    steps   values                         per channel the mean, then per channel the standard deviation, float32

Both have a schema of their own (`schema_of`), so that neither can be taken for a message of a round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from thinwire.data.examples import Arrays, Examples, Images
from thinwire.data.partition import Assignment
from thinwire.data.task import Exchange
from thinwire.errors import WireError
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes

MOST_VALUES = 2**48  # of one channel of one client: 10^9 images of 500 x 500
_LEAST_STD = 1e-6  # of a channel that is constant


def image_values(examples: Examples) -> Tensor | None:
    """(n, channels, height, width) the stored values of images, bytes or floats; None for other examples."""
    if isinstance(examples, Images):
        return examples.pixels
    stored = examples.inputs if isinstance(examples, Arrays) else None
    return stored if isinstance(stored, Tensor) and stored.dim() == 4 and stored.is_floating_point() else None


def sums_of(values: Tensor) -> np.ndarray:
    """(1 + 2 channels,) float64: the number of values of a channel, then sums, then sums of squares by channel.

    Args:
        values: (n, channels, height, width) images; bytes count as pixel / 255.

    >>> sums_of(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    array([2., 1., 1.])
    """
    rows = values.transpose(0, 1).flatten(1)
    if values.dtype == torch.uint8:
        # from counts of the 256 values: exact, and without a float copy of all images
        counts = torch.stack([torch.bincount(channel, minlength=256) for channel in rows])
        levels = torch.arange(256)
        total, squares = (counts * levels).sum(1).double() / 255, (counts * levels**2).sum(1).double() / 255**2
    else:
        wide = rows.double()
        total, squares = wide.sum(1), wide.square().sum(1)
    return np.array([rows.shape[1], *total.tolist(), *squares.tolist()])


def mean_and_std(sums: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (of the population) of each channel.

    >>> mean_and_std(np.array([2.0, 1.0, 1.0]))
    ((0.5,), (0.5,))
    """
    mean, squares = np.split(sums[1:] / sums[0], 2)
    std = np.maximum(np.sqrt(np.maximum(squares - mean * mean, 0.0)), _LEAST_STD)
    return tuple(mean.tolist()), tuple(std.tolist())


def standardized(examples: Examples, mean: Sequence[float], std: Sequence[float]) -> Examples:
    """Images with (x - mean) / std per channel; examples that are no images (`image_values`) stay as they are.

    >>> images = Arrays(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), torch.zeros(2))
    >>> standardized(images, (0.5,), (0.5,)).inputs.flatten().tolist()
    [-1.0, 1.0]
    """
    if isinstance(examples, Images):
        return replace(examples, mean=tuple(mean), std=tuple(std))
    if not isinstance(examples, Arrays) or (values := image_values(examples)) is None:
        return examples
    shift, divisor = (torch.tensor(one, dtype=values.dtype).view(-1, 1, 1) for one in (mean, std))
    return replace(examples, inputs=(values - shift) / divisor)


# -- messages ----------------------------------------------------------------------------------------------------------


def schema_of(kind: str, channels: int) -> wire.Schema:
    """The schema of these messages for a dataset."""
    digest = hashlib.blake2b(f"task.scale estimated {kind} {channels}".encode(), digest_size=8).digest()
    return wire.Schema(digest, tuple(f"channel {i}" for i in range(channels)))


def pack_sums(sums: np.ndarray, schema: wire.Schema, client: int) -> bytes:
    """The message of a client. The inverse of `unpack_sums`."""
    body = wire.pack_body(wire.Body(fields={wire.REPORT: sums.astype("<f8").tobytes()}), schema)
    return wire.pack(wire.UP, 0, [body], schema.sent_by(client))


def unpack_sums(data: Bytes, schema: wire.Schema, client: int) -> np.ndarray:
    """The sums in a message of a client, not trusted: refused unless some values could have them."""
    length = 8 * (1 + 2 * len(schema.blocks))
    sums = np.frombuffer(_payload(data, schema.sent_by(client), wire.UP, wire.REPORT, length), "<f8")
    count, (total, squares) = float(sums[0]), np.split(sums[1:], 2)
    if not (1 <= count <= MOST_VALUES and count.is_integer()):
        raise WireError(f"sums over {count} values, expected an integer from 1 to {MOST_VALUES:,}")
    with np.errstate(over="ignore", invalid="ignore"):  # by Cauchy and Schwarz, up to rounding
        fits = np.isfinite(total) & np.isfinite(squares) & (total / count * total <= squares * (1 + 1e-9))
    if not fits.all():
        at = int(fits.argmin())
        raise WireError(f"no {int(count)} values have the sum {total[at]} and the sum of squares {squares[at]}")
    return sums


def pack_scale(mean: Sequence[float], std: Sequence[float], schema: wire.Schema) -> bytes:
    """The message of the server. The inverse of `unpack_scale`."""
    body = wire.pack_body(wire.Body(fields={wire.VALUES: np.array([*mean, *std], "<f4").tobytes()}), schema)
    return wire.pack(wire.STEPS, 0, [body], schema)


def unpack_scale(data: Bytes, schema: wire.Schema) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation in a message of the server, not trusted."""
    channels = len(schema.blocks)
    values = np.frombuffer(_payload(data, schema, wire.STEPS, wire.VALUES, 8 * channels), "<f4")
    mean, std = tuple(values[:channels].tolist()), tuple(values[channels:].tolist())
    if not np.isfinite(values).all() or min(std) <= 0:
        raise WireError(f"a mean of {mean} and a standard deviation of {std}, expected finite values and std above 0")
    return mean, std


def _payload(data: Bytes, schema: wire.Schema, kind: int, field: int, length: int) -> Bytes:
    """The only field of a message with one body, of exactly this length."""
    message = wire.unpack(data, schema, length + 64)
    fields = wire.unpack_body(message.bodies[0], schema).fields if message.bodies else {}
    if (message.kind, message.version, [*fields]) != (kind, 0, [field]) or len(fields[field]) != length:
        raise WireError(f"expected one field {field} of {length} bytes in a message of kind {wire.KINDS[kind]!r}")
    return fields[field]


def estimate(kind: str, values: Tensor, clients: Assignment) -> tuple[bytes, Exchange]:
    """Exchange the messages of all clients; returns the one that the server sends to each, and all of them.

    Args:
        kind: the name of the dataset.
        values: (n, channels, height, width) the images of all clients.
        clients: the training examples of each client.
    """
    schema = schema_of(kind, values.shape[1])
    up = {i: pack_sums(sums_of(values[torch.from_numpy(clients.client(i))]), schema, i) for i in range(len(clients))}
    total = sum(unpack_sums(message, schema, i) for i, message in up.items())
    scale = pack_scale(*mean_and_std(np.asarray(total)), schema)
    return scale, Exchange(up, dict.fromkeys(up, scale))
