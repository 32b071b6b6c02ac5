"""Compile a declarative DeepSeek model spec into a sealed inference engine."""

__version__ = "0.1.0"
