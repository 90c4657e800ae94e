"""Faults injected at any moment of a run, and what must hold afterwards.

``parts`` finds the processes of each part of a run, and ``moments`` decides when to inject a fault. ``disturbed`` runs
a spec with faults until its end. ``evidence`` takes snapshots of the journal during the run, ``audit`` checks the final
journal, and ``verdict`` combines all checks. ``campaign`` is the long campaign (`make faults`).
"""
