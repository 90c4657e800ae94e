"""Fully asynchronous reinforcement learning of language models, from one YAML spec."""

__version__ = "0.1.0"
