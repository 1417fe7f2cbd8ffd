"""Compiling without optimisations, where compiling takes the time and not running."""

from __future__ import annotations

import functools

import jax
import pytest

jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


@pytest.fixture(autouse=True)
def compile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
  """Compile so in modules that import this. Results stay the same up to rounding."""
  monkeypatch.setattr(jax, 'jit', jit)
