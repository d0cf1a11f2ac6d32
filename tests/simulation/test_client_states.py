"""ClientStates: an immutable mapping; updates return a new one that shares the unchanged shelves."""

from hypothesis import given, strategies as st

from thinwire.protocol.state import ClientState, ClientStates

changes = st.lists(st.dictionaries(st.integers(0, 2000), st.integers(0, 9), max_size=20), max_size=6)


@given(changes)
def test_client_states_equal_dictionaries_and_do_not_change(steps):
    mappings, plain = [ClientStates()], [{}]
    for step in steps:
        states = {i: ClientState(version) for i, version in step.items()}
        mappings.append(ClientStates.updated(mappings[-1], states.items()))
        plain.append({**plain[-1], **states})
    for mapping, expected in zip(mappings, plain, strict=True):
        assert dict(mapping) == expected
        assert len(mapping) == len(expected)
        assert mapping.get(5000) is None
        assert dict(ClientStates.updated({}, expected.items())) == expected


def test_an_update_copies_only_the_changed_shelf():
    before = ClientStates.updated({}, dict.fromkeys(range(10_000), ClientState()).items())
    after = ClientStates.updated(before, [(7, ClientState(1))])
    copied = [at for at, shelf in after._shelves.items() if shelf is not before._shelves[at]]
    assert copied == [0]
