"""Command line: `app.py` assembles it, each other file holds one verb or a few related ones."""
