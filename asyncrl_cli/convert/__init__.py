"""`asyncrl convert`: converts configurations of other trainers to specs.

A trainer is a table of its keys (``tables/``) and a module that computes the values which need arithmetic (``verl.py``,
``trl.py``, ``prime_rl.py``). ``table.py`` applies a table and writes the spec with its comments. Every key of a
configuration is either converted or named in a comment (decision 0027).
"""
