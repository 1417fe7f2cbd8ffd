"""The best parameters by evaluation: chosen, kept over kills, and read by commands."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from shared_programs import shared_programs  # noqa: F401
from shorthand import slow_after

import podrace
from podrace.agents.impala import Impala
from podrace.errors import UsageError
from podrace.networks import ActorCritic
from podrace.run import saved_params
from podrace.run.evaluate import evaluate
from podrace.run.saved_params import (
  BestParams,
  best_step,
  read_params,
  restore_params,
  write_params,
)
from podrace.run.video import film
from podrace.settings.config import Config
from podrace.settings.resolved import resolve


class Run:
  """A run directory with evaluations only."""

  def __init__(self, path: Path, oldest: int = -1, resumed_at: int = 0) -> None:
    self.path, self.oldest = path, oldest
    path.mkdir(exist_ok=True)
    self.best = BestParams(path, resumed_at, lambda: self.oldest)

  def evaluate(self, step: int, mean: float | None) -> None:
    with (self.path / 'eval.jsonl').open('a') as file:
      file.write(json.dumps({'step': step, 'episode_return_mean': mean}) + '\n')
    waiting = self.path / 'waiting.safetensors'
    write_params(waiting, {'w': jax.numpy.full(2, step, np.float32)})
    self.best.offer(step, mean, waiting)
    assert not waiting.exists()

  @property
  def kept(self) -> list[int]:
    return sorted(int(p.stem) for p in (self.path / 'best').iterdir())


def means(*values: float | None) -> dict[int, float | None]:
  return {10 * (i + 1): value for i, value in enumerate(values)}


@pytest.mark.parametrize(
  ('values', 'best'),
  [
    ((1.0, 3.0, 2.0), 20),
    ((3.0, 3.0, 3.0), 10),  # of equal ones the first
    ((None, 1.0, None), 20),
    ((-5.0, -4.0, -4.5), 20),
    ((None, None), None),
    ((), None),
  ],
)
def test_the_best_is_the_first_with_the_largest_mean(
  values: tuple[float | None, ...], best: int | None, tmp_path: Path
) -> None:
  run = Run(tmp_path / 'run', oldest=10**9)
  for step, mean in means(*values).items():
    run.evaluate(step, mean)
  assert best_step(run.path) == best
  assert run.kept == ([] if best is None else [best])
  if best is not None:
    shapes = {'w': jax.ShapeDtypeStruct((2,), np.float32)}
    read = read_params(run.path / 'best' / f'{best}.safetensors', shapes)
    np.testing.assert_array_equal(read['w'], best)


@pytest.mark.parametrize('resumed_at', [0, 10, 20, 30, 40])
def test_a_run_resumed_from_an_older_checkpoint_has_the_best_before_it(
  resumed_at: int, tmp_path: Path
) -> None:
  run = Run(tmp_path / 'run')  # no checkpoint: it may begin again
  values = means(1.0, 2.0, 3.0, 2.5)
  for step, mean in values.items():
    run.evaluate(step, mean)
  lines = (run.path / 'eval.jsonl').read_text().splitlines()
  (run.path / 'eval.jsonl').write_text(''.join(f'{x}\n' for x in lines[: resumed_at // 10]))
  again = Run(run.path, resumed_at=resumed_at)
  known = [step for step in values if step <= resumed_at]
  assert best_step(run.path) == (min(max(known), 30) if known else None)
  for step, mean in values.items():
    if step > resumed_at:
      again.evaluate(step, mean)
  assert best_step(run.path) == 30 and again.kept == run.kept


def test_a_lost_record_of_evaluations_loses_no_parameters(tmp_path: Path) -> None:
  run = Run(tmp_path / 'run')
  for step, mean in means(1.0, 2.0).items():
    run.evaluate(step, mean)
  lines = (run.path / 'eval.jsonl').read_text()
  (run.path / 'eval.jsonl').unlink()
  assert Run(run.path, resumed_at=20).kept == run.kept == [10, 20]
  (run.path / 'eval.jsonl').write_text(lines)  # as the run advises
  assert Run(run.path, resumed_at=20).kept == [10, 20] and best_step(run.path) == 20
  (run.path / 'eval.jsonl').unlink()
  Run(run.path, resumed_at=20).evaluate(20, 3.0)  # once more
  assert best_step(run.path) == 20


def test_bests_that_no_checkpoint_can_need_are_removed(tmp_path: Path) -> None:
  run = Run(tmp_path / 'run', oldest=25)
  for step, mean in means(1.0, 2.0, 3.0, 4.0).items():
    run.evaluate(step, mean)
  assert run.kept == [20, 30, 40]  # from 25 on, 20 is the best; from 30 on, 30


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
  run = Run(tmp_path / 'run')
  run.evaluate(10, 1.0)
  path = run.path / 'best' / '10.safetensors'
  with pytest.raises(UsageError, match=r'10\.safetensors'):
    read_params(path, {'w': jax.ShapeDtypeStruct((3,), np.float32)})
  path.write_bytes(path.read_bytes()[:20])
  with pytest.raises(UsageError, match=r'10\.safetensors'):
    read_params(path, {'w': jax.ShapeDtypeStruct((2,), np.float32)})


def test_parameters_of_any_shape_come_back_as_they_were(tmp_path: Path) -> None:
  """Scalars, as PPO has with normalized rewards, and arrays in another order of memory."""
  params: dict[str, Any] = {
    'scalar': jax.numpy.float32(3.5),
    'steps': np.int32(7),
    'transposed': np.arange(6, dtype=np.float32).reshape(2, 3).T,
    'empty': np.zeros((0, 2), np.float32),
  }
  params = jax.tree.map(jax.numpy.asarray, params)
  write_params(tmp_path / 'params', params)
  read = read_params(tmp_path / 'params', jax.tree.map(jax.typeof, params))
  for name, x in params.items():
    assert read[name].shape == x.shape and read[name].dtype == x.dtype
    np.testing.assert_array_equal(read[name], x)


@pytest.fixture(scope='module')
def many_seeds() -> Iterator[None]:
  """JAX's check takes a scan over split keys for a reuse as soon as it is under vmap."""
  jax.config.update('jax_debug_key_reuse', False)
  yield
  jax.config.update('jax_debug_key_reuse', True)


@pytest.fixture(scope='module')
def trained(many_seeds: None, tmp_path_factory: pytest.TempPathFactory) -> podrace.Result:
  agent = Impala(ActorCritic(hidden=(16,)), learning_rate=3e-3)
  config = Config(
    agent=agent, num_envs=16, unroll_length=8, seeds=2, total_steps=15_360, eval_every=2_560,
    eval_episodes=64, checkpoint_every=5_120, devices=1,
  )  # fmt: skip
  return podrace.train(config, tmp_path_factory.mktemp('best') / 'run', quiet=True)


def test_a_run_keeps_its_best(trained: podrace.Result) -> None:
  means = {line['step']: line['episode_return_mean'] for line in trained.evaluations}
  step = max(sorted(means), key=lambda s: means[s])
  assert best_step(trained.run_dir) == step
  seed = trained.config.seed
  again = trained.evaluate(64, seed=seed, acting='greedy', checkpoint='best')
  assert again['step'] == step
  assert again['episode_return_mean'] == pytest.approx(means[step], abs=1e-6)


@pytest.mark.parametrize('episodes, warnings', slow_after(1, (2, 1), (64, 0)))
def test_a_run_warns_of_other_evaluations_than_before(
  episodes: int, warnings: int, trained: podrace.Result, tmp_path: Path, capsys: Any
) -> None:
  shutil.copytree(trained.run_dir, tmp_path / 'run')
  more = dataclasses.replace(trained.config, total_steps=17_920, eval_episodes=episodes)
  podrace.train(more, tmp_path / 'run', override=True, quiet=True)
  assert capsys.readouterr().err.count('best checkpoint') == warnings


def test_checkpoints_are_named_by_step(trained: podrace.Result) -> None:
  resolved, run_dir = resolve(trained.config), trained.run_dir
  newest = restore_params(resolved, run_dir)
  named = restore_params(resolved, run_dir, str(newest.step))
  jax.tree.map(np.testing.assert_array_equal, newest.params, named.params)
  best = restore_params(resolved, run_dir, 'best')
  jax.tree.map(
    np.testing.assert_array_equal,
    best.params,
    restore_params(resolved, run_dir, str(best.step)).params,
  )
  assert restore_params(resolved, run_dir, newest.step).step == newest.step
  for wrong in ('7', 'bset', '-1', '', '_', 7, -1):
    with pytest.raises(UsageError):
      restore_params(resolved, run_dir, wrong)


def test_the_best_is_read_by_step_without_the_other_checkpoints(
  trained: podrace.Result, tmp_path: Path
) -> None:
  shutil.copytree(trained.run_dir, tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run' / 'checkpoints')
  resolved, step = resolve(trained.config), best_step(tmp_path / 'run')
  assert step is not None
  assert restore_params(resolved, tmp_path / 'run', f'{step:_}').step == step
  with pytest.raises(UsageError, match='no checkpoints'):
    restore_params(resolved, tmp_path / 'run')


def test_the_best_is_read_while_the_run_replaces_it(
  trained: podrace.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  run_dir = tmp_path / 'run'
  shutil.copytree(trained.run_dir, run_dir)
  read, replaced = saved_params.read_params, []

  def replace_and_read(path: Path, shapes: Any) -> Any:
    if not replaced:
      replaced.append(path.rename(path.with_stem('99999')))
      with (run_dir / 'eval.jsonl').open('a') as file:
        file.write(json.dumps({'step': 99999, 'episode_return_mean': 2.0}) + '\n')
    return read(path, shapes)

  monkeypatch.setattr(saved_params, 'read_params', replace_and_read)
  assert restore_params(resolve(trained.config), run_dir, 'best').step == 99999


def test_a_member_is_one_of_the_seeds(trained: podrace.Result) -> None:
  resolved, run_dir = resolve(trained.config), trained.run_dir
  both = restore_params(resolved, run_dir).params
  for i in range(2):
    one = restore_params(resolved, run_dir, member=i).params
    jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x, y[i]), one, both)
  with pytest.raises(UsageError, match='seed 2'):
    restore_params(resolved, run_dir, member=2)
  result = evaluate(run_dir, 32, acting=('greedy',), member=1)
  assert result['episodes'] == 32 and 'episode_return_mean_by_seed' not in result


def test_one_seed_of_several_is_watched(trained: podrace.Result, tmp_path: Path) -> None:
  frames: list[list[np.ndarray]] = [[], []]
  for i in range(2):
    film.watch(trained.run_dir, None, film.FilmSettings(episodes=8), frames[i].append, member=i)
  assert not np.array_equal(*frames)
  with pytest.raises(UsageError, match='seed 2'):
    film.watch(trained.run_dir, tmp_path / '2', member=2)


@pytest.mark.parametrize('seeds', slow_after(1, 3, 1))
def test_a_run_begins_with_one_seed_of_another(
  seeds: int, trained: podrace.Result, tmp_path: Path
) -> None:
  config = dataclasses.replace(
    trained.config, seeds=seeds, total_steps=1024, seed=7,
    agent=dataclasses.replace(trained.config.agent, learning_rate=1e-30),
    init_from=str(trained.run_dir), init_checkpoint='best', init_member=1,
  )  # fmt: skip
  new = podrace.train(config, tmp_path / 'run', quiet=True)
  expected = restore_params(resolve(trained.config), trained.run_dir, 'best', 1).params
  for i in range(seeds):
    got: Any = restore_params(resolve(config), new.run_dir, member=i).params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), got, expected)


@pytest.mark.slow
def test_files_of_others_do_not_keep_a_run_from_its_end(tmp_path: Path) -> None:
  """A draft of a process that was killed, and a file of another program."""
  folder = tmp_path / 'run' / 'to-evaluate'
  config = podrace.configure('catch', total_steps=2_560, num_envs=8, unroll_length=16)
  config = dataclasses.replace(config, eval_every=1_280, eval_episodes=4)
  podrace.train(config, tmp_path / 'run', quiet=True)
  folder.mkdir()
  (folder / '2560.safetensors.new').touch()
  (folder / '.DS_Store').touch()
  more = dataclasses.replace(config, total_steps=3_840)
  assert podrace.train(more, tmp_path / 'run', quiet=True).summary['step'] == 3_840
  assert [p.name for p in folder.iterdir()] == ['.DS_Store']


def test_a_run_without_evaluations_has_no_best(trained: podrace.Result, tmp_path: Path) -> None:
  shutil.copytree(trained.run_dir, tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run' / 'best')
  with pytest.raises(UsageError, match='--eval-every'):
    evaluate(tmp_path / 'run', 4, checkpoint='best')
