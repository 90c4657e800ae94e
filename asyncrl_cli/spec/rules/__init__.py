"""Rules between fields: small functions that yield problems, each with the key that it is about.

A rule sees a spec whose fields are each right by themselves. A hint names the numbers that would work. The docstrings
are the sentences that docs/spec.md shows, in the order of these imports.
"""

from asyncrl_cli.spec.rules import model, data, sizes, objective, machine, quantization  # noqa: I001
from asyncrl_cli.spec.rules.base import RULES

__all__ = ["RULES", "data", "machine", "model", "objective", "quantization", "sizes"]
