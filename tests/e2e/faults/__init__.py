"""Kills at any moment, and what must hold after each of them.

``parts`` says which processes of this machine are which part of a run, ``moments`` when to inject a fault,
``disturbed`` leads a run through its faults to its end; ``evidence`` keeps what the journal said meanwhile, ``audit``
says what must hold of it in the end, and ``verdict`` puts all checks together. ``campaign`` is the long one (`make
faults`).
"""
