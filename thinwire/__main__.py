"""`python -m thinwire` runs the command line."""

from thinwire.cli.app import main

main()
