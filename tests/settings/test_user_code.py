"""A run directory that came from somebody else runs nothing of its own, and writes nowhere else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import environment

from podrace.errors import UsageError
from podrace.run import loop, metrics
from podrace.run.directory import load_config
from podrace.run.evaluate import evaluate
from podrace.settings import user_code
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.record import complete, from_json, to_json
from podrace.system.child import python
from podrace.system.files import write_json
from podrace.system.locks import lock

PROGRAM = Path(sys.executable).parent / 'podrace'
FLAG = 'import pathlib; pathlib.Path(__file__).with_suffix(".ran").touch()\n'
AGENT = (
  'import dataclasses\nfrom podrace.agents.impala import Impala\n'
  '@dataclasses.dataclass(frozen=True)\nclass Agent(Impala):\n  pass\n'
)


def podrace(folder: Path, *args: str, module: bool = False) -> subprocess.CompletedProcess[str]:
  """The command, in a directory, which is not on PYTHONPATH."""
  begin = [sys.executable, '-m', 'podrace.cli'] if module else [str(PROGRAM)]
  return subprocess.run(
    [*begin, *args], cwd=folder, env=environment(), capture_output=True, text=True, check=False
  )


def record(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
  found = json.loads(json.dumps(to_json(PRESETS['catch']())))
  change(found)
  return found


def as_env(name: str, **others: Any) -> Callable[[dict[str, Any]], None]:
  return lambda x: x.update(env=name, **others)


NAMES: dict[str, Callable[[dict[str, Any]], None]] = {
  'agent': lambda x: x['agent'].update(name='mine:Agent'),
  'network': lambda x: x['agent']['network'].update({'class': 'mine:Network'}),
  'elsewhere': lambda x: x.update(run={'of': {'class': 'mine:Network'}}),
  'python': as_env('python:mine.make,size=3'),
  'gymnasium': as_env('gymnasium:mine:Env-v0', architecture='sebulba'),
  'within': as_env('python:mine.envs.make'),
}


@pytest.mark.parametrize(
  'name', [n if n == 'agent' else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_code_of_its_own_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
  """By the command, in the directory that the code is in, as both commands that read a run."""
  (tmp_path / 'mine.py').write_text(FLAG + AGENT)
  (tmp_path / 'config.json').write_text(json.dumps(record(NAMES[name])))
  for args in (['eval', '.'], ['train', '--run-dir', '.']):
    done = podrace(tmp_path, *args)
    assert done.returncode == 2, done.stderr
    assert '--allow-code mine' in done.stderr and 'Traceback' not in done.stderr
  assert not (tmp_path / 'mine.ran').exists()


def test_functions_of_installed_modules_are_refused_as_well() -> None:
  """`python:` calls any function with any options."""
  for name in ('python:os.system,command=true', 'python:podrace.run.sinks.check_sinks,names=a'):
    assert user_code.refused_modules(record(as_env(name)), ['mine'])
  assert not user_code.refused_modules(record(as_env('gymnasium:CartPole-v1')), [])
  for preset in PRESETS.values():
    assert not user_code.refused_modules(to_json(preset()), [])


@pytest.mark.parametrize(
  'value', ['mine:f', "('mine:f', 1)", "['gymnasium:mine:Env-v0']", "{'f': (0, 'mine:f')}"]
)
def test_texts_within_options_name_modules(value: str) -> None:
  assert user_code.of_env(f'gymnasium:CartPole-v1,wrappers={value}') == ['mine']


def test_a_module_allows_what_is_within_it() -> None:
  found = record(as_env('python:mine.envs.make'))
  assert user_code.named_modules(found) == {'mine.envs': 'env python:mine.envs.make'}
  for allowed in ('mine', 'mine.envs'):
    assert not user_code.refused_modules(found, [allowed])
  for other in ('min', 'mine.env', 'mine.envs.make', 'podrace'):
    assert user_code.refused_modules(found, [other])


@pytest.mark.slow
def test_a_library_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
  """Nor by the processes of its environments, nor by `python -m`."""
  for name in ('jax', 'numpy', 'gymnasium', 'flax', 'orbax', 'tyro', 'rich'):
    (tmp_path / f'{name}.py').write_text(FLAG)
  flags = ['--total-steps', '64', '--num-envs', '4', '--unroll-length', '4', '--devices', '1']
  host = ['--env', 'gymnasium:CartPole-v1', '--architecture', 'sebulba']
  for args in (
    ['train', *flags, *host, '--run-dir', 'run'],
    ['eval', 'run', '--episodes', '2', '--sample'],
  ):
    done = podrace(tmp_path, *args, module=True)
    assert done.returncode == 0, done.stderr
  (tmp_path / 'json.py').write_text(FLAG)  # which `python -m` itself would have imported
  for args in (['train', '--run-dir', 'run'], ['eval', 'run', '--episodes', '2']):
    done = podrace(tmp_path, *args)
    assert done.returncode == 0, done.stderr
  assert not list(tmp_path.glob('*.ran'))


@pytest.mark.slow
def test_trials_of_a_sweep_import_nothing_from_the_working_directory(tmp_path: Path) -> None:
  for name in ('podrace', 'jax', 'json', 'tyro', 'sitecustomize'):
    (tmp_path / f'{name}.py').write_text(FLAG)
  small = ['--total-steps', '64', '--num-envs', '4', '--unroll-length', '4', '--devices', '1']
  words = [
    'sweep', 'catch', *small, '--vary', 'agent.discount=0.9', '--processes', '--dir', 'sweep',
  ]  # fmt: skip
  done = podrace(tmp_path, *words)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'sweep' / '0000' / 'summary.json').exists()
  assert not list(tmp_path.glob('*.ran'))


def test_an_empty_entry_of_pythonpath_does_not_reach_children(tmp_path: Path) -> None:
  """Python itself reads it before podrace does; `late` is imported by a child, and by this process afterwards."""
  (tmp_path / 'here').mkdir()
  (tmp_path / 'here' / 'late.py').write_text(FLAG)
  code = (
    'import importlib.util, os, subprocess; from podrace.settings import user_code; from podrace.system.child import python\n'
    'assert importlib.util.find_spec("late"); user_code.leave_here()\n'
    'find = "import importlib.util; print(importlib.util.find_spec(\'late\'))"; exec(find)\n'
    'subprocess.run(python("-c", find), check=True)\n'
    'print(os.environ["PYTHONPATH"])'
  )
  path = os.pathsep.join(['', str(tmp_path), ''])
  done = subprocess.run(
    python('-c', code), cwd=tmp_path / 'here', env=environment(PYTHONPATH=path), capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.stdout.split() == ['None', 'None', str(tmp_path)], done.stderr


def test_one_function_makes_the_command_line_of_each_child() -> None:
  """It has -P; no other code of the package names the interpreter."""
  assert python('-m', 'x') == (sys.executable, '-P', '-m', 'x')
  package = Path(user_code.__file__).parents[1]
  for file in package.rglob('*.py'):
    text = file.read_text()
    if 'executable' not in text and 'multiprocessing' not in text:
      continue  # parsing the package takes a second
    nodes = list(ast.walk(ast.parse(text)))
    named = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr.endswith('executable')]
    named += [
      n for n in nodes if isinstance(n, ast.alias) and n.name in ('executable', 'multiprocessing')
    ]
    assert len(named) == (file == package / 'system' / 'child.py'), file


@pytest.mark.slow
def test_what_the_user_names_is_allowed_and_installed_libraries_come_first(tmp_path: Path) -> None:
  (tmp_path / 'mine.py').write_text(AGENT)
  (tmp_path / 'jax.py').write_text(FLAG)
  train = ['train', '--run-dir', 'run']
  done = podrace(tmp_path, *train, '--agent', 'mine:Agent', '--total-steps', '64')
  assert done.returncode == 0, done.stderr
  assert 'next: podrace eval run --episodes 100 --allow-code mine' in done.stdout
  for args in (
    [*train, '--agent', 'mine:Agent'],
    [*train, '--allow-code', 'mine'],
    ['eval', 'run', '--episodes', '2', '--allow-code', 'mine'],
  ):
    done = podrace(tmp_path, *args)
    assert done.returncode == 0, done.stderr
  assert not (tmp_path / 'jax.ran').exists()


def test_a_record_is_compared_without_importing_what_it_names(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """A preset that is trained in somebody's directory: what is different there is only shown."""
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / 'mine_too.py').write_text(FLAG + AGENT)
  old = record(lambda x: x['agent'].update(name='mine_too:Agent'))
  (tmp_path / 'config.json').write_text(json.dumps(old))
  with pytest.raises(UsageError, match=r'agent\.name.*"mine_too:Agent".*"impala"'):
    loop.train(PRESETS['catch'](), tmp_path, quiet=True)
  with pytest.raises(UsageError, match='--allow-code mine_too'):
    evaluate(tmp_path, 1)
  with pytest.raises(UsageError, match='--allow-code mine_too'):
    load_config(tmp_path, ['mine'])
  assert complete(old) == old and not (tmp_path / 'mine_too.ran').exists()
  assert load_config(tmp_path, ['mine_too']) == from_json(old)
  assert (tmp_path / 'mine_too.ran').exists()


# --- symbolic links -------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
  (tmp_path / 'outside').write_text('mine')
  (tmp_path / 'run').mkdir()
  return tmp_path / 'outside'


def test_the_lock_is_no_link(outside: Path, tmp_path: Path) -> None:
  (tmp_path / 'run' / 'lock').symlink_to(outside)
  with pytest.raises(OSError, match='lock'):
    lock(tmp_path / 'run')
  with pytest.raises(UsageError, match='lock'):
    loop.train(PRESETS['catch'](), tmp_path / 'run', quiet=True)
  assert outside.read_text() == 'mine'


@pytest.mark.parametrize('name', ['config.json.new', 'summary.json.new', 'name.json.new'])
def test_drafts_replace_links(name: str, outside: Path, tmp_path: Path) -> None:
  draft = tmp_path / 'run' / name
  draft.symlink_to(outside)
  write_json(draft.with_suffix(''), {'a': 1})
  assert json.loads(draft.with_suffix('').read_text()) == {'a': 1}
  assert outside.read_text() == 'mine' and not os.path.lexists(draft)


@pytest.mark.parametrize('name', ['metrics.jsonl.new', 'metrics.jsonl'])
def test_metrics_replace_links(name: str, tmp_path: Path) -> None:
  line = '{"step": 3}\n'
  (tmp_path / 'outside').write_text(line)
  (tmp_path / name).symlink_to(tmp_path / 'outside')
  lines = metrics.JsonLines(tmp_path / 'metrics.jsonl', 10)
  lines.write({'step': 4})
  lines.close()
  assert (tmp_path / 'outside').read_text() == line
  assert not (tmp_path / 'metrics.jsonl').is_symlink()


@pytest.mark.parametrize('name', ['checkpoints', 'replay', 'tensorboard', 'damaged'])
def test_folders_that_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
  elsewhere = tmp_path / 'elsewhere'
  (elsewhere / '100').mkdir(parents=True)
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / name).symlink_to(elsewhere)
  with pytest.raises(UsageError, match=f'{name} there is a symbolic link'):
    loop.train(PRESETS['catch'](), tmp_path / 'run', quiet=True)
  assert [p.name for p in elsewhere.iterdir()] == ['100']


@pytest.mark.slow
def test_the_run_directory_may_be_a_link(tmp_path: Path) -> None:
  (tmp_path / 'run').mkdir()
  (tmp_path / 'name').symlink_to(tmp_path / 'run')
  config = Config(agent=PRESETS['catch']().agent, num_envs=8, unroll_length=4, total_steps=32)
  assert loop.train(config, tmp_path / 'name', quiet=True)['step'] == 32


@pytest.mark.slow
def test_an_agent_from_another_module_of_the_user_goes_on(tmp_path: Path) -> None:
  """`mine` has it from `other`, which the record names."""
  (tmp_path / 'other.py').write_text(AGENT)
  (tmp_path / 'mine.py').write_text('from other import Agent\n')
  words = [
    'train',
    '--agent',
    'mine:Agent',
    '--run-dir',
    'run',
    '--agent.network.hidden',
    '4',
    '--devices',
    '1',
  ]
  for steps in ('1000', '2000'):
    done = podrace(tmp_path, *words, '--total-steps', steps)
    assert done.returncode == 0, done.stderr
  done = podrace(tmp_path, 'train', '--run-dir', 'run')
  assert done.returncode == 2 and '--allow-code other' in done.stderr
