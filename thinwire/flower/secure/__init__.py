"""Secure aggregation between real clients: the server learns a sum, and no upload (Bonawitz et al., CCS 2017).

shamir.py      shares of a secret, of which a threshold recovers it and fewer reveal nothing
keys.py        X25519 key agreement, sealed shares, commitments
site_keys.py   signatures with the keys of sites
frames.py      the messages of all phases, read with bounds
session.py     what a client stores of a session
client.py      the phases on a client, and what it refuses
totals.py      loss and examples as part of the sum
unmask.py      from recovered secrets to the sum
exchange.py    messages of one phase
server.py      the phases on the server

docs/secure-aggregation.md has the threat model, and what each party learns.
"""
