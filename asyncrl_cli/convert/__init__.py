"""`asyncrl convert`: converts configurations of other trainers to specs.

A trainer is a table of rows (``verl.py``, ``trl.py``, ``prime_rl.py``), which map its keys to keys of a spec and note
differences. ``rows.py`` applies a table, and ``write.py`` writes the spec with its comments. Every key of a source is
either converted or named in a comment (decision 0027).
"""
