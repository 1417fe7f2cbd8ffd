"""What a run directory holds: its configuration, its summary, and the lock on it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podrace.errors import UnreadableFile, UsageError
from podrace.experiments.runs import read_run_record
from podrace.run import metrics
from podrace.settings import user_code
from podrace.settings.config import (
  Config,
  agent_name,
  changes,
  check_code,
  completed,
  differences,
  from_json,
  to_json,
  with_unrecorded,
)
from podrace.system.files import check_folder, write_whole
from podrace.system.files.reading import read_json
from podrace.system.files.schema import SUMMARY, check_members
from podrace.system.process import cores, is_locked, lock
from podrace.topology import on_host
from podrace.version import __version__

if TYPE_CHECKING:
  from podrace.settings.discovery import Discovery

NEVER = {'architecture', 'num_envs', 'unroll_length'}  # with these a run's state is another's


def params_sha256(params: Any) -> str:
  """A hash over the parameter leaves' paths, dtypes, shapes and bytes, in path order."""
  leaves = {
    jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  digest = hashlib.sha256()
  for path, leaf in sorted(leaves.items()):
    array = on_host(leaf)
    digest.update(f'{path} {array.dtype} {array.shape}\n'.encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()


def shapes_sha256(state: Any) -> str:
  """A hash over the paths, dtypes and shapes of a state."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  text = '\n'.join(f'{jax.tree_util.keystr(p)} {x.dtype} {x.shape}' for p, x in leaves)
  return hashlib.sha256(text.encode()).hexdigest()


def machine() -> dict[str, Any]:
  """What bitwise equality of a resumed run depends on."""
  return {
    'device': jax.devices()[0].device_kind,
    'devices': len(jax.devices()),
    'cores': cores(),
    'jax': jax.__version__,
    'podrace': __version__,
  }


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[Callable[[], bool]]:
  """Keeps a second run out of the directory for as long as this one lives.

  Gives what says whether the directory is still the one: not removed, moved or replaced.
  """
  try:
    file = lock(run_dir)
  except BlockingIOError:
    raise UsageError(f'{run_dir} is in use by another run that is still going') from None
  except OSError as e:
    raise UsageError(f'--run-dir {run_dir} cannot be written to: {e.strerror}') from e
  with file:
    check_folder(run_dir, '--run-dir')
    yield functools.partial(is_locked, run_dir.absolute(), file)


def changes_of(config: Config | Discovery, run_dir: Path) -> list[str]:
  """What the run directory's record and this configuration differ in, a line each.

  Raises:
    UsageError: if it is something that never changes in a run, which has a checkpoint.
  """
  old = read_record(run_dir)
  if old is None:
    return []
  records = completed_record(old, config), to_json(config)
  changed = differences(*records)
  begun = any((run_dir / 'checkpoints').glob('*'))
  if begun and not NEVER.isdisjoint(path for path, _, _ in changes(*records)):
    raise UsageError(
      f'{run_dir} holds another run, which this one cannot be:\n  '
      + '\n  '.join(changed)
      + '\ngive another --run-dir'
    )
  return changed


def write_json(path: Path, value: Any) -> None:
  """Writes a JSON file whole or not at all, also if the power is cut."""
  write_whole(path, json.dumps(value, indent=2) + '\n')


def read_record(run_dir: Path) -> dict[str, Any] | None:
  """What config.json holds, or None if there is none.

  Raises:
    UnreadableFile: if it is not the record of a run.
  """
  return read_run_record(run_dir)


def read_summary(path: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
  """What summary.json holds; None if there is none, or if it is damaged: the run writes it again."""
  try:
    summary = read_json(path)
  except UnreadableFile as e:
    warn(f'damaged: {e}; it will be written again')
    return None
  if summary is None:
    return None
  needed = {'step', 'episode_return', 'steps_per_s'}
  try:
    check_members(summary, SUMMARY)
  except ValueError as e:
    raise UsageError(f'{path} is not the summary of a run: it {e}') from e
  if lacking := needed - set(summary):
    raise UsageError(f'{path} is not the summary of a run: it lacks {", ".join(sorted(lacking))}')
  return summary


def completed_record(record: dict[str, Any], config: Config | Discovery) -> dict[str, Any]:
  """A run directory's record with later fields; of code, it may name what this configuration has."""
  return completed(record, user_code.named(to_json(config)))


def continued(config: Any, run_dir: Path) -> Any:
  """Return the config with which the run in a directory goes on: fields that its record lacks are as it began."""
  record = read_record(run_dir)
  return config if record is None else with_unrecorded(config, record)


def load_config(run_dir: Path, allow_code: Iterable[str] = ()) -> Config:
  """The config that a run directory of `podrace train` records.

  Args:
    allow_code: modules that it may name, besides podrace's own; naming one runs it.

  Raises:
    UsageError: if there is none, or it names other modules; nothing is imported then.
  """
  config = load_any(run_dir, allow_code)
  if not isinstance(config, Config):
    raise UsageError(
      f'{run_dir} holds a rule that `podrace discover` trained, and no agent: train one by it, as in '
      f'podrace train --agent {agent_name(config.agent)} --agent.rule {run_dir / "rule.npz"}'
    )
  return config


def load_any(run_dir: Path, allow_code: Iterable[str] = ()) -> Config | Discovery:
  """As `load_config`, of any command."""
  record = read_record(run_dir)
  if record is None:
    raise UsageError(f'{run_dir} is not a run directory: it has no config.json')
  check_code(record, allow_code)
  config: Config | Discovery = from_json(record)
  return config


def mean_and_std(episodes: Any, return_sum: Any, deviation: Any) -> dict[str, float | None]:
  """The return of all episodes together, from each seed's sums, and its standard deviation.

  None where no episode ended, and for what is not finite.
  """
  n, sums, deviations = (
    np.atleast_1d(x).astype(np.float64) for x in (episodes, return_sum, deviation)
  )
  n, sums, deviations = n[n > 0], sums[n > 0], deviations[n > 0]
  if not len(n):
    return {'episode_return': None, 'episode_return_std': None}
  with np.errstate(all='ignore'):
    mean = sums.sum() / n.sum()
    variance = (deviations + n * np.square(sums / n - mean)).sum() / n.sum()
    std = np.sqrt(np.maximum(variance, 0.0))
  return {'episode_return': metrics.number(mean), 'episode_return_std': metrics.number(std)}


def described(summary: dict[str, Any], seeds: int) -> metrics.Line:
  """What a line of metrics has of a summary (see `Anakin.read_log`)."""
  episodes = np.atleast_1d(summary['episodes']).astype(np.int64)
  total = int(episodes.sum())
  length = np.sum(summary['length_sum'], dtype=np.float64)
  line: metrics.Line = {
    **mean_and_std(episodes, summary['return_sum'], summary['return_deviation']),
    'episode_length': metrics.number(length / total) if total else None,
    'episodes': total,
    'gradient_steps': int(np.max(summary['gradient_steps'])),
  }
  if seeds > 1:
    sums = np.asarray(summary['return_sum'], np.float64)
    line['episode_return_by_seed'] = [
      metrics.number(s / n) if n else None for s, n in zip(sums, episodes, strict=True)
    ]
    line['episodes_by_seed'] = episodes.tolist()
  line |= {name: metrics.number(np.mean(x)) for name, x in summary['metrics'].items()}
  if total:
    infos = summary.get('info_sums', {})
    line |= {
      f'info_{k}': metrics.number(np.sum(x, dtype=np.float64) / total) for k, x in infos.items()
    }
  return line | summary.get('host', {})


def final_return(path: Path) -> dict[str, Any]:
  """The mean return of the episodes that ended in the last tenth of the run."""
  lines = metrics.read(path)
  start = 0.9 * lines[-1]['step'] if lines else 0
  lines = [
    line for line in lines if line.get('episode_return') is not None and line.get('episodes')
  ]  # null: not finite, or none
  tail = [line for line in lines if line['step'] > start] or lines[-1:]
  episodes = sum(line['episodes'] for line in tail)
  if not episodes:
    return {'episode_return': None, 'episodes': 0}
  total = sum(line['episode_return'] * line['episodes'] for line in tail)
  result: dict[str, Any] = {'episode_return': total / episodes, 'episodes': episodes}
  if seeds := _seeds(tail[-1]):
    tail, lines = ([x for x in some if _seeds(x) == seeds] for some in (tail, lines))
    result['episode_return_by_seed'] = [_final_of_seed(i, tail, lines) for i in range(seeds)]
  return result


def _seeds(line: metrics.Line) -> int:
  """The number of seeds that a line has returns of; 0 if it is of one run, or contradicts itself."""
  counts = {len(line.get(name, ())) for name in ('episode_return_by_seed', 'episodes_by_seed')}
  return counts.pop() if len(counts) == 1 else 0


def _final_of_seed(i: int, tail: list[metrics.Line], lines: list[metrics.Line]) -> float | None:
  """The mean of a seed's episodes in `tail`, or else that of the newest line with any."""

  def mean(those: list[metrics.Line]) -> float | None:
    return _mean(
      [(line['episode_return_by_seed'][i], line['episodes_by_seed'][i]) for line in those]
    )

  found = mean(tail)
  if found is None:
    found = next((x for line in reversed(lines) if (x := mean([line])) is not None), None)
  return found


def _mean(means: list[tuple[float | None, int]]) -> float | None:
  """The mean of (mean, count)s; None if nothing was counted."""
  known = [(mean, count) for mean, count in means if mean is not None]
  total = sum(count for _, count in known)
  return sum(mean * count for mean, count in known) / total if total else None
