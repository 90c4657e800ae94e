"""Checks and measurements of asyncrl on a machine with GPUs: `make gpu`."""
