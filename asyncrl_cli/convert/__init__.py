"""Configurations of other trainers, converted to specs: `asyncrl convert`.

A trainer is a table of rows (``verl.py``, ``trl.py``, ``prime_rl.py``): which of its keys decides which key of a spec,
and what differs. ``rows.py`` applies a table, ``write.py`` writes the spec with its comments. Every key of a source
is either converted or named in a comment (decision 0027).
"""
