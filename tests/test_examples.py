"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'


def load(name: str) -> Any:
  spec = importlib.util.spec_from_file_location(name, EXAMPLES / f'{name}.py')
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize('network', ['EquinoxNetwork', 'NnxNetwork'])
def test_own_network(network: str) -> None:
  """Over 500 episodes of about 1 each: the standard error is below 0.02."""
  example = load('own_network')
  assert example.train(getattr(example, network)) > 0.9
