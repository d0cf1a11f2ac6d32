"""A refusal of the command line: one printable line and exit code 2."""

FAST = ("--rounds", "2", "--set", "local.steps=1", "--set", "checkpoint.every=1", "-q")


def refused(result: tuple[int, str, str]) -> str:
    """The single line of a refusal, which must be printable."""
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.startswith("thinwire: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), err
    assert len(err) < 2100
    return err
