"""`python -m thinwire` is the command line."""

from thinwire.cli import main

main()
