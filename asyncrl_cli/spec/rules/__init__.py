"""Rules between fields: small functions that yield problems, each with the key to change.

Every single field of the spec is already valid. Hints name values that would work. docs/spec.md shows the docstrings of
the rules, in the order of these imports.
"""

from asyncrl_cli.spec.rules import model, data, sizes, objective, machine, quantization  # noqa: I001
from asyncrl_cli.spec.rules.base import RULES

__all__ = ["RULES", "data", "machine", "model", "objective", "quantization", "sizes"]
