"""Adapters of environment libraries written in JAX."""
