"""Fully asynchronous reinforcement learning of language models, from one YAML spec."""

from __future__ import annotations

__version__ = "0.1.0"
