"""`python -m thinwire` is the command line."""

from thinwire.cli.app import main

main()
