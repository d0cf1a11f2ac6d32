"""Partitions of flwr-datasets as clients, with the real library, offline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw

datasets = pytest.importorskip("datasets")
flwr = pytest.importorskip("flwr_datasets", reason="pip install flwr-datasets")
rules = pytest.importorskip("flwr_datasets.partitioner")


def table(rows: int) -> datasets.Dataset:
    """Rows of two numbers, whose sum tells the class."""
    x = np.random.default_rng(rows).normal(size=(rows, 2))
    cells = {"a": x[:, 0], "b": x[:, 1], "label": (x.sum(1) > 0).astype(int)}
    return datasets.Dataset.from_dict(cells)


def partitioner(rule=None, rows: int = 200):
    rule = rule or rules.LinearPartitioner(num_partitions=4)
    rule.dataset = table(rows)
    return rule


def test_a_partition_is_a_client_with_its_number():
    rule, seen = partitioner(), {}
    run = tw.simulate(
        nn.Linear(2, 2), rule, rounds=2, lr=0.5, on_message=lambda r, way, i, m: seen.setdefault(way, set()).add(i)
    )
    assert seen["up"] == {0, 1, 2, 3}
    assert run.accuracy > 0.6  # on a fifth of each partition
    source = tw.data.from_datasets(rule, test_fraction=0.5)
    assert source.user_names == ("0", "1", "2", "3")
    sizes = [len(rule.load_partition(i)) for i in range(4)]
    assert sizes == [20, 40, 60, 80]
    np.testing.assert_allclose(torch.bincount(source.users).numpy(), np.array(sizes) / 2, atol=1)


def test_a_federated_dataset_brings_its_test_split(tmp_path):
    from PIL import Image

    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])})
    for split, rows in {"train": 60, "test": 10}.items():
        labels = [i % 2 for i in range(rows)]
        images = [Image.fromarray(np.full((4, 4), 40 + 150 * label + i, np.uint8)) for i, label in enumerate(labels)]
        made = datasets.Dataset.from_dict({"image": images, "label": labels}, features=kinds)
        made.to_parquet(str(tmp_path / f"{split}.parquet"))
    rule = rules.DirichletPartitioner(num_partitions=3, partition_by="label", alpha=1.0, min_partition_size=5)
    fds = flwr.FederatedDataset(dataset=str(tmp_path), partitioners={"train": rule})
    source = tw.data.from_datasets(fds)
    assert (len(source.train), len(source.test), source.class_names) == (60, 10, ("dark", "light"))
    assert torch.bincount(source.users).tolist() == [len(fds.load_partition(i)) for i in range(3)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    run = tw.simulate(net, fds, "mapo", rounds=4, lr=0.1)
    assert run.accuracy == 1.0
    given = tw.simulate(net, fds, "mapo", test=fds.load_split("test"), rounds=4, lr=0.1)
    assert given.bytes_total == run.bytes_total


def test_what_cannot_be_used_is_one_line():
    with pytest.raises(tw.ConfigError, match=r"must be a datasets.Dataset or DatasetDict in memory, not tuple"):
        tw.simulate(nn.Linear(2, 2), partitioner(), test=(torch.zeros(3, 2), torch.zeros(3)))
    with pytest.raises(tw.ThinwireError, match=r"cannot load the partitions \(Index 18 out"):
        tw.simulate(nn.Linear(2, 2), partitioner(rules.IidPartitioner(num_partitions=30), 18))
    empty = partitioner(rules.DirichletPartitioner(15, "label", alpha=0.01, min_partition_size=0), 18)
    with pytest.raises(tw.ThinwireError, match=r"one has no examples; write fewer partitions"):
        tw.simulate(nn.Linear(2, 2), empty)
    nowhere = flwr.FederatedDataset(dataset="./nowhere", partitioners={"train": 2})
    with pytest.raises(tw.ThinwireError, match=r"cannot load the partitions \(.*nowhere") as caught:
        tw.data.from_datasets(nowhere)
    assert "\n" not in str(caught.value)
