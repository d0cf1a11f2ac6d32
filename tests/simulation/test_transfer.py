"""Values that processes exchange: the same after a transfer, and no larger than they are."""

import pickle

import numpy as np
import pytest
import torch

from thinwire.core.tree import Spec, Vector
from thinwire.federation.transfer import pack, unpack
from thinwire.protocol.round import Reply
from thinwire.protocol.state import ClientState

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "expanded": torch.ones(1).expand(4),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "boolean": torch.tensor([True, False]),
    "double": torch.tensor([1e-300], dtype=torch.float64),
    "not a number": torch.tensor([float("nan"), -0.0]),
}


def sent_and_back(value):
    """A value after a transfer in which its arrays are read-only, as Ray's are."""
    packed = pickle.loads(pickle.dumps(pack(value)))
    for array in packed.arrays:
        array.flags.writeable = False
    return unpack(packed)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", list(TENSORS))
def test_a_tensor_has_the_same_bits_and_can_be_written_to(name):
    tensor = TENSORS[name]
    back = sent_and_back(tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(tensor)
    assert back.is_contiguous()
    back.zero_()


def test_a_view_is_sent_without_the_rest_of_its_storage():
    assert pack(torch.zeros(10**6)[:3]).nbytes < 1000


def test_a_tensor_that_occurs_twice_is_sent_once():
    tensor = torch.ones(1000)
    packed = pack([tensor, {"a": tensor}])
    assert len(packed.arrays) == 1
    first, second = unpack(packed)
    assert first is second["a"]


def test_the_replies_of_a_group():
    messages = [memoryview(b"ab"), memoryview(bytearray(b"cde"))[1:], memoryview(b"")]
    state = ClientState(4, unsent={"w": torch.ones(2)})
    back = sent_and_back([Reply(i, 4, one, 0.5, 7, state) for i, one in enumerate(messages)])
    assert [bytes(one.message) for one in back] == [b"ab", b"de", b""]
    assert all(type(one.message) is memoryview for one in back)
    assert [one[:2] + one[3:5] for one in back] == [(i, 4, 0.5, 7) for i in range(3)]
    assert torch.equal(back[1].state.unsent["w"], torch.ones(2))


def test_a_flat_tree_and_numpy_arrays():
    tree = Vector(torch.arange(3.0), Spec.of({"a": torch.zeros(2), "b": torch.zeros(1)}))
    back, rows = sent_and_back((tree, np.arange(4)))
    assert {name: block.tolist() for name, block in back.items()} == {"a": [0.0, 1.0], "b": [2.0]}
    assert rows.tolist() == [0, 1, 2, 3]
