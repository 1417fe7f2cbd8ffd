"""Environments: our own, and those of other libraries through one adapter each.

Importing this imports neither jax nor any of the libraries.
"""

from podrace.envs.registry import make, names
from podrace.errors import MissingExtra, UnknownName

__all__ = ['MissingExtra', 'UnknownName', 'make', 'names']
