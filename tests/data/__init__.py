"""Prompts and their sources. A package, because its folders `trl` and `verl` would otherwise shadow the libraries."""
