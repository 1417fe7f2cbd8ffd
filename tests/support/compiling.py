"""Compiling without optimisations, where compiling takes the time and not running."""

from __future__ import annotations

import functools

import jax
import pytest

jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


@pytest.fixture(autouse=True)
def compile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
  """For modules that import this. What is computed stays the same up to rounding."""
  monkeypatch.setattr(jax, 'jit', jit)
