"""An evaluation that goes on after its run has ended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from shared_programs import shared_programs  # noqa: F401

import podrace
from podrace.errors import RunError
from podrace.run import periodic_evaluation
from podrace.run.metrics import read


def test_an_evaluation_that_outlives_its_run_writes_nothing(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  config = podrace.configure(
    'catch', num_envs=4, unroll_length=8, total_steps=640, devices=1, log_every=320, eval_every=320,
    eval_episodes=2,
  )  # fmt: skip
  begun, goes_on, threads = threading.Event(), threading.Event(), []
  make = periodic_evaluation._make_evaluator

  def make_slow(resolved: Any) -> Any:
    evaluate = make(resolved)

    def slow(params: Any) -> Any:
      threads.append(threading.current_thread())
      begun.set()
      assert goes_on.wait(60)
      return evaluate(params)

    return slow

  def fail(line: Any) -> None:
    if line['step'] == 640:
      assert begun.wait(60)
      raise ValueError('ends the run')

  with monkeypatch.context() as patch:
    patch.setattr(periodic_evaluation, '_make_evaluator', make_slow)
    patch.setattr(periodic_evaluation, 'CLOSE_SECONDS', 0.01)
    with pytest.raises(RunError, match='ends the run'):
      podrace.train(config, tmp_path / 'run', callbacks=[fail], quiet=True)
  waiting = sorted((tmp_path / 'run' / 'to-evaluate').iterdir())
  goes_on.set()
  threads[0].join(60)
  assert waiting and sorted((tmp_path / 'run' / 'to-evaluate').iterdir()) == waiting
  assert read(tmp_path / 'run' / 'eval.jsonl') == []
  result = podrace.train(config, tmp_path / 'run', override=True, quiet=True)
  assert [line['step'] for line in result.evaluations] == [320, 640]
