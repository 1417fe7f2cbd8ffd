"""Environments: podrace's own, and adapters of other libraries.

Importing this module imports neither jax nor a library of environments.
"""

from podrace.envs.registry import make, names
from podrace.errors import MissingExtra, UnknownName

__all__ = ['MissingExtra', 'UnknownName', 'make', 'names']
