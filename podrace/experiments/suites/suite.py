"""A suite as data: tasks, agents, seeds, evaluation and published scores, from a TOML file.

The suites of podrace are the files in this directory. Importing this does not import jax.

A setting of SETTINGS may stand at the top of the file, in `[tasks.TASK]`, `[agents.AGENT]` and
`[pairs."TASK/AGENT"]`. The later place wins, and the options in `train` of all places are joined.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from podrace.errors import UnreadableFile, UsageError, unknown
from podrace.settings.config import MOST_SEEDS
from podrace.system.files.reading import RECORD_BYTES, parse_toml, read_bytes
from podrace.system.files.schema import COUNT, POSITIVE, TEXT, Member, check_members, needed

GREEDY, SAMPLED, HASHES = 'greedy', 'sampled', 'hashes'
SUFFIX = '.toml'
RECORDS = 'benchmarks/results/suites'  # has a directory for each suite
NUMBER = Member('a number')
TEXTS = Member('a list', each=TEXT)
SETTINGS = {
  'preset': TEXT,  # of `podrace train`
  'train': TEXT,  # options of `podrace train`
  'steps': POSITIVE,  # environment steps of each seed
  'seeds': Member('a whole number', 1, MOST_SEEDS),
  'together': POSITIVE,  # seeds in one program
  'episodes': POSITIVE,  # of the final evaluation of each seed
  'acting': TEXT,  # in the final evaluation: greedy or sampled
  'evaluate': TEXT,  # options of the agent in the final evaluation
  'eval_env': TEXT,  # environment of the final evaluation, if not that of training
  'max_steps': POSITIVE,  # longest episode of the final evaluation, which fails beyond
  'steps_per_s': POSITIVE,  # estimate: of all seeds of a program together, on one core
  'kills': COUNT,  # how often a program is killed while it trains
}
TASK = SETTINGS | {
  'env': needed(TEXT), 'agents': TEXTS, 'low': needed(NUMBER), 'high': needed(NUMBER),
}  # fmt: skip
PUBLISHED = {
  'who': needed(TEXT), 'scores': needed(Member('an object')), 'protocol': needed(TEXT),
  'source': needed(TEXT),
}  # fmt: skip
TABLES = Member('an object')
SUITE = SETTINGS | {
  'title': needed(TEXT), 'about': needed(TEXT), 'scale': needed(TEXT), 'notes': TEXTS,
  'compare': TEXT, 'tasks': needed(TABLES), 'agents': needed(TABLES), 'pairs': TABLES,
  'published': Member('a list', each=Member('an object', members=PUBLISHED)),
}  # fmt: skip
NAME = r'[\w-]+'  # of a suite, a task or an agent
OWN = ('--env', '--total-steps', '--seed', '--seeds', '--run-dir')  # set by the suite itself
DEFAULTS: Mapping[str, Any] = {
  'preset': '', 'seeds': 5, 'together': 1, 'episodes': 100, 'acting': GREEDY, 'evaluate': '',
  'eval_env': '',
  'max_steps': 1_000_000, 'steps_per_s': 10_000, 'kills': 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of a suite. `low` and `high` are the scores that count as 0 and 1."""

  name: str
  env: str
  low: float
  high: float

  def normalize(self, score: Any) -> Any:
    """Scale a score, or an array of scores."""
    return (score - self.low) / (self.high - self.low)


@dataclasses.dataclass(frozen=True)
class Published:
  """Published scores, by task, each as text, such as 24.7 +- 0.5."""

  who: str
  scores: Mapping[str, str]
  protocol: str
  source: str


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """How a trained program is evaluated."""

  episodes: int  # of each seed
  acting: str
  max_steps: int  # of an episode
  options: tuple[str, ...]  # of the agent
  env: str = ''  # if not that of training


@dataclasses.dataclass(frozen=True)
class Program:
  """One training run: some seeds of an agent in a task.

  Attributes:
    words: options of `podrace train`, without preset and seeds.
    first: the first seed.
    count: number of seeds, all in one program.
    steps: environment steps of each seed.
    steps_per_s: estimated speed of all seeds together on one core.
    kills: number of times that the program is killed and resumed while it trains.
  """

  task: str
  agent: str
  preset: str
  words: tuple[str, ...]
  first: int
  count: int
  steps: int
  steps_per_s: int
  kills: int
  evaluation: Evaluation

  @property
  def name(self) -> str:
    """Name of its record and its run directory."""
    return f'{self.task}.{self.agent}.{self.first}'

  @property
  def seeds(self) -> list[int]:
    """Its seeds."""
    return list(range(self.first, self.first + self.count))

  @property
  def seconds(self) -> float:
    """Estimated seconds of training on one core."""
    return self.steps * self.count / self.steps_per_s

  @property
  def command(self) -> list[str]:
    """Arguments of `podrace train`."""
    seeds = [] if self.count == 1 else ['--seeds', str(self.count)]
    return [*([self.preset] if self.preset else []), *self.words, '--seed', str(self.first), *seeds]


@dataclasses.dataclass(frozen=True)
class Suite:
  """An experiment: programs, and the published scores beside which their results stand."""

  name: str
  source: str  # its name in podrace, or its file
  title: str
  about: str
  scale: str  # the normalisation in words
  notes: tuple[str, ...]
  hashes: bool  # whether all agents of a task must end with the same parameters
  most_steps: int  # of a trial: at most as many for each program; 0: no trial
  tasks: Mapping[str, Task]
  agents: tuple[str, ...]
  programs: tuple[Program, ...]
  published: tuple[Published, ...]

  @property
  def words(self) -> list[str]:
    """Arguments of `podrace reproduce`."""
    return [self.source, *(['--steps', str(self.most_steps)] if self.most_steps else [])]

  @property
  def seconds(self) -> float:
    """Estimated seconds of training on one core."""
    return sum(p.seconds for p in self.programs)


def names() -> list[str]:
  """Return the names of podrace's suites."""
  return sorted(p.stem for p in Path(__file__).parent.glob(f'*{SUFFIX}'))


def _own(name: str) -> Path:
  return Path(__file__).parent / f'{name}{SUFFIX}'


def load(name: str, most_steps: int = 0) -> Suite:
  """Return a suite of podrace by its name, or a suite of the user by its file, NAME.toml.

  Args:
    name: of the suite or its file.
    most_steps: makes a trial of it, NAME-STEPS, whose programs have at most so many steps.

  Raises:
    UsageError: if there is none, or its file is wrong.
  """
  path = Path(name) if name.endswith(SUFFIX) else _own(name)
  if not name.endswith(SUFFIX) and name not in names():
    raise unknown('suite', name, names())
  try:
    content = parse_toml(read_bytes(path, RECORD_BYTES, follow=True))
    if not re.fullmatch(NAME, path.stem):
      raise ValueError(f'its name is {path.stem!r}, expected letters, digits, _ and -')
    if path.stem in names() and not path.samefile(_own(path.stem)):
      raise ValueError(
        f'podrace has a suite {path.stem} as well, with its records: rename the file'
      )
    return _make(path.stem, name, content, most_steps)
  except FileNotFoundError:
    raise UsageError(f'{name} does not exist') from None
  except UnreadableFile as e:
    raise UsageError(str(e)) from e
  except ValueError as e:  # of TOML, its encoding, or its content
    raise UsageError(f'{name}: {e}') from e


def _make(name: str, source: str, content: dict[str, Any], most_steps: int) -> Suite:
  _check('the file', content, SUITE)
  agents = content['agents']
  for table in ('agents', 'tasks'):
    if not content[table]:
      raise ValueError(f'{table} is empty, expected a table for each')
  for part in (*agents, *content['tasks']):
    if not re.fullmatch(NAME, part):
      raise ValueError(f'{part!r} names a task or an agent, expected letters, digits, _ and -')
  for agent, settings in agents.items():
    _check(f'agents.{agent}', settings, SETTINGS)
  for task, settings in content['tasks'].items():
    _check(f'tasks.{task}', settings, TASK)
    chosen = settings.get('agents', agents)
    _check_names(f'tasks.{task} has an agent', chosen, agents)
    if not chosen or len({*chosen}) < len(chosen):
      raise ValueError(f'tasks.{task}.agents is {chosen}, expected each agent once')
    if settings['low'] == settings['high']:
      raise ValueError(f'tasks.{task} has low = high, expected two scores')
  pairs = content.get('pairs', {})
  known = [f'{t}/{a}' for t, x in content['tasks'].items() for a in x.get('agents', agents)]
  _check_names('pairs has', pairs, known)
  for pair, settings in pairs.items():
    _check(f'pairs."{pair}"', settings, SETTINGS)
  published = [_published(row, content['tasks']) for row in content.get('published', ())]
  if content.get('compare', HASHES) != HASHES:
    raise ValueError(f'compare is {content["compare"]!r}, expected {HASHES!r}')
  programs = (p for pair in known for p in _programs(pair, content, most_steps))
  tasks = {t: Task(t, x['env'], x['low'], x['high']) for t, x in content['tasks'].items()}
  return Suite(
    f'{name}-{most_steps}' if most_steps else name, source, content['title'], content['about'],
    content['scale'], tuple(content.get('notes', ())), 'compare' in content, most_steps, tasks,
    tuple(agents), tuple(programs), tuple(published),
  )  # fmt: skip


def _published(row: dict[str, Any], tasks: Any) -> Published:
  """Return published scores, each of which is a number, or a text that begins with one."""
  _check_names('published has a task', row['scores'], tasks)
  scores = {task: str(score) for task, score in row['scores'].items()}
  for task, score in scores.items():
    try:
      is_finite = math.isfinite(float(score.partition(' ')[0]))
    except ValueError:
      is_finite = False
    if not is_finite:
      raise ValueError(
        f'published, {row["who"]:.50}: {task} has the score {score!r:.50}, expected a number, or a '
        'text that begins with one'
      )
  return Published(row['who'], scores, row['protocol'], row['source'])


def _split(text: str, name: str) -> list[str]:
  """Return the options in a text.

  Raises:
    ValueError: if a quote is open, or one sets OWN.
  """
  try:
    words = shlex.split(text)
  except ValueError as e:
    raise ValueError(f'{name} is {text!r:.200}: {e}') from e
  for word in words:
    if (option := word.partition('=')[0].replace('_', '-')) in OWN:
      raise ValueError(
        f'{name} has {option}, which the suite sets: use env, steps, seeds and together'
      )
  return words


def _programs(pair: str, content: dict[str, Any], most_steps: int) -> Iterator[Program]:
  """Yield the programs of a task and an agent."""
  task, _, agent = pair.partition('/')
  places = [content, content['tasks'][task], content['agents'][agent]]
  places.append(content.get('pairs', {}).get(pair, {}))
  values: dict[str, Any] = dict(DEFAULTS)
  for place in places:
    values |= {k: v for k, v in place.items() if k in SETTINGS}
  if 'steps' not in values:
    raise ValueError(f'{pair} has no steps')
  if values['acting'] not in (GREEDY, SAMPLED):
    raise ValueError(f'acting of {pair} is {values["acting"]!r}, expected {GREEDY} or {SAMPLED}')
  steps = min(values['steps'], most_steps or values['steps'])
  words = [w for place in places for w in _split(place.get('train', ''), f'train of {pair}')]
  words = ['--env', content['tasks'][task]['env'], '--total-steps', str(steps), *words]
  evaluation = Evaluation(
    values['episodes'], values['acting'], values['max_steps'],
    tuple(_split(values['evaluate'], f'evaluate of {pair}')), values['eval_env'],
  )  # fmt: skip
  seeds, together = values['seeds'], values['together']
  for first in range(0, seeds, together):
    yield Program(
      task, agent, values['preset'], tuple(words), first, min(together, seeds - first),
      steps, values['steps_per_s'], values['kills'], evaluation,
    )  # fmt: skip


def _check(place: str, content: Any, schema: Mapping[str, Member]) -> None:
  """Raise ValueError for a setting that is unknown or not as declared."""
  try:
    check_members(content, schema)
  except ValueError as e:
    raise ValueError(f'{place} {e}') from e
  _check_names(f'{place} has', content, schema)


def _check_names(place: str, used: Any, known: Any) -> None:
  for name in used:
    if name not in known:
      raise ValueError(f'{place} {name!r}, expected one of {", ".join(known)}')
