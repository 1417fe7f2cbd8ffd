"""Records of a suite: one small JSON file for each program, with its curve, scores and origin."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.errors import RunError, UnreadableFile, UsageError
from podrace.experiments.curves import RunCurve, curves_of
from podrace.experiments.suites.suite import Evaluation, Program, Suite
from podrace.run import metrics
from podrace.settings import user_code
from podrace.settings.record import changes, complete
from podrace.system.files import NotOwn, make_user_folder, write_whole
from podrace.system.files.reading import read_object
from podrace.system.files.schema import COUNT, NUMBER, TEXT, Member, needed
from podrace.version import __version__

POINTS = 100  # most points of a recorded curve
DIGITS = 6  # significant digits of a score
EACH = Member('a list', each=NUMBER)
OBJECT = needed(Member('an object'))
RECORD = {
  'suite': needed(TEXT), 'task': needed(TEXT), 'agent': needed(TEXT),
  'seeds': needed(Member('a list', each=COUNT)), 'config': OBJECT, 'evaluation': OBJECT,
  'kills': needed(COUNT), 'killed_at': Member('a list', each=COUNT), 'step': needed(COUNT),
  'training': needed(EACH),
  'evaluated': needed(EACH), 'params_sha256': needed(TEXT), 'wall_s': NUMBER, 'machine': OBJECT,
  'commit': needed(TEXT),
  'curve': needed(Member('an object', members={
    'step': needed(Member('a list', each=COUNT)),
    'returns': needed(Member('a list', each=EACH)),
  })),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Record:
  """The record of a program."""

  path: Path
  content: dict[str, Any]

  def scores(self, name: str) -> np.ndarray:
    """Return a score of each seed that has one: `evaluated`, or `training`, its last tenth."""
    return np.array([x for x in self.content[name] if x is not None], float)

  def curves(self) -> list[RunCurve]:
    """Return the training return of each seed over environment steps."""
    curve = self.content['curve']
    steps = np.array(curve['step'], float)
    rows = [[np.nan if y is None else y for y in row] for row in curve['returns']]
    return curves_of(steps, np.array(rows, float), self.path)

  def differences(self, program: Program, config: dict[str, Any]) -> list[str]:
    """Return the settings in which a program is not the recorded one, as texts."""
    was = {k: self.content[k] for k in ('seeds', 'evaluation', 'kills')}
    now = {'seeds': program.seeds, 'kills': program.kills}
    now['evaluation'] = describe_evaluation(program.evaluation)
    old = {'config': complete(self.content['config'], user_code.named_modules(config)), **was}
    return [str(c) for c in changes(old, {'config': config, **now})]


def runs_of_equal_seeds(records: Iterable[Record], task: str) -> list[list[dict[str, Any]]]:
  """Return the contents of a task's records, grouped by their seeds, where there are several."""
  by_seeds: dict[tuple[int, ...], list[dict[str, Any]]] = {}
  for record in records:
    if record.content['task'] == task:
      by_seeds.setdefault(tuple(record.content['seeds']), []).append(record.content)
  return [runs for runs in by_seeds.values() if len(runs) > 1]


def have_equal_hashes(runs: Sequence[Mapping[str, Any]]) -> bool:
  """Return whether runs ended with the same parameters."""
  hashes = {x['params_sha256'] for x in runs}
  return len(hashes) == 1 and '' not in hashes


def check_hashes(suite: Suite, records: Mapping[str, Record]) -> None:
  """Check the demand `compare = 'hashes'`, and that programs were killed as often as they should.

  Raises:
    RunError: naming the tasks and programs.
  """
  wrong = [
    f'{task}: {", ".join(x["agent"] for x in runs)} ended with other parameters'
    for task in suite.tasks
    for runs in runs_of_equal_seeds(records.values(), task)
    if not have_equal_hashes(runs)
  ]
  for program in suite.programs:
    if (record := records.get(program.name)) is None:
      continue
    if (kills := len(record.content.get('killed_at', ()))) < program.kills:
      wrong.append(f'{program.name} was killed {kills} times of {program.kills} before its end')
  if wrong:
    raise RunError('\n  '.join([f'{suite.name} does not hold:', *wrong]))


def read_record(folder: Path, suite: Suite, program: Program) -> Record | None:
  """Return the record of a program in a directory; None if there is none.

  Raises:
    UnreadableFile: if it is damaged.
    UsageError: if it is of another suite or program.
  """
  path = record_path(folder, program)
  content = read_object(path, RECORD)
  if content is None:
    return None
  name = content['suite']
  if (name, content['task'], content['agent']) != (suite.name, program.task, program.agent):
    raise UsageError(f'{path} is of suite {name:.99}, or of another program')
  seeds, curve = len(content['seeds']), content['curve']
  if any(len(x) != seeds for x in (content['training'], content['evaluated'], curve['returns'])):
    raise UnreadableFile(path, f'has other numbers of scores and curves than its {seeds} seeds')
  if any(len(row) != len(curve['step']) for row in curve['returns']):
    raise UnreadableFile(path, 'has curves of other lengths than its steps')
  if any(after <= before for before, after in itertools.pairwise(curve['step'])):
    raise UnreadableFile(path, 'has a curve with steps that do not ascend')
  return Record(path, content)


def read_records(folder: Path, suite: Suite) -> dict[str, Record]:
  """Return the records of the suite's programs in a directory, by the program's name.

  Raises:
    UnreadableFile: if one is damaged.
    UsageError: if one is of another suite, or has other seeds.
  """
  records = {}
  for program in suite.programs:
    if (record := read_record(folder, suite, program)) is None:
      continue
    if (seeds := record.content['seeds']) != program.seeds:
      raise UsageError(
        f'{record.path} has the seeds {seeds}, and the suite {program.seeds}: podrace reproduce '
        '--again trains it again'
      )
    records[program.name] = record
  return records


def record_path(folder: Path, program: Program) -> Path:
  """Return the path of a program's record."""
  return folder / f'{program.name}.json'


def describe_evaluation(evaluation: Evaluation) -> dict[str, Any]:
  """Return an evaluation as JSON."""
  return dataclasses.asdict(evaluation) | {'options': list(evaluation.options)}


def make_record(
  suite: Suite, program: Program, config: dict[str, Any], summary: dict[str, Any], run_dir: Path,
  evaluated: dict[str, Any], killed_at: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
  """Return the record of a finished and evaluated run.

  Args:
    suite: the suite.
    program: the program.
    config: record of the run's configuration.
    summary: of the run.
    run_dir: of the run.
    evaluated: result of `evaluate`.
    killed_at: the step at which the run was killed, for each kill.
  """
  by_seed = summary.get('episode_return_by_seed') or [summary['episode_return']]
  means = evaluated.get('episode_return_mean_by_seed') or [evaluated['episode_return_mean']]
  return {
    'suite': suite.name,
    'task': program.task,
    'agent': program.agent,
    'seeds': program.seeds,
    'command': program.command,
    'config': config,
    'evaluation': describe_evaluation(program.evaluation),
    'kills': program.kills,
    'killed_at': list(killed_at),
    'step': summary['step'],
    'training': [_rounded(x) for x in by_seed],
    'evaluated': [_rounded(x) for x in means],
    'params_sha256': summary['params_sha256'],
    'wall_s': summary['wall_s'],
    'compile_s': summary['compile_s'],
    'steps_per_s': summary['steps_per_s'],
    'machine': summary['machine'] | {'python': platform.python_version()},
    'commit': commit(),
    'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'curve': thin(metrics.read(run_dir / 'metrics.jsonl', shown=True), program.count),
  }


def write_record(folder: Path, program: Program, record: dict[str, Any]) -> Path:
  """Write a record, and return its path.

  Raises:
    RunError: if it cannot be written, for example on a full disk.
  """
  path = record_path(folder, program)
  with failing(path):
    make_user_folder(folder)
    rows = [f'{json.dumps(name)}: {json.dumps(x)}' for name, x in record.items()]
    write_whole(path, '{\n' + ',\n'.join(rows) + '\n}\n')
  return path


@contextlib.contextmanager
def failing(path: Path) -> Iterator[None]:
  """Raise a failure to write as RunError."""
  try:
    yield
  except NotOwn:
    raise
  except OSError as e:
    raise RunError(f'{path} cannot be written: {e.strerror}') from e


def thin(lines: Sequence[metrics.Line], seeds: int) -> dict[str, Any]:
  """Return the curve of each seed with at most POINTS points: means over neighbouring lines.

  A mean weighs each episode alike. It is None if no episode ended.
  """
  parts = np.array_split(np.arange(len(lines)), min(POINTS, len(lines))) if lines else []
  rows = [_means([lines[i] for i in part], seeds) for part in parts]
  return {
    'step': [lines[part[-1]]['step'] for part in parts],
    'returns': [[row[i] for row in rows] for i in range(seeds)],
  }


def _means(lines: Sequence[metrics.Line], seeds: int) -> list[float | None]:
  """Return the mean return of each seed's episodes in some lines."""
  values, counts = (
    np.array([_each(line, name, seeds) for line in lines], float)
    for name in ('episode_return', 'episodes')
  )
  counts = np.where(np.isfinite(values), counts, 0.0)
  total = counts.sum(axis=0)
  sums = np.where(counts > 0, values * counts, 0.0).sum(axis=0)
  return [_rounded(s / n) if n else None for s, n in zip(sums, total, strict=True)]


def _each(line: metrics.Line, name: str, seeds: int) -> list[float]:
  values = [line.get(name)] if seeds == 1 else line.get(f'{name}_by_seed') or [None] * seeds
  return [np.nan if x is None else x for x in values]


def _rounded(x: float | None) -> float | None:
  return None if x is None else float(f'{x:.{DIGITS}g}')


def commit() -> str:
  """Return the commit of podrace's source, with -dirty if files of the package differ from it.

  A podrace that is not a checkout has its version instead.
  """
  root = Path(__file__).parents[3]
  if not (root / '.git').exists():
    return f'version {__version__}'
  git = ['git', '-C', str(root)]
  try:
    head = subprocess.run([*git, 'rev-parse', 'HEAD'], capture_output=True, check=True).stdout
    status = [*git, 'status', '--porcelain', '--', 'podrace']
    changed = subprocess.run(status, capture_output=True, check=True).stdout.strip()
  except (OSError, subprocess.CalledProcessError):  # no git, or a checkout of another user
    return f'version {__version__}'
  return head.decode().strip() + ('-dirty' if changed else '')
