"""Evaluations during a run: one that outlives it, and agents that cannot be greedy."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from shared_programs import shared_programs  # noqa: F401

import podrace
from podrace.agents.impala import Impala
from podrace.errors import RunError, UsageError
from podrace.networks import ActorCritic
from podrace.run import periodic_evaluation
from podrace.run.metrics import read
from podrace.run.video.film import FilmSettings, watch


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


@dataclasses.dataclass(frozen=True)
class Delegating:
  """An agent of a user that has no field greedy."""

  network: ActorCritic = ActorCritic(hidden=(4,))

  def __getattr__(self, name: str) -> Any:
    if name not in ('init', 'initial_state', 'act', 'learn'):
      raise AttributeError(name)
    return getattr(Impala(network=self.network), name)


@dataclasses.dataclass(frozen=True)
class Wrapping:
  """A wrapper of a user, which leaves acting to its agent."""

  agent: Any

  def __getattr__(self, name: str) -> Any:
    if name not in ('init', 'initial_state', 'act', 'learn'):
      raise AttributeError(name)
    return getattr(self.agent, name)


def config_of(agent: Any, **settings: Any) -> Any:
  return podrace.configure(
    env='podrace:catch', agent=agent, num_envs=4, unroll_length=8, total_steps=320, devices=1,
    log_every=320, **settings,
  )  # fmt: skip


def test_evaluations_need_an_agent_that_can_be_greedy(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match=r'Delegating.*--eval-every'):
    podrace.train(config_of(Delegating(), eval_every=320), tmp_path / 'run', quiet=True)
  assert not (tmp_path / 'run').exists()


def test_a_film_needs_an_agent_that_can_be_greedy(tmp_path: Path) -> None:
  run_dir = tmp_path / 'run'
  podrace.train(config_of(Delegating()), run_dir, quiet=True)
  with pytest.raises(UsageError, match=r'Delegating.*--sample'):
    watch(run_dir, tmp_path / 'out', FilmSettings(episodes=1), allow_code=[__name__])
  settings = FilmSettings(episodes=1, sampled=True)
  assert watch(run_dir, tmp_path / 'out', settings, allow_code=[__name__])['episodes'] == 1


def test_a_wrapper_is_greedy_if_its_agent_can_be(tmp_path: Path) -> None:
  agent = Wrapping(Impala(network=ActorCritic(hidden=(4,))))
  config = config_of(agent, eval_every=320, eval_episodes=3)
  result = podrace.train(config, tmp_path / 'run', quiet=True)
  greedy = result.evaluate(3, acting='greedy', seed=config.seed)
  assert result.evaluations[-1]['episode_return_mean'] == greedy['episode_return_mean']
