"""Prompts and their sources. This is a package, so that its folders `trl` and `verl` do not shadow the libraries."""
