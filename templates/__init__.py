"""Kernel templates, by language: data, no code."""
