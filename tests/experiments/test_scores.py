"""The script that makes the presets' scores, without the training."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from shorthand import Patch

from podrace.settings.presets import PRESETS

BENCHMARKS = Path(__file__).parents[2] / 'benchmarks'
SEVERAL_COMMANDS = {'apex-pong', 'r2d2-remote-memory'}  # a learner and others


@pytest.fixture
def scores(tmp_path: Path, monkeypatch: Patch) -> Any:
  monkeypatch.syspath_prepend(str(BENCHMARKS))
  module = importlib.import_module('scores')
  for m in (module, importlib.import_module('common')):
    monkeypatch.setattr(m, 'RESULTS', tmp_path)
  monkeypatch.setattr(sys.modules['common'], 'ROOT', tmp_path)
  origin = {'commit': {'hash': '0' * 40, 'dirty': False}}
  monkeypatch.setattr(sys.modules['common'], 'origin', lambda: origin)
  monkeypatch.setattr(sys.modules['common'], 'commit', lambda: origin['commit'])
  return module


def test_something_is_stated_of_every_preset(scores: Any) -> None:
  assert scores.STATED.keys() == (PRESETS.keys() - SEVERAL_COMMANDS) | scores.VARIANTS.keys()


def test_names_are_checked_first_and_each_result_is_kept(
  scores: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
  asked: list[str] = []

  def score(preset: str, resume: bool) -> dict[str, Any]:
    asked.append(preset)
    if preset == 'snake':
      raise ArithmeticError
    return dict(greedy=dict(episode_return_mean=7.0))

  monkeypatch.setattr(scores, 'score', score)
  monkeypatch.setattr(sys, 'argv', ['scores.py', 'catch', 'apex-pong'])
  with pytest.raises(SystemExit, match='apex-pong'):
    scores.main()
  assert asked == []
  monkeypatch.setattr(sys, 'argv', ['scores.py', 'memory', 'catch', 'snake'])
  with pytest.raises(ArithmeticError):
    scores.main()
  told = json.loads((tmp_path / 'scores.json').read_text())['results']
  assert list(told) == ['catch', 'memory'] and asked == ['memory', 'catch', 'snake']
