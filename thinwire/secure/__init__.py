"""Secure aggregation: the server learns a sum, and no upload (Bonawitz et al., CCS 2017).

masks.py    masks that cancel in the sum of a cohort, in simulations too
keys.py     shares of secrets, key agreement, sealed messages, keys and signatures of sites
frames.py   the messages of all phases, read with bounds
client.py   the phases on a client, what it stores and what it refuses

docs/secure-aggregation.md has the threat model, and what each party learns.
"""
