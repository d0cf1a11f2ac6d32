"""A roster: a mapping that stays as it was when a new one is made of it, and shares what did not change."""

from hypothesis import given
from hypothesis import strategies as st

from thinwire.protocol.state import ClientState
from thinwire.simulation.client_states import ClientStates

changes = st.lists(st.dictionaries(st.integers(0, 2000), st.integers(0, 9), max_size=20), max_size=6)


@given(changes)
def test_a_roster_is_a_dictionary_with_a_past(steps):
    rosters, plain = [ClientStates()], [{}]
    for step in steps:
        states = {i: ClientState(version) for i, version in step.items()}
        rosters.append(rosters[-1].updated(states.items()))
        plain.append({**plain[-1], **states})
    for roster, expected in zip(rosters, plain, strict=True):
        assert dict(roster) == expected
        assert len(roster) == len(expected)
        assert roster.get(5000) is None
        assert dict(ClientStates(expected)) == expected


def test_a_change_copies_one_shelf():
    before = ClientStates(dict.fromkeys(range(10_000), ClientState()))
    after = before.updated([(7, ClientState(1))])
    copied = [at for at, shelf in after._shelves.items() if shelf is not before._shelves[at]]
    assert copied == [0]
