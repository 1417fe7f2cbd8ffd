"""The config.json of a stranger: each of its texts is tried as a name of code, in each kind of record, by the commands."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import os
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from native_envs import write
from processes import command

from podrace import cli
from podrace.agents import AGENTS
from podrace.agents.population import Varied
from podrace.fields import role_of
from podrace.networks.transformer import Transformer
from podrace.replay.buffer import Buffer
from podrace.settings import user_code
from podrace.settings.agents import agent_class, default_agent
from podrace.settings.config import Config
from podrace.settings.discovery import RULES, Discovery
from podrace.settings.discovery_presets import PRESETS as DISCOVERIES
from podrace.settings.record import to_json

NAMES = (
  'python:stranger.make,a=b', 'gymnasium:stranger:Env-v0', 'stranger:Agent', 'c:/stranger',
  'c:stranger.c,max_steps=9',
)  # fmt: skip
SMALL: dict[str, Any] = dict(total_steps=64, num_envs=4, unroll_length=4, devices=1, eval_every=32)
PGX = 'pgx:tic_tac_toe,opponent'
Path_ = tuple[str | int, ...]


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
  """A module and a file in C that could be loaded from here; whether one was."""
  write(tmp_path / 'stranger.c', 'constructor')
  (tmp_path / 'stranger.py').write_text(
    'import pathlib\npathlib.Path(__file__).with_suffix(".ran").touch()\n'
    'def make(**options): raise SystemExit(77)\n'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.chdir(tmp_path)
  yield lambda: (tmp_path / 'stranger.ran').exists() or 'stranger' in sys.modules
  sys.modules.pop('stranger', None)


def code_of(*words: str | Path) -> Any:
  """The exit code of a command."""
  with pytest.raises(SystemExit) as end:
    cli.main([*map(str, words)])
  return end.value.code


def kept(folder: Path, record: Any) -> Path:
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(record))
  return folder


def trained(agent: Any, **settings: Any) -> Any:
  return json.loads(json.dumps(to_json(Config(agent=agent, **{**SMALL, **settings}))))


def records() -> Iterator[tuple[str, Any]]:
  """A record of each kind and agent, with its command."""
  yield from (('train', trained(default_agent(name))) for name in AGENTS)
  yield 'train', trained(Varied(default_agent('ppo'), ('discount',), (0.9, 0.8)), seeds=2)
  yield from (('discover', json.loads(json.dumps(to_json(x())))) for x in DISCOVERIES.values())


def texts(value: Any, path: Path_ = ()) -> Iterator[Path_]:
  """The path of every text in a record."""
  if isinstance(value, str):
    yield path
  each = (
    value.items()
    if isinstance(value, dict)
    else enumerate(value)
    if isinstance(value, list)
    else ()
  )
  for key, x in each:
    yield from texts(x, (*path, key))


def with_text(record: Any, path: Path_, text: Any) -> Any:
  changed = copy.deepcopy(record)
  place = changed
  for key in path[:-1]:
    place = place[key]
  place[path[-1]] = text
  return changed


def test_a_name_of_code_is_refused_in_each_text_of_each_record(
  stranger: Callable[[], bool], tmp_path: Path
) -> None:
  tried = set()
  for kind, record in records():
    for path in texts(record):
      key = (kind, record['agent']['name'] if len(path) == 2 else '', path[-3:])
      if key in tried:  # a part that several agents have, as their network
        continue
      tried.add(key)
      for name in NAMES:
        run_dir = kept(tmp_path / 'run', with_text(record, path, name))
        assert code_of(kind, '--run-dir', run_dir, '--no-compile-cache') == 2, (path, name)
        assert not stranger(), (path, name)
        assert [p.name for p in run_dir.iterdir() if p.name != 'lock'] == ['config.json']
  assert {
    ('train', '', ('eval_env',)),
    ('train', '', ('init_from',)),
    ('discover', '', ('env',)),
  } < tried
  assert len(tried) > 60


@pytest.mark.parametrize(
  'name',
  [
    *NAMES, 'Python:stranger.make', ' python:stranger.make', 'python :stranger.make', 'python:stranger .make',
    'podrace:catch python:stranger.make', 'python:stranger.make podrace:catch', 'python:stranger:make', 'ｐython:stranger.make',
    'gymnasium:CartPole-v1,env_id=stranger:Env-v0', 'gymnasium:CartPole-v1,inner=python:stranger.make',
    f'{PGX}=python:stranger.make', f'{PGX}=stranger:make', 'podrace:catch,rows=python:stranger.make', 'stranger.make',
    'C:stranger.c', ' c:stranger.c', 'c :stranger.c', 'c:./stranger.c', 'podrace:catch c:stranger.c', f'{PGX}=c:stranger.c',
    'c:cartpole,max_steps=c:stranger.c', 'c:stranger.c,isolate=true',
  ],
)  # fmt: skip
def test_no_spelling_of_an_environment_imports(
  name: str, stranger: Callable[[], bool], tmp_path: Path
) -> None:
  record = trained(default_agent('impala'))
  for change in ({}, {'architecture': 'sebulba'}):
    run_dir = kept(tmp_path / 'run', record | change | {'env': name})
    assert code_of('train', '--run-dir', run_dir) == 2
  rule = json.loads(json.dumps(to_json(DISCOVERIES['lpg-catch']())))
  assert code_of('discover', '--run-dir', kept(tmp_path / 'run', rule | {'env': name})) == 2
  assert not stranger()


CLASSES = (
  'stranger:Agent', 'stranger', 'stranger.py:Agent', '.stranger:Agent', 'podrace..stranger:Agent', 'podrace/../stranger:Agent',
  'podrace.cli:os', 'podrace.settings.agents:agent_class', 'podrace.launch.supervisor.replica:LocalStarter', 'podrace.launch.supervisor.guard:Guard', ':Agent',
  None, 3, [], {'class': 'stranger:Agent'},
)  # fmt: skip


@pytest.mark.parametrize(
  'path', [('agent', 'name'), ('agent', 'class'), ('agent', 'network', 'class'), ('seed', 'class')]
)
def test_only_podraces_settings_and_agents_are_made(
  path: Path_, stranger: Callable[[], bool], tmp_path: Path
) -> None:
  record = trained(default_agent('impala')) | {'seed': {}}
  del record['seed' if path[0] != 'seed' else 'keep']
  for name in CLASSES:
    run_dir = kept(tmp_path / 'run', with_text(record, path, name))
    assert code_of('eval', run_dir) == 2, name
    assert not stranger(), name


@pytest.mark.parametrize(
  'change',
  [
    {'agent': 'impala'}, {'agent': []}, {'agent': None}, {'command': []}, {'command': 'launch'}, {'version': 'python:stranger.make'},
    {'env': ['python:stranger.make']}, {'env': None}, {'num_envs': '4'}, {'lag': 2}, {'more': 'python:stranger.make'},
    {'more': {'of': [{'class': 'stranger:Agent'}]}}, {'seeds': {'class': 'podrace.launch.program:Backoff'}},
  ],
)  # fmt: skip
def test_other_types_than_are_declared_are_refused(
  change: dict[str, Any], stranger: Callable[[], bool], tmp_path: Path
) -> None:
  record = trained(default_agent('impala')) | change
  assert code_of('train', '--run-dir', kept(tmp_path / 'run', record)) == 2
  assert not stranger()


def test_each_command_that_reads_a_run_refuses(
  stranger: Callable[[], bool], tmp_path: Path
) -> None:
  """Of a run that evaluates elsewhere; and of one whose opponent, or whose start, is such a run."""
  theirs = kept(tmp_path / 'theirs', trained(default_agent('impala'), eval_env=NAMES[0]))
  for words in (
    ('eval', theirs), ('watch', theirs), ('export', theirs, tmp_path / 'out'), ('train', '--run-dir', theirs),
    ('train', 'catch', '--run-dir', theirs), ('discover', '--run-dir', theirs),
    ('train', 'catch', '--init-from', theirs, '--run-dir', tmp_path / 'mine'),
    ('train', '--env', f'{PGX}={theirs}', '--run-dir', tmp_path / 'mine'),
    ('train', '--env', 'podrace:catch', '--run-dir', theirs),
    ('train', 'catch', '--run-dir', theirs, '--eval-every', '32', '--eval-env', f'{PGX}={theirs}'),
  ):  # fmt: skip
    assert code_of(*words) == 2, words
    assert not stranger(), words


@pytest.mark.slow
@pytest.mark.parametrize(
  ('words', 'code'),
  [
    (('launch', '--as', 'learners', '--run-dir', 'theirs'), 2),
    (
      ('sweep', '--vary', 'agent.discount=0.9', '--processes', '--dir', '.'),
      1,
    ),  # no trial has a score
  ],
)
def test_a_process_that_is_started_in_such_a_directory_refuses(
  words: tuple[str, ...], code: int, stranger: Callable[[], bool], tmp_path: Path
) -> None:
  for name in ('theirs', '0000'):
    kept(tmp_path / name, trained(default_agent('impala'), eval_env=NAMES[0]))
  path = os.pathsep.join([os.environ.get('PYTHONPATH', str(tmp_path)), str(tmp_path)])
  done = command(*words, '--env', 'podrace:catch', PYTHONPATH=path)
  assert done.returncode == code and not stranger(), done.stderr
  output = tmp_path / '0000' / 'output.txt'
  assert '--allow-code stranger' in done.stdout + (output.read_text() if output.exists() else '')


def test_what_the_command_line_names_may_be_in_the_record(
  stranger: Callable[[], bool], tmp_path: Path
) -> None:
  """Then it is imported: the user has named it, or allowed it."""
  theirs = kept(tmp_path / 'theirs', trained(default_agent('impala'), eval_env=NAMES[0]))
  assert code_of('train', '--run-dir', theirs, '--eval-env', NAMES[0]) == 77
  assert stranger()
  assert code_of('train', '--run-dir', theirs, '--allow-code', 'stranger') == 77
  assert code_of('train', '--run-dir', theirs, '--allow-code', 'strange') == 2


def test_an_acting_process_takes_the_modules_of_an_opponent(
  stranger: Callable[[], bool], tmp_path: Path
) -> None:
  record = trained(default_agent('impala'))
  record['agent'] = {'name': 'stranger:Agent'}
  kept(tmp_path / 'opponent', record)
  address = 'tcp://127.0.0.1:1'
  words = ('act', '--connect-replay', address, '--params', address, '--env', f'{PGX}=opponent')
  assert code_of(*words) == 2 and not stranger()
  with contextlib.suppress(AttributeError):  # it has no Agent
    code_of(*words, '--allow-code', 'stranger')
  assert stranger()


@pytest.mark.parametrize(
  'words', [('catch', '--init-from', 'stranger:run'), ('--env', f'{PGX}=stranger:run')]
)
def test_a_run_that_a_setting_names_has_the_modules_that_the_command_allows(
  words: tuple[str, ...], stranger: Callable[[], bool], tmp_path: Path
) -> None:
  """A directory's name allows nothing, and no command allows anything to the next one."""
  record = trained(default_agent('impala'))
  record['agent'] = {'name': 'stranger:Agent'}
  kept(tmp_path / 'stranger:run', record)
  assert code_of('train', *words, '--run-dir', 'mine') == 2 and not stranger()
  with contextlib.suppress(AttributeError):  # it has no Agent
    assert code_of('train', *words, '--run-dir', 'mine', '--allow-code', 'stranger') == 2
  assert stranger()
  sys.modules.pop('stranger')
  (tmp_path / 'stranger.ran').unlink()
  assert code_of('train', *words, '--run-dir', 'mine') == 2 and not stranger()


def test_a_file_in_c_is_allowed_by_its_whole_name(
  stranger: Callable[[], bool], tmp_path: Path
) -> None:
  """Its options are refused after it was loaded."""
  theirs = kept(
    tmp_path / 'theirs',
    trained(default_agent('impala'), env='c:stranger.c,gravity=1', architecture='sebulba'),
  )
  for wrong in ('stranger', 'stranger.c', 'c:stranger', 'c', 'c:', 'c:./stranger.c', str(tmp_path)):
    assert code_of('eval', theirs, '--allow-code', wrong) == 2
    assert not stranger(), wrong
  assert code_of('eval', theirs, '--allow-code', 'c:stranger.c') == 2
  assert stranger()


# --- declarations ---------------------------------------------------------------------------------


def undeclared(cls: Any, seen: set[Any]) -> Iterator[str]:
  """The fields of a dataclass, and of those within it, that hold a text without a role."""
  seen.add(cls)
  types = typing.get_type_hints(cls, include_extras=True)
  for field in dataclasses.fields(cls):
    parts = [types[field.name]]
    for part in parts:  # which grows
      if role_of(part):
        continue
      if part is str:
        yield f'{cls.__name__}.{field.name}'
      parts += typing.get_args(part)
      if isinstance(part, type) and dataclasses.is_dataclass(part) and part not in seen:
        yield from undeclared(part, seen)


def test_each_text_of_a_record_declares_its_role() -> None:
  """A new field of type str fails here: take one of the types of podrace.fields, or a Literal."""
  seen: set[Any] = set()
  sizes = [importlib.import_module(module).Sizes for module in RULES.values()]
  for cls in (Config, Discovery, Varied, *sizes, *map(agent_class, AGENTS)):
    assert list(undeclared(cls, seen)) == []
  assert {Buffer, Transformer} < seen, 'parts of parts'

  fields = [('names', tuple[tuple[str, int], ...]), ('other', str | None), ('kind', Literal['a'])]
  assert list(undeclared(dataclasses.make_dataclass('New', fields), set())) == [
    'New.names', 'New.other',
  ]  # fmt: skip


def test_a_text_of_somebodys_own_class_may_name_code() -> None:
  record = trained(default_agent('impala'))
  record['agent'] = {
    'name': 'mine:Agent',
    'teacher': 'other:Teacher',
    'levels': [{'env': NAMES[0]}],
    'note': 'a: b',
  }
  assert set(user_code.named_modules(record)) == {'mine', 'other', 'stranger'}
  assert set(user_code.refused_modules(record, ['mine', 'other'])) == {'stranger'}
  assert user_code.of_env('gymnasium:Old-v0,env_id=other:Env-v0,size=3') == ['other']
  assert user_code.options(['a b;c']) == "--allow-code 'a b;c'"
