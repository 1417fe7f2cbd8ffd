"""The examples do what they say."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from typing import Any

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'


@pytest.fixture
def compile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
  """Most of the time here is compilation; what is computed stays the same up to rounding."""
  options = {'xla_backend_optimization_level': 0}
  monkeypatch.setattr(jax, 'jit', functools.partial(jax.jit, compiler_options=options))


def load(name: str) -> Any:
  spec = importlib.util.spec_from_file_location(name, EXAMPLES / f'{name}.py')
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.usefixtures('compile_quickly')
@pytest.mark.parametrize('network', ['EquinoxNetwork', 'NnxNetwork'])
def test_own_network(network: str) -> None:
  """Over 500 episodes of about 1 each: the standard error is below 0.02."""
  example = load('own_network')
  assert example.train(getattr(example, network)) > 0.9


def test_the_whole_of_sebulba_learns_catch(capsys: pytest.CaptureFixture[str]) -> None:
  """Random play has -0.6 or so; the lag is what the file says."""
  assert load('sebulba').main(250) > 0.8
  assert 'policy lag 1.0' in capsys.readouterr().out
