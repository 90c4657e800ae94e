"""Configurations of other trainers, converted."""
