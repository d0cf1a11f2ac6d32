"""Datasets, partitions, losses and tasks. Importing this package fills the registry; no data file is read."""

from thinwire.data.datasets import arrays as arrays
from thinwire.data.datasets import cifar as cifar
from thinwire.data.datasets import digits as digits
from thinwire.data.datasets import glue as glue
from thinwire.data.datasets import huggingface as huggingface
from thinwire.data.datasets import image_folder as image_folder
from thinwire.data.datasets import leaf as leaf
from thinwire.data.datasets import mnist as mnist
from thinwire.data.datasets import newsgroups as newsgroups
from thinwire.data.datasets import shakespeare as shakespeare
from thinwire.data.datasets import table as table
from thinwire.data.datasets import text_classification as text_classification
from thinwire.data.datasets.arrays import from_arrays as from_arrays
from thinwire.data.datasets.huggingface import from_datasets as from_datasets
from thinwire.data.datasets.image_folder import from_image_folder as from_image_folder
from thinwire.data.datasets.table import from_table as from_table
from thinwire.data.describe_partition import PartitionDescription as PartitionDescription
from thinwire.data.describe_partition import describe_partition as describe_partition
from thinwire.data.examples import Arrays as Arrays
from thinwire.data.examples import Source as Source
from thinwire.data.make_task import make_task as make_task
from thinwire.data.partitions import dirichlet as dirichlet
from thinwire.data.partitions import iid as iid
from thinwire.data.partitions import shards as shards
from thinwire.data.task import as_examples as as_examples
from thinwire.data.task import pool_clients as pool_clients
