"""Files to start from, and a shell's completion."""

from __future__ import annotations

import errno
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import environment
from shorthand import Capture
from test_runs import called

from podrace import cli
from podrace.agents import AGENTS
from podrace.cli import COMMANDS
from podrace.commands import completion
from podrace.commands.init import class_and_file
from podrace.envs.libraries import LIBRARIES
from podrace.settings.presets import PRESETS


@pytest.mark.parametrize(
  'kind',
  [
    'agent',
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('env', 'network', 'cenv')),
  ],
)
def test_what_it_writes_trains(
  kind: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  folder = tmp_path / 'a folder'
  folder.mkdir()
  code, out, _ = called(capsys, 'init', kind, 'MyOwn', '--dir', str(folder))
  file = 'my_own.c' if kind == 'cenv' else 'my_own.py'
  assert code == 0 and sorted(p.name for p in folder.iterdir()) == [file, 'test_my_own.py']
  text = ''.join(p.read_text() for p in folder.iterdir())
  assert not {'NAME', 'FILE', 'HEADER'} & set(re.findall('[A-Z]+', text))
  (train,) = [x.removeprefix('train: ') for x in out.splitlines() if x.startswith('train: ')]
  words = shlex.split(train)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.chdir(tmp_path)
  if words[0] == 'cd':
    monkeypatch.chdir(words[1])
  args = words[words.index('podrace') + 1 :]
  sizes = ['--num-envs', '8', '--total-steps', '1024', '--devices', '1']
  code, _, err = called(capsys, *args, *sizes, '--run-dir', 'run')
  sys.modules.pop('my_own', None)
  assert code == 0, err


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['agent', 'env', 'network', 'cenv'])
def test_what_it_writes_passes_its_own_test(kind: str, tmp_path: Path, capsys: Capture) -> None:
  assert called(capsys, 'init', kind, 'MyOwn', '--dir', str(tmp_path))[0] == 0
  done = subprocess.run(
    [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'test_my_own.py'],
    cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout


def test_printed_commands_work_where_init_is_called(
  tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(tmp_path)
  for folder, enter in (('.', []), ('with blank', ['cd', 'with blank', '&&'])):
    Path(folder).mkdir(exist_ok=True)
    _, out, _ = called(capsys, 'init', 'env', 'MyOwn', '--dir', folder)
    commands = [shlex.split(x.partition(':')[2]) for x in out.splitlines()[-2:]]
    assert commands == [
      [*enter, 'podrace', 'train', '--env', 'python:my_own.make'],
      [*enter, 'python', '-m', 'pytest', 'test_my_own.py'],
    ]


def test_nothing_is_overwritten_or_hidden(tmp_path: Path, capsys: Capture) -> None:
  (tmp_path / 'test_mine.py').write_text('mine')
  for args, message in (
    (('agent', 'Mine'), 'exists already'),
    (('agent', 'Random'), 'there is a module random already'),
    (('agent', '3d'), 'is no name for a class'),
    (('agent', 'class'), 'is no name for a class'),
    (('agent', 'Lambda'), 'is no name for a class'),  # its test would import a module lambda
    (('agents', 'X'), 'init takes agent, env, network or cenv'),
    (('agent',), 'init takes agent, env, network or cenv'),
  ):
    code, _, err = called(capsys, 'init', *args, '--dir', str(tmp_path))
    assert code == 2 and message in err, err
  assert [p.name for p in tmp_path.iterdir()] == ['test_mine.py']
  assert called(capsys, 'init', 'agent', 'X', '--dir', str(tmp_path / 'no'))[0] == 2


@pytest.mark.parametrize(
  ('given', 'name', 'file'),
  [('MyAgent', 'MyAgent', 'my_agent'), ('my_agent', 'MyAgent', 'my_agent'), ('A2C', 'A2C', 'a2_c'), ('DQNPlus', 'DQNPlus', 'dqn_plus')],
)  # fmt: skip
def test_names(given: str, name: str, file: str) -> None:
  assert class_and_file(given) == (name, file)


def test_words_that_complete() -> None:
  words = functools.partial(completion.words, commands=COMMANDS)
  assert words(['']) == list(COMMANDS) and words(['ev']) == ['eval']
  assert words(['train', '']) == list(PRESETS) and words(['train', 'cart']) == ['cartpole']
  assert words(['train', 'cartpole', '--agent', '']) == list(AGENTS)
  assert words(['train', 'cartpole', '--agent.cl']) == ['--agent.clip', '--agent.clip-value']
  assert words(['train', '--agent', 'dqn', '--agent.buffer.cap']) == ['--agent.buffer.capacity']
  assert words(['sweep', 'cart']) == ['cartpole'] == words(['launch', 'cart'])
  assert words(['bench', '']) == ['sebulba'] and words(['bench', 'sebulba', 'cart']) == ['cartpole']
  assert words(['bench', 'sebulba', 'cartpole', '--agent.cl'])[0] == '--agent.clip'
  assert words(['record', 'cart']) == ['cartpole']
  assert words(['sweep', 'cartpole', '--v']) == ['--vary'] and words(['sweep', '--run']) == []
  assert words(['sweep', 'cartpole', '--agent.cl']) == ['--agent.clip', '--agent.clip-value']
  assert words(['init', '']) == ['agent', 'env', 'network', 'cenv'] and words(
    ['completion', 'z']
  ) == ['zsh']
  assert words(['init', 'agent', '']) == []
  assert words(['reproduce', 'min']) == ['minatar', 'minatar-gpu', 'minatar-gymnax']
  assert words(['eval', '--ep']) == ['--episodes'] and words(['eval', 'runs/']) == []


def test_values_that_complete() -> None:
  words = functools.partial(completion.words, commands=COMMANDS)
  assert words(['train', '--architecture', 's']) == ['sebulba']
  assert words(['train', '--architecture=s']) == ['--architecture=sebulba']
  assert words(['sweep', '--method', 't']) == ['tpe'] and words(['plot', 'a', '--x', 'w']) == [
    'wall'
  ]
  assert words(['plot', '--center', 'm']) == ['mean', 'median']
  assert words(['plot', '--normalize', '']) == ['human', 'minmax']
  assert words(['runs', '--state', 'f']) == ['finished', 'failed']
  assert words(['train', 'cartpole', '--agent', 's']) == ['sac']
  assert words(['train', '--env', 'gymnax:Cart']) == ['gymnax:CartPole-v1']
  assert words(['train', '--env', 'podrace:m']) == ['podrace:maze', 'podrace:memory']
  assert words(['sweep', '--env', 'gymnasium']) == ['gymnasium:']
  assert words(['envs', '--env', '']) == ['ale:', 'envpool:', 'gymnasium:', 'c:']
  assert words(['train', '--agent.optimizer', '']) == ['adam', 'rmsprop', 'sgd']  # of all agents
  assert words(['train', '--agent', 'impala', '--agent.optimizer', '']) == ['adam', 'rmsprop']
  assert words(['train', 'catch', '--agent.network.core', 'g']) == ['gru']
  assert words(['train', 'r2d2-memory', '--agent.network.core', 'l']) == ['lstm']
  assert words(['train', 'catch', '--eval-v']) == ['--eval-video']
  assert words(['train', '--total-steps', '']) == [] and words(['train', '--lag', 'a']) == ['async']
  assert words(['eval', 'run', '--episodes', '']) == [] == words(['plot', '--out', 'x'])


@pytest.mark.skipif(shutil.which('bash') is None, reason='there is no bash')
def test_bash_completes(tmp_path: Path, capsys: Capture) -> None:
  _, script, _ = called(capsys, 'completion', 'bash')
  (tmp_path / 'podrace').write_text(f'#!/bin/sh\nexec {sys.executable} -m podrace "$@"\n')
  (tmp_path / 'podrace').chmod(0o755)
  asked = {  # as bash splits them -> what it is to write in the place of the last part
    'train cart': 'cartpole',
    'train --env gymnax : Cart': 'CartPole-v1',
    'train --env jumanji :': ' '.join(LIBRARIES['jumanji'].names),
    'train --architecture = s': 'sebulba',
    'plot --x w': 'wall',
    'eval nothing-here': '',
  }
  typed = script + ''.join(
    f'COMP_WORDS=(podrace {x}); COMP_CWORD={len(x.split())}; _podrace; echo "${{COMPREPLY[*]}}"\n'
    for x in asked
  )
  env = environment()
  env['PATH'] = f'{tmp_path}:{env["PATH"]}'
  done = subprocess.run(['bash', '-c', typed], env=env, capture_output=True, text=True, check=True)
  assert done.stdout.splitlines() == list(asked.values())
  for shell in ('zsh', 'fish'):
    assert 'podrace completion words' in called(capsys, 'completion', shell)[1]
  assert called(capsys, 'completion', 'tcsh')[0] == 2


def test_a_full_disk_leaves_neither_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
  calls = 0

  def fill(descriptor: int) -> None:
    nonlocal calls
    calls += 1
    if calls == 3:  # of the second file, after those of the first one and of the directory
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, 'fsync', fill)
  with pytest.raises(SystemExit) as end:
    cli.main(['init', 'env', 'Mine', '--dir', str(tmp_path)])
  assert end.value.code == 1 and 'test_mine.py' in capsys.readouterr().err
  assert not list(tmp_path.iterdir())
