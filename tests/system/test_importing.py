"""What is said of a file of the user's that can't be imported, or has no such name, and of its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from podrace.commands.configure import parse, requested_agent
from podrace.commands.train import COMMAND
from podrace.envs import make
from podrace.envs.host.base import make as make_on_host
from podrace.errors import UnknownName, UsageError
from podrace.settings.agents import agent_class, bind
from podrace.settings.config import Config
from podrace.system import importing
from podrace.system.options import Options

BROKEN = {
  'broken_import': ('import jax\nfrom podrace.agents import sgd\n', 2, ImportError),
  'broken_module': ('from podrace.learners import sgd\n', 1, ModuleNotFoundError),
  'broken_syntax': ('x = 1\ndef f(self)\n  pass\n', 2, SyntaxError),
  'broken_script': ('import sys\nsys.exit(0)\n', 2, SystemExit),
  'broken_name': ('class C:\n  x = np.zeros(3)\n', 2, NameError),
  'broken_fields': (
    'import dataclasses\n@dataclasses.dataclass\nclass C:\n  a: int = 1\n  b: int\n', 2, TypeError
  ),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """A working directory of its own, in which modules are found."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  return tmp_path


@pytest.mark.parametrize('module', BROKEN)
def test_errors_in_the_users_file_name_its_line(module: str, here: Path) -> None:
  text, line, error = BROKEN[module]
  (here / f'{module}.py').write_text(text)
  for name, load in (
    (f'{module}:Mine', agent_class),
    (f'python:{module}.f', make),
    (f'gymnasium:{module}:X-v0', make_on_host),
  ):
    with pytest.raises((UsageError, UnknownName)) as told:
      load(name)
    said = str(told.value)
    assert name in said and f'{module}.py:{line}: {error.__name__}: ' in said
    assert 'Traceback' not in said and 'importlib' not in said


def test_errors_in_what_the_users_function_does(here: Path) -> None:
  (here / 'makes_env.py').write_text('def f():\n  return 1 / 0\n')
  with pytest.raises(UnknownName, match=r'makes_env.py:2: ZeroDivisionError'):
    make('python:makes_env.f')


def test_a_class_in_the_place_of_an_environment(here: Path) -> None:
  (here / 'gives_class.py').write_text('class Env: pass\ndef f():\n  return Env\n')
  with pytest.raises(UnknownName, match=r'python:gives_class.f .* Env\('):
    make('python:gives_class.f')


def test_names_that_are_not_there(here: Path) -> None:
  (here / 'named_pg.py').write_text('class PG: pass\n')
  (here / 'colorsys.py').write_text('class PG: pass\n')
  for name, message in (
    ('named_pg:Pg', ' PG?'),
    ('named_pgg:PG', str(here)),
    ('named_pg.py:PG', ' named_pg:PG'),
    ('named_pg.PG', ' named_pg:PG'),
  ):
    with pytest.raises(UsageError) as told:
      agent_class(name)
    assert message in str(told.value)
  with pytest.raises(UsageError, match=' named_pg:PG'):
    requested_agent(Options(['--agent', 'named_pg.PG'], COMMAND))


def test_a_file_shadowed_by_pythons_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """The working directory is searched last, and so Python's own module is found."""
  (here / 'json.py').write_text('class PG: pass\n')
  with pytest.raises(UsageError, match=r"'json' .*__init__.py"):
    importing.import_attribute('no agent', 'json', 'PG')


MINE = """
import dataclasses
from podrace.agents.impala import Impala
from podrace.networks import ActorCritic

class Bindable:
  def bind(self, observation_space, action_space):
    return self

@dataclasses.dataclass(frozen=True)
class Mine(Impala):
  boldness = 3e-3

@dataclasses.dataclass(frozen=True)
class NoType(Impala):
  net = Bindable()
"""


def test_settings_without_a_type_are_told(here: Path) -> None:
  (here / 'untyped_agent.py').write_text(MINE)
  mine = Config(agent_class('untyped_agent:Mine')())
  for option, message in (
    ('--agent.boldness', '`boldness: float = 0.003`'),
    ('--agent.learning_rat', ' --agent.learning-rate'),
    ('--agent.network.hiden', ' --agent.network.hidden'),
  ):
    with pytest.raises(UsageError) as told:
      parse(mine, [option, '1'])
    assert message in str(told.value)
  with pytest.raises(UsageError, match='`net: '):
    bind(agent_class('untyped_agent:NoType')(), None)
