"""Datasets, partitions, losses and tasks. Importing this package fills the registry; no data file is read."""

from thinwire.data.datasets import cifar as cifar
from thinwire.data.datasets import digits as digits
from thinwire.data.datasets import glue as glue
from thinwire.data.datasets import leaf as leaf
from thinwire.data.datasets import mnist as mnist
from thinwire.data.datasets import newsgroups as newsgroups
from thinwire.data.datasets import shakespeare as shakespeare
from thinwire.data.datasets import text_classification as text_classification
from thinwire.data.examples import Arrays as Arrays
from thinwire.data.examples import Source as Source
from thinwire.data.partitions import dirichlet as dirichlet
from thinwire.data.partitions import iid as iid
from thinwire.data.partitions import shards as shards
from thinwire.data.task import as_examples as as_examples
from thinwire.data.task import pool_clients as pool_clients
