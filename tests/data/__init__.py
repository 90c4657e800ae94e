"""Prompts and their sources. A package, so that its folders `trl` and `verl` are not taken for those libraries."""
