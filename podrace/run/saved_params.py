"""Parameters of a run on disk: its checkpoints, and the best by evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from podrace.errors import CheckpointError, RunError, UsageError
from podrace.run.checkpoint import Checkpoints
from podrace.run.directory import saved_steps
from podrace.run.metrics import read
from podrace.settings.resolved import Resolved
from podrace.system.files import check_folder, make_folder, move, write_whole
from podrace.system.files.reading import read_bytes
from podrace.system.files.schema import BEST, NEWEST, is_checkpoint, is_number, is_step
from podrace.topology import on_host
from podrace.types import Array

FILE_BYTES = 2**34  # largest file of parameters
SUFFIX = '.safetensors'


class SavedParams(NamedTuple):
  """Parameters that were read.

  Attributes:
    step: environment steps of each seed.
    params: with a leading axis of seeds if the run has several.
    skipped: steps of damaged checkpoints that are newer.
  """

  step: int
  params: Any
  skipped: list[int]


def restore_params(
  resolved: Resolved, run_dir: Path, checkpoint: str | int = NEWEST, member: int | None = None
) -> SavedParams:
  """Read parameters of a run.

  Args:
    resolved: the configuration of the run.
    run_dir: its directory.
    checkpoint: newest, the newest undamaged one; best, the best by evaluation; or a step.
    member: index of a seed, whose parameters have no axis of seeds. None: all seeds.

  Raises:
    UsageError: if there is no such checkpoint or seed.
    RunError: if all checkpoints, or the named one, are damaged.
  """
  seeds = resolved.config.seeds
  if member is not None and not 0 <= member < seeds:
    raise UsageError(
      f'{run_dir} has no seed {member}: its {seeds} seeds have the indices 0 to {seeds - 1}'
    )
  saved = _read(resolved, run_dir, str(checkpoint))
  if member is None or seeds == 1:
    return saved
  return saved._replace(params=jax.tree.map(lambda x: x[member], saved.params))


def _read(resolved: Resolved, run_dir: Path, checkpoint: str) -> SavedParams:
  if not is_checkpoint(checkpoint):
    raise UsageError(f'--checkpoint is {NEWEST}, {BEST} or a step, not {checkpoint!r}')
  shapes = param_shapes(resolved)
  if checkpoint == BEST:
    return _read_best(run_dir, shapes)
  best, steps = _best_files(run_dir), saved_steps(run_dir)
  if checkpoint != NEWEST:
    step = int(checkpoint.replace('_', ''))
    if step not in steps and step in best:
      return SavedParams(step, read_params(best[step], shapes), [])
    if step not in steps:
      known = ', '.join(f'{s:,}' for s in sorted({*steps, *best}))
      raise UsageError(f'{run_dir} has no checkpoint at step {step:,}: there are {known or "none"}')
  if not (run_dir / 'checkpoints').is_dir():
    raise UsageError(f'{run_dir} has no checkpoints yet')
  checkpoints = Checkpoints(run_dir / 'checkpoints', writes=False)
  steps = checkpoints.steps() if checkpoint == NEWEST else [step]
  skipped: list[int] = []
  reason = ''
  for step in steps:
    try:
      return SavedParams(step, checkpoints.restore(step, shapes).params, skipped)
    except CheckpointError as e:
      skipped.append(step)
      reason = reason or str(e)  # the reason of the newest checkpoint
  if not skipped:
    raise UsageError(f'{run_dir} has no checkpoint yet')
  if checkpoint == NEWEST and checkpoints.steps() != skipped:  # the run has saved meanwhile
    return _read(resolved, run_dir, checkpoint)
  raise RunError(f'none of the {len(skipped)} checkpoints in {run_dir} can be read: {reason}')


def _read_best(run_dir: Path, shapes: Any, missing: int | None = None) -> SavedParams:
  """Read the best parameters. A run that goes on removes their file after a better evaluation."""
  step = best_step(run_dir)
  if step is None:
    raise UsageError(
      f'{run_dir} has no best checkpoint: it is kept by runs with --eval-every, from their first '
      'evaluation on'
    )
  path = run_dir / 'best' / f'{step}{SUFFIX}'
  try:
    return SavedParams(step, read_params(path, shapes), [])
  except UsageError:
    if path.exists() or step == missing:
      raise
    return _read_best(run_dir, shapes, missing=step)


def param_shapes(resolved: Resolved) -> Any:
  """Return the shapes of the run's parameters, on one device."""
  agent, seeds = resolved.agent, resolved.config.seeds
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), seeds))

  def params(keys: Array) -> Any:
    return jax.vmap(agent.init)(keys).params if seeds > 1 else agent.init(keys[0]).params

  one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), jax.eval_shape(params, keys)
  )


def write_params(path: Path, params: Any) -> None:
  """Write parameters to a file, whole or not at all. Their arrays are copied to the host first."""
  from safetensors.numpy import save

  leaves = [on_host(x) for x in jax.tree.leaves(params)]
  write_whole(path, save({str(i): np.asarray(x, order='C') for i, x in enumerate(leaves)}))


def read_params(path: Path, shapes: Any) -> Any:
  """Read parameters that `write_params` wrote, perhaps in an earlier process.

  Args:
    path: the file.
    shapes: the tree of the parameters; its leaves have a shape and a dtype.

  Raises:
    UsageError: if the file is damaged, or has other shapes.
  """
  from safetensors.numpy import load

  expected, tree = jax.tree.flatten(shapes)
  try:
    arrays = load(read_bytes(path, FILE_BYTES))
    leaves = [arrays[str(i)] for i in range(len(expected))]
  except Exception as e:  # SafetensorError derives from Exception only
    raise UsageError(f'{path} holds no parameters: {e}; remove the file to resume') from e
  if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in expected]:
    raise UsageError(f'{path} holds parameters of other shapes; remove the file to resume')
  return jax.tree.unflatten(tree, leaves)


# --- the best by evaluation ------------------------------------------------------------------


def _best_files(run_dir: Path) -> dict[int, Path]:
  """Return the files of parameters in `best/` by step. A link in place of the folder is refused."""
  folder = run_dir / 'best'
  if not folder.exists() and not folder.is_symlink():
    return {}
  check_folder(folder, 'best parameters', links=True)
  return {int(p.stem): p for p in folder.glob(f'*{SUFFIX}') if is_step(p.stem)}


def _scores(run_dir: Path) -> dict[int, float]:
  """Return the mean return of each evaluation by step, where it is finite."""
  lines = read(run_dir / 'eval.jsonl')
  means: dict[int, Any] = {line['step']: line.get('episode_return_mean') for line in lines}
  return {step: float(mean) for step, mean in means.items() if is_number(mean)}


def best_step(run_dir: Path) -> int | None:
  """Return the step of the best evaluation with saved parameters, the first of equal ones."""
  scores = _scores(run_dir)
  steps = sorted(step for step in _best_files(run_dir) if step in scores)
  return max(steps, key=lambda step: scores[step], default=None)


class BestParams:
  """Keeps the parameters of the best evaluation of a run in `best/`.

  The best has the largest mean return over all seeds; of equal ones, the first is kept. Earlier
  bests stay until a checkpoint is newer than their successor, so that a run that is resumed from an
  older checkpoint has the best of the steps before it.

  Args:
    run_dir: directory of the run.
    resumed_at: step that the run resumes from. Later files are removed: they are made again.
    oldest: returns the step of the oldest checkpoint on disk, -1 without any.
  """

  def __init__(self, run_dir: Path, resumed_at: int, oldest: Callable[[], int]) -> None:
    self._folder, self._oldest = make_folder(run_dir / 'best'), oldest
    scores = _scores(run_dir)
    self._kept: list[tuple[int, float]] = []  # by step; means ascend
    for step, path in sorted(_best_files(run_dir).items()):
      if step > resumed_at:
        path.unlink()
      elif step in scores:
        self._kept.append((step, scores[step]))

  def offer(self, step: int, mean: Any, path: Path) -> None:
    """Move a file to `best/` if its mean return exceeds all before, else remove it."""
    if not is_number(mean) or (self._kept and mean <= self._kept[-1][1]):
      path.unlink(missing_ok=True)
      return
    best = self._folder / f'{step}{SUFFIX}'
    best.unlink(missing_ok=True)  # the same parameters; their line of eval.jsonl was lost
    move(path, best)
    self._kept.append((step, float(mean)))
    oldest = self._oldest()
    needed = next((i for i, (s, _) in reversed([*enumerate(self._kept)]) if s <= oldest), 0)
    for unneeded, _ in self._kept[:needed]:
      (self._folder / f'{unneeded}{SUFFIX}').unlink(missing_ok=True)
    self._kept = self._kept[needed:]
