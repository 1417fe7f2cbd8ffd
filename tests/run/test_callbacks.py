"""Callbacks that fail, and settings of a run that are iterators."""
# ruff: noqa: F401 (fixtures of processes)

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from processes import lines
from shared_programs import shared_programs

from podrace.agents.impala import Impala
from podrace.errors import RunError, UsageError
from podrace.experiments.runs import inspect_run
from podrace.networks import ActorCritic
from podrace.run import loop
from podrace.run.directory import saved_steps
from podrace.run.metrics import JsonLines
from podrace.settings.config import Config

CONFIG = Config(
  agent=Impala(network=ActorCritic(hidden=(16,), initializer='lecun')), num_envs=4,
  unroll_length=8, total_steps=960, devices=1, log_every=320,
)  # fmt: skip


class Memory:
  """A callback whose memory fails at the given call of `state`, or in `restore`."""

  def __init__(self, fails_at: int = 0, restored: Exception | None = None) -> None:
    self.saved, self.fails_at, self.restored = 0, fails_at, restored

  def __call__(self, line: Any) -> None: ...

  def state(self) -> Any:
    self.saved += 1
    return object() if self.saved == self.fails_at else [-math.inf, {'a': 1}]

  def restore(self, state: Any) -> None:
    assert state == [-math.inf, {'a': 1}]
    if self.restored is not None:
      raise self.restored


def train(run_dir: Path, *callbacks: Any, **settings: Any) -> Any:
  return loop.train(CONFIG, run_dir, quiet=True, callbacks=callbacks, **settings)


def test_a_memory_that_cannot_be_saved_is_refused_first(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match=r'Memory\.state'):
    train(tmp_path / 'run', Memory(fails_at=1))
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('memory', [math.nan, {10: 1, 9: 2}, [({'a': {2: 3}},)]], ids=str)
def test_a_memory_that_json_would_change_is_refused_first(memory: Any, tmp_path: Path) -> None:
  class Fixed(Memory):
    def state(self) -> Any:
      return memory

  with pytest.raises(UsageError, match=r'Fixed\.state'):
    train(tmp_path / 'run', Fixed())


def test_a_memory_that_fails_later_is_recorded(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match=r'Memory\.state'):
    train(tmp_path / 'run', Memory(fails_at=2))
  assert inspect_run(tmp_path / 'run').state == 'failed'


def test_a_memory_that_cannot_be_restored(tmp_path: Path) -> None:
  def fail(line: Any) -> None:
    raise ValueError('no')

  with pytest.raises(RunError, match='no'):
    train(tmp_path / 'run', Memory(), fail)
  assert saved_steps(tmp_path / 'run')
  with pytest.raises(RunError, match='IndexError'):
    train(tmp_path / 'run', Memory(restored=IndexError()), fail)


@pytest.mark.parametrize('returned', [1.5, {1: 2.0}, 'loss'])
def test_results_of_a_callback(returned: Any, tmp_path: Path) -> None:
  def report(line: Any) -> Any:
    return returned

  with pytest.raises(RunError, match='report'):
    train(tmp_path / 'run', report)
  assert saved_steps(tmp_path / 'run') and inspect_run(tmp_path / 'run').state == 'failed'


def test_a_callback_that_calls_sys_exit(tmp_path: Path) -> None:
  def leave(line: Any) -> None:
    sys.exit()

  with pytest.raises(RunError, match='leave'):
    train(tmp_path / 'run', leave)
  assert saved_steps(tmp_path / 'run') and inspect_run(tmp_path / 'run').state == 'failed'


def test_callbacks_and_sinks_may_be_iterators(tmp_path: Path) -> None:
  steps, written = [], []

  class Sink:
    def write(self, line: Any) -> None:
      written.append(line['step'])

    def close(self) -> None: ...

  loop.train(
    CONFIG, tmp_path / 'run', quiet=True, sinks=iter([Sink()]),
    callbacks=iter([lambda line: steps.append(line['step'])]),
  )  # fmt: skip
  assert steps == written == [line['step'] for line in lines(tmp_path / 'run')] != []


@pytest.mark.parametrize('settings', [dict(callbacks=print), dict(sinks='tensorboard')], ids=str)
def test_neither_a_function_nor_a_text_is_a_sequence(settings: Any, tmp_path: Path) -> None:
  with pytest.raises(UsageError, match=next(iter(settings))):
    loop.train(CONFIG, tmp_path / 'run', quiet=True, **settings)


def test_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """A callback, or an environment, changes it."""
  (tmp_path / 'elsewhere' / 'run').mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  train(Path('run'), lambda line: os.chdir(tmp_path / 'elsewhere'))
  assert (tmp_path / 'run' / 'summary.json').exists()
  assert not [*(tmp_path / 'elsewhere' / 'run').iterdir()]


def test_a_line_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  write = JsonLines.write

  def fail(self: JsonLines, line: Any) -> None:
    if line['step'] == 640:
      raise OSError(27, 'File too large', 'metrics.jsonl')
    write(self, line)

  with monkeypatch.context() as patch:
    patch.setattr(JsonLines, 'write', fail)
    with pytest.raises(RunError, match=r'metrics\.jsonl'):
      train(tmp_path / 'run')
  assert saved_steps(tmp_path / 'run') == [640]
  train(tmp_path / 'run')
  train(tmp_path / 'whole')
  gone_on, whole = (
    [(x['step'], x['episodes'], x['loss']) for x in lines(tmp_path / name)]
    for name in ('run', 'whole')
  )
  assert gone_on == whole and [step for step, *_ in whole] == [320, 640, 960]


class Halve:
  """A callback that halves the parameters. It fails at a step."""

  def __init__(self, fails_at: int = 0) -> None:
    self.fails_at = fails_at

  def __call__(self, line: Any) -> None: ...

  def transform(self, train: Any, line: Any) -> Any:
    if line['step'] == self.fails_at:
      raise OSError(28, 'No space left on device')
    return train._replace(params=jax.tree.map(lambda x: x / 2, train.params))


def test_a_transform_that_failed_is_made_by_the_next_life(tmp_path: Path) -> None:
  with pytest.raises(RunError, match='No space left'):
    train(tmp_path / 'run', Halve(fails_at=640))
  assert saved_steps(tmp_path / 'run') == [640]
  gone_on, whole = (train(tmp_path / name, Halve()) for name in ('run', 'whole'))
  assert gone_on['params_sha256'] == whole['params_sha256']
