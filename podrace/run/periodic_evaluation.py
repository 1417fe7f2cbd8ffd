"""Evaluations during a run, made by a thread of their own and written to eval.jsonl.

The run writes parameters to a file and continues. The thread evaluates one file after another.
After its line is written, a file is removed, or kept as the best so far. A killed run therefore
loses no evaluation: the resumed run begins with the remaining files.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from podrace.architectures.sebulba.actors import CLOSE_SECONDS
from podrace.hooks import check_greedy, greedily
from podrace.run.evaluate import eval_env, make_returns, summarize_returns
from podrace.run.metrics import JsonLines, read
from podrace.run.saved_params import SUFFIX, BestParams, read_params, write_params
from podrace.settings.resolved import Resolved
from podrace.system.files import make_folder
from podrace.system.files.schema import is_step
from podrace.system.threads import Worker

MANY = 4  # number of waiting evaluations that causes a warning


def check_evaluations(resolved: Resolved) -> None:
  """Raise UsageError if a run cannot be evaluated or filmed as it should, before it trains."""
  config = resolved.config
  if jax.process_index():
    return
  if config.eval_every:
    check_greedy(resolved.agent, 'leave out --eval-every, and use podrace eval --sample')
  if config.eval_env:
    eval_env(resolved.acting, config.eval_env, '--eval-env')
  if config.eval_every and config.eval_video:
    from podrace.run.video.film import check_filming

    check_filming(resolved.acting, config.eval_env)


class Evaluations:
  """The periodic evaluations of a run.

  Owner: the run, which calls `finish` or `close`.
  Ends when: all parameters are evaluated after `finish`, or after the current evaluation at
  `close`.

  Args:
    resolved: configuration of the run.
    run_dir: directory of the run.
    resumed_at: step that the run resumes from. Later evaluations are made again.
    warn: receives a warning if evaluations take longer than their interval.
    seconds: returns the run's wall time, for the lines.
    oldest: returns the step of the oldest checkpoint on disk, -1 without any.
  """

  def __init__(
    self,
    resolved: Resolved,
    run_dir: Path,
    resumed_at: int,
    warn: Callable[[str], None],
    seconds: Callable[[], float],
    oldest: Callable[[], int],
  ) -> None:
    self._config = resolved.config
    self._run_dir, self._warn, self._seconds = run_dir, warn, seconds
    self._folder = make_folder(run_dir / 'to-evaluate')
    for draft in self._folder.glob(f'*{SUFFIX}.new'):  # of a process that was killed
      draft.unlink()
    self.lines = JsonLines(run_dir / 'eval.jsonl', resumed_at)
    lines = read(run_dir / 'eval.jsonl')
    done = {line['step']: line.get('episode_return_mean') for line in lines}
    self._waiting: queue.Queue[tuple[int, Any] | None] = queue.Queue()
    self._shapes: Any = None  # of the parameters
    self._left = [s for s in self._steps() if s <= resumed_at and s not in done]
    self._best = BestParams(run_dir, resumed_at, oldest)
    for step in sorted(set(self._steps()) - set(self._left)):
      mean = done[step] if step <= resumed_at else None
      self._best.offer(step, mean, self._path(step))
    self.updates_between = resolved.config.updates(resolved.config.eval_every)
    # A failure just before an evaluation was queued leaves its parameters to the checkpoint.
    updates = resumed_at // resolved.config.steps_per_update
    is_due = updates > 0 and updates % self.updates_between == 0
    is_missing = is_due and resumed_at not in {*done, *self._steps()}
    self._missing = resumed_at if is_missing else None
    self._warned = self._stopped = False
    self._made = 0  # evaluations; the first one compiles
    self._begun = max(self._steps(), default=max(done, default=-1))
    self._worker = Worker('evaluations', self._work)

  def _steps(self) -> list[int]:
    return sorted(int(p.stem) for p in self._folder.glob(f'*{SUFFIX}') if is_step(p.stem))

  def _path(self, step: int) -> Path:
    return self._folder / f'{step}{SUFFIX}'

  def resume(self, params: Any) -> None:
    """Queue the files of an earlier process. `params` are the run's, for their structure."""
    self._take_structure(params)
    for step in self._left:
      self._waiting.put((step, self._seconds()))
    if self._missing is not None:
      self.begin(self._missing, params)

  def _take_structure(self, params: Any) -> None:
    self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

  def begin(self, step: int, params: Any) -> None:
    """Queue an evaluation of `params`, which are copied before this returns.

    Raises:
      Exception: the failure of an earlier evaluation.
    """
    self._worker.check()
    self._take_structure(params)
    write_params(self._path(step), params)
    self._waiting.put((step, self._seconds()))
    self._begun = step
    if self._waiting.qsize() > MANY and self._made > 1 and not self._warned:
      self._warned = True
      self._warn(
        f'{self._waiting.qsize()} evaluations wait: each takes longer than --eval-every '
        f'{self._config.eval_every:,} steps do. The run ends when all are made; '
        'give a larger one, or fewer --eval-episodes'
      )

  def finish(self, step: int, params: Any) -> None:
    """Evaluate the last parameters unless that is queued, and return when all evaluations are made.

    Raises:
      Exception: the failure of an evaluation.
    """
    if self._begun < step:
      self.begin(step, params)
    self._waiting.put(None)
    self._worker.join()
    with contextlib.suppress(OSError):  # a file of another program is in it
      self._folder.rmdir()

  def close(self) -> None:
    """Leave the remaining files to the resumed run."""
    self._stopped = True
    self._waiting.put(None)
    self._worker.wait(CLOSE_SECONDS)  # JAX may crash if a computation is abandoned at exit

  def _work(self) -> None:
    evaluate = None
    device = jax.local_devices(backend='cpu')[0]  # leaves the run's accelerators alone
    # With an environment on this device, of this thread alone.
    resolved = Resolved(self._config, self._run_dir).acting
    with jax.default_device(device):
      while (item := self._waiting.get()) is not None and not self._stopped:
        evaluate = evaluate or _make_evaluator(resolved)
        step, wall_s = item
        params = jax.device_put(read_params(self._path(step), self._shapes), device)
        began = time.perf_counter()
        line = {'step': step, 'wall_s': round(wall_s, 3), **evaluate(params)}
        if self._stopped:  # the directory may be another run's by now
          break
        self.lines.write({**line, 'eval_s': round(time.perf_counter() - began, 3)})
        if self._config.eval_video:
          self._film(resolved, step, params)
        self.lines.sync()
        if self._stopped:
          break
        self._best.offer(step, line['episode_return_mean'], self._path(step))
        self._made += 1
    self.lines.close()

  def _film(self, resolved: Resolved, step: int, params: Any) -> None:
    from podrace.run.video.film import FilmSettings, film

    config, folder = self._config, make_folder(self._run_dir / 'videos')
    settings = FilmSettings(episodes=1, seed=config.seed)
    if config.seeds > 1:
      params = jax.tree.map(lambda x: x[0], params)
    film(resolved, params, folder, step, settings, env=config.eval_env)


def _make_evaluator(resolved: Resolved) -> Callable[[Any], dict[str, Any]]:
  """Return a function from parameters to the metrics that `podrace eval` gives."""
  config, agent = resolved.config, resolved.agent
  env = eval_env(resolved, config.eval_env, '--eval-env')
  returns = make_returns(config, greedily(agent), env, config.eval_episodes)
  return lambda params: summarize_returns(returns(params, config.seed))
