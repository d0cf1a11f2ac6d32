"""Eight learning tasks with models and data as a first user would bring them.

No setting of thinwire was chosen on them but the rule for learning rates (`thinwire/runs/probe.py`).

    tabular   multilayer perceptron            generated table, 24 features, 10 classes            20 clients
    series    Conv1d + GRU                     generated waveforms of 64 values, 6 classes         16 clients
    vit       small vision transformer         handwritten digits of scikit-learn, 8 patches       20 clients
    text      character LSTM                   sentences of a small grammar, the next character    15 clients
    resnet    residual network, batch norm     the digits with noise                               12 clients
    towers    two perceptrons, cosine          generated users and items, whether they fit         20 clients
    speakers  character GRU, no norm           the sentences, one vocabulary of topics a speaker   15 clients
    causal    small causal transformer         the same sentences                                  15 clients

Each task is a function of the seed: data, clients and initial weights. Nothing is downloaded and no data folder is
needed. Labels are skewed between clients (Dirichlet), or, for the text, topics.

Networks and noise were chosen with FedAvg alone, on seed 1: so that it learns.

>>> task = tabular_mlp(seed=1)
>>> len(task.clients), parameters(task.model), tuple(task.test[0].shape)
(20, 6410, (800, 24))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits, make_classification
from torch import Tensor, nn

from thinwire.core.key import Key
from thinwire.data.partition import Dirichlet

Pair = tuple[Any, Tensor]  # inputs, a tensor or several by name, and targets


class StrangerTask(NamedTuple):
    """A model, its clients and test examples.

    Args:
        model: the network with the initial weights of torch.
        clients: (inputs, targets) of each client.
        test: (inputs, targets) to evaluate on.
    """

    model: nn.Module
    clients: list[Pair]
    test: Pair


class ConvGRU(nn.Module):
    """Two strided convolutions and a GRU over a series, (n, 1, length)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 16, 7, stride=2, padding=3), nn.ReLU(), nn.Conv1d(16, 32, 7, stride=4, padding=3), nn.ReLU()
        )
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores, (n, classes)."""
        states, _ = self.gru(self.conv(x).transpose(1, 2))
        return self.head(self.norm(states.mean(1)))


class EncoderBlock(nn.Module):
    """A transformer block: attention and a perceptron, each after a layer norm; `mask` hides later positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The tokens after the block, (n, tokens, width)."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    """A vision transformer for images of 8 x 8 pixels in 8 patches of 2 x 4."""

    def __init__(self, width: int = 32, heads: int = 4, blocks: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, (2, 4), stride=(2, 4))
        self.position = nn.Parameter(0.02 * torch.randn(1, 8, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores, (n, classes)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class CharLSTM(nn.Module):
    """The next character at each position, by an LSTM over embeddings."""

    def __init__(self, characters: int, hidden: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 16)
        self.lstm = nn.LSTM(16, hidden, batch_first=True)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character, (n, length, characters)."""
        return self.head(self.norm(self.lstm(self.embed(x))[0]))


class CharGRU(nn.Module):
    """The next character at each position, by a GRU over embeddings, without a norm."""

    def __init__(self, characters: int, hidden: int = 64) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(characters, 16), nn.GRU(16, hidden, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character, (n, length, characters)."""
        return self.head(self.gru(self.embed(x))[0])


class CharTransformer(nn.Module):
    """The next character at each position, by two causal transformer blocks."""

    def __init__(self, characters: int, length: int, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(characters, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        self.register_buffer("mask", torch.full((length, length), -torch.inf).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character, (n, length, characters)."""
        tokens = self.embed(x) + self.position
        for block in self.blocks:
            tokens = block(tokens, self.mask)
        return self.head(self.norm(tokens))


class TwoTowers(nn.Module):
    """Whether a user and an item fit: two perceptrons, whose outputs are multiplied."""

    def __init__(self, features: int, width: int = 32) -> None:
        super().__init__()
        self.user, self.item = (
            nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Class scores, (n, 2)."""
        return self.head(self.user(user) * self.item(item))


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The feature maps after the block."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class SmallResNet(nn.Module):
    """A convolution and two residual blocks with batch norm, for images with one channel."""

    def __init__(self, width: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(ResidualBlock(width, width, 2), ResidualBlock(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores, (n, classes)."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def tabular_mlp(seed: int) -> StrangerTask:
    """A perceptron with two hidden layers on a generated table: 10 classes, 2 % wrong labels."""
    table = make_classification(
        n_samples=2800, n_features=24, n_informative=14, n_redundant=4, n_classes=10, n_clusters_per_class=1,
        class_sep=1.6, flip_y=0.02, random_state=seed,
    )  # fmt: skip
    x = (table[0] - table[0].mean(0)) / table[0].std(0)
    model = _seeded(seed, lambda: nn.Sequential(
        nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ))  # fmt: skip
    return _labeled(model, x, table[1], 800, seed, clients=20, alpha=0.5)


def series_gru(seed: int, clients: int = 16) -> StrangerTask:
    """Convolutions and a GRU on noisy waveforms: slow and fast sine, square, sawtooth, chirp, pulses."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, 2400)
    x = _waveforms(labels, 64, rng)[:, None]
    return _labeled(_seeded(seed, lambda: ConvGRU(6)), x, labels, 600, seed, clients=clients, alpha=0.3)


def digits_vit(seed: int) -> StrangerTask:
    """A small vision transformer on the handwritten digits."""
    images, labels = load_digits(return_X_y=True)
    x = (images.reshape(-1, 1, 8, 8) - 4.9) / 6.0
    return _labeled(_seeded(seed, SmallViT), x, labels, 500, seed, clients=20, alpha=0.5)


def text_lstm(seed: int) -> StrangerTask:
    """A character LSTM on sentences of a small grammar; each client writes about one topic or two."""
    rng = np.random.default_rng(seed)
    clients = []
    for _ in range(15):
        topics = rng.choice(len(TOPICS), 2, replace=False)
        clients.append(_windows(_text(topics, int(rng.integers(1500, 4500)), rng)))
    test = _windows(_text(np.arange(len(TOPICS)), 8000, rng))
    return StrangerTask(_seeded(seed, lambda: CharLSTM(len(CHARACTERS))), clients, test)


def digits_resnet(seed: int) -> StrangerTask:
    """A residual network with batch norm on the digits with noise."""
    images, labels = load_digits(return_X_y=True)
    noisy = images + np.random.default_rng(seed).normal(0.0, 4.0, images.shape)
    x = (noisy.reshape(-1, 1, 8, 8) - 4.9) / 7.2
    return _labeled(_seeded(seed, SmallResNet), x, labels, 500, seed, clients=12, alpha=1.0)


def table_towers(seed: int) -> StrangerTask:
    """Two towers on generated users and items: whether they fit, 5 % wrong labels; users of a client are alike."""
    rng = np.random.default_rng(seed)
    mix_users, mix_items = rng.normal(size=(2, 12, 4))
    clients = []
    for _ in range(21):  # the last is the test set, of all users
        n, mean = (800, 0.0) if len(clients) == 20 else (int(rng.integers(60, 200)), rng.normal(0.0, 0.5, 12))
        user, item = rng.normal(mean, 1.0, (n, 12)), rng.normal(size=(n, 12))
        fits = ((user @ mix_users) * (item @ mix_items)).sum(1) > 0
        labels = np.where(rng.random(n) < 0.05, ~fits, fits).astype(np.int64)
        inputs = {"user": torch.tensor(user, dtype=torch.float32), "item": torch.tensor(item, dtype=torch.float32)}
        clients.append((inputs, torch.from_numpy(labels)))
    return StrangerTask(_seeded(seed, lambda: TwoTowers(12)), clients[:20], clients[20])


def speakers_gru(seed: int) -> StrangerTask:
    """A character GRU on the sentences of the small grammar."""
    return _speakers(seed, lambda: CharGRU(len(CHARACTERS)))


def speakers_transformer(seed: int) -> StrangerTask:
    """A causal transformer on the sentences of the small grammar."""
    return _speakers(seed, lambda: CharTransformer(len(CHARACTERS), _LENGTH))


def _speakers(seed: int, make: Callable[[], nn.Module]) -> StrangerTask:
    """Sentences of speakers, each about two topics."""
    return text_lstm(seed)._replace(model=_seeded(seed, make))


TASKS: dict[str, Callable[[int], StrangerTask]] = {
    "tabular": tabular_mlp,
    "series": series_gru,
    "vit": digits_vit,
    "text": text_lstm,
    "resnet": digits_resnet,
    "towers": table_towers,
    "speakers": speakers_gru,
    "causal": speakers_transformer,
}

# subjects, verbs, objects and places of each topic
TOPICS = (
    ("the farmer|the old dog|a red hen", "plants|feeds|counts", "the corn|six apples|the hungry pigs", "in the field"),
    ("a sailor|the captain|the harbor pilot", "hoists|mends|watches", "the sail|a long rope|the tide", "off the coast"),
    ("the baker|my aunt|a young cook", "kneads|bakes|salts", "the dough|warm bread|a plum cake", "before dawn"),
    (
        "the engineer|a machine|the night crew",
        "welds|drills|inspects",
        "the bridge|steel beams|a valve",
        "by the river",
    ),
    ("the judge|a witness|the quiet clerk", "reads|denies|signs", "the verdict|every charge|a letter", "at the court"),
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,"
_LENGTH = 20  # characters of a training sequence


def parameters(model: nn.Module) -> int:
    """The number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """The model with initial weights by this seed; the global generator stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def _labeled(
    model: nn.Module, x: np.ndarray, labels: np.ndarray, test: int, seed: int, *, clients: int, alpha: float
) -> StrangerTask:  # fmt: skip
    """Hold out random examples for the test and divide the others among clients, with skewed labels."""
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    inputs, targets = torch.tensor(x[order], dtype=torch.float32), torch.tensor(labels[order], dtype=torch.long)
    own = Dirichlet(alpha, min_size=10).assign(targets[test:].numpy(), clients, Key(seed))
    pairs = [(inputs[test:][own.client(i)], targets[test:][own.client(i)]) for i in range(clients)]
    return StrangerTask(model, pairs, (inputs[:test], targets[:test]))


def _waveforms(labels: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """(n, length) one noisy waveform for each label, with random frequency, phase and amplitude."""
    n = len(labels)
    time, frequency, phase = np.linspace(0.0, 1.0, length), rng.uniform(3.0, 5.0, (n, 1)), rng.uniform(0.0, 1.0, (n, 1))
    cycles = frequency * time + phase
    chirp = frequency * time * (0.4 + 1.6 * time) + phase
    shapes = (
        np.sin(2 * np.pi * cycles),
        np.sin(5 * np.pi * cycles),
        np.sign(np.sin(2 * np.pi * cycles)),
        2 * (cycles % 1.0) - 1,
        np.sin(2 * np.pi * chirp),
        3 * np.exp(-((cycles % 1.0 - 0.5) ** 2) / 0.01) - 0.5,
    )
    amplitude = rng.uniform(0.7, 1.3, (n, 1))
    return amplitude * np.stack(shapes)[labels, np.arange(n)] + rng.normal(0.0, 0.4, (n, length))


def _text(topics: np.ndarray, length: int, rng: np.random.Generator) -> str:
    """Random sentences about these topics, at least `length` characters."""
    sentences: list[str] = []
    while sum(map(len, sentences)) < length:
        parts = TOPICS[int(rng.choice(topics))]
        subject, verb, thing, place = (str(rng.choice(part.split("|"))) for part in parts)
        tail = ("", f" {place}", f", {place}")[int(rng.integers(3))]
        sentences.append(f"{subject} {verb} {thing}{tail}. ")
    return "".join(sentences)


def _windows(text: str) -> Pair:
    """Sequences of characters, and for each position the next one."""
    codes = torch.tensor([CHARACTERS.index(c) for c in text])
    n = (len(codes) - 1) // _LENGTH
    return codes[: n * _LENGTH].view(n, _LENGTH), codes[1 : n * _LENGTH + 1].view(n, _LENGTH)
