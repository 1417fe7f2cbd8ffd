"""Sums of metrics in checkpoints: a run goes on with a podrace that measures more, or less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import podrace
from podrace.agents import impala

HALF, WHOLE = 5_376, 10_752
SETTINGS: dict[str, Any] = dict(
  num_envs=24, unroll_length=16, log_every=2_688, checkpoint_every=HALF
)


def train(run_dir: Path, total: int, architecture: str) -> Any:
  config = podrace.configure('catch', total_steps=total, architecture=architecture, **SETTINGS)
  return podrace.train(config, run_dir, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize('architecture', ['anakin', 'sebulba'])
@pytest.mark.parametrize('has_before, has_after', [(False, True), (True, False)])
def test_a_run_goes_on_with_other_metrics(
  architecture: str,
  has_before: bool,
  has_after: bool,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  moments = impala.value_moments
  whole = train(tmp_path / 'whole', WHOLE, architecture)
  for total, has in ((HALF, has_before), (WHOLE, has_after)):
    monkeypatch.setattr(impala, 'value_moments', moments if has else lambda *_: {})
    resumed = train(tmp_path / 'run', total, architecture)
  assert resumed.summary['step'] == WHOLE
  assert resumed.summary['params_sha256'] == whole.summary['params_sha256']
  for ours, theirs in zip(resumed.metrics, whole.metrics, strict=True):
    has = has_before if ours['step'] <= HALF else has_after
    assert ('explained_variance' in ours) == has
    assert ours['loss'] == theirs['loss']
    if has:
      assert ours['explained_variance'] == theirs['explained_variance']
