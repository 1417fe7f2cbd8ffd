"""Evaluations during a run, made by a thread of their own and written to eval.jsonl.

The run writes parameters to a file and continues. The thread evaluates one file after another, and
removes each after its line is written. A killed run therefore loses no evaluation: the resumed run
begins with the remaining files.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podrace.architectures.sebulba.actors import CLOSE_SECONDS
from podrace.errors import UsageError
from podrace.hooks import can_be_greedy, greedily
from podrace.run.evaluate import eval_env, make_returns, summarize_returns
from podrace.run.metrics import JsonLines, read
from podrace.settings.resolved import Resolved
from podrace.system.files import make_folder, write_whole
from podrace.system.files.reading import read_bytes
from podrace.system.files.schema import is_step
from podrace.system.threads import Worker
from podrace.topology import on_host

FILE_BYTES = 2**34  # largest file of parameters
MANY = 4  # number of waiting evaluations that causes a warning


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
  """

  def __init__(
    self,
    resolved: Resolved,
    run_dir: Path,
    resumed_at: int,
    warn: Callable[[str], None],
    seconds: Callable[[], float],
  ) -> None:
    self._resolved, self._config = resolved, resolved.config
    self._run_dir, self._warn, self._seconds = run_dir, warn, seconds
    self._folder = make_folder(run_dir / 'to-evaluate')
    self.lines = JsonLines(run_dir / 'eval.jsonl', resumed_at)
    done = {line['step'] for line in read(run_dir / 'eval.jsonl')}
    self._waiting: queue.Queue[tuple[int, Any] | None] = queue.Queue()
    self._kind: Any = None  # tree structure of the parameters
    self._shapes: list[Any] = []  # shape and dtype of each leaf
    self._left = [s for s in self._steps() if s <= resumed_at and s not in done]
    for step in set(self._steps()) - set(self._left):
      self._path(step).unlink()
    self.updates_between = resolved.config.updates(resolved.config.eval_every)
    self._warned = self._stopped = False
    self._begun = max(self._steps(), default=max(done, default=-1))
    self._worker = Worker('evaluations', self._work)

  def _steps(self) -> list[int]:
    return sorted(int(p.stem) for p in self._folder.glob('*.safetensors') if is_step(p.stem))

  def _path(self, step: int) -> Path:
    return self._folder / f'{step}.safetensors'

  def resume(self, params: Any) -> None:
    """Queue the files of an earlier process. `params` are the run's, for their structure."""
    self._take_structure(params)
    for step in self._left:
      self._waiting.put((step, self._seconds()))

  def _take_structure(self, params: Any) -> None:
    self._kind = jax.tree.structure(params)
    self._shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(params)]

  def begin(self, step: int, params: Any) -> None:
    """Queue an evaluation of `params`, which are copied before this returns.

    Raises:
      Exception: the failure of an earlier evaluation.
    """
    self._worker.check()
    from safetensors.numpy import save

    self._take_structure(params)
    leaves = [on_host(x) for x in jax.tree.leaves(params)]
    write_whole(
      self._path(step), save({str(i): np.ascontiguousarray(x) for i, x in enumerate(leaves)})
    )
    self._waiting.put((step, self._seconds()))
    self._begun = step
    if self._waiting.qsize() > MANY and not self._warned:
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
    self._folder.rmdir()

  def close(self) -> None:
    """Leave the remaining files to the resumed run."""
    self._stopped = True
    self._waiting.put(None)
    self._worker.wait(CLOSE_SECONDS)  # JAX may crash if a computation is abandoned at exit

  def _work(self) -> None:
    evaluate = None
    device = jax.local_devices(backend='cpu')[0]  # leaves the run's accelerators alone
    with jax.default_device(device):
      while (item := self._waiting.get()) is not None and not self._stopped:
        evaluate = evaluate or _make_evaluator(self._resolved)
        step, wall_s = item
        params = jax.device_put(
          jax.tree.unflatten(self._kind, _read_leaves(self._path(step), self._shapes)), device
        )
        began = time.perf_counter()
        line = {'step': step, 'wall_s': round(wall_s, 3), **evaluate(params)}
        self.lines.write({**line, 'eval_s': round(time.perf_counter() - began, 3)})
        if self._config.eval_video:
          self._film(step, params)
        self.lines.sync()
        self._path(step).unlink(missing_ok=True)
    self.lines.close()

  def _film(self, step: int, params: Any) -> None:
    from podrace.run.video.film import FilmSettings, film

    config, folder = self._config, make_folder(self._run_dir / 'videos')
    settings = FilmSettings(episodes=1, seed=config.seed)
    film(self._resolved, params, folder, step, settings, env=config.eval_env)


def _read_leaves(path: Path, shapes: Sequence[tuple[Any, Any]]) -> list[np.ndarray]:
  """Read leaves that `begin` wrote, perhaps in an earlier process.

  Raises:
    UsageError: if the file is damaged, or has other shapes.
  """
  from safetensors.numpy import load

  try:
    arrays = load(read_bytes(path, FILE_BYTES))
    leaves = [arrays[str(i)] for i in range(len(shapes))]
  except Exception as e:  # SafetensorError derives from Exception only
    raise UsageError(f'{path} holds no parameters to evaluate: {e}; remove it to go on') from e
  if [(x.shape, x.dtype) for x in leaves] != list(shapes):
    raise UsageError(f'{path} holds parameters of other shapes; remove it to go on')
  return leaves


def _make_evaluator(resolved: Resolved) -> Callable[[Any], dict[str, Any]]:
  """Return a function from parameters to the metrics that `podrace eval` gives."""
  config, agent = resolved.config, resolved.agent
  env = eval_env(resolved, config.eval_env, '--eval-env')
  if can_be_greedy(agent):
    agent = greedily(agent)
  returns = make_returns(config, agent, env, config.eval_episodes)
  return lambda params: summarize_returns(returns(params, config.seed))
