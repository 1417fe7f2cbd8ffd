"""Tasks for SkyPilot: what each machine runs, in bash with programs that are none of podrace, and one run in full."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_docs
import yaml
from children import DEADLINE, ROOT, alive, until
from test_kubernetes import CASES

from podrace.commands import launch
from podrace.errors import UsageError
from podrace.launch.engines import manifests, skypilot
from podrace.launch.engines.skypilot import Cloud
from podrace.launch.program import Backoff, Node, Program

ON = ('--on', 'skypilot', '--image', 'me/podrace:1', '--run-dir', 'runs/one', '--machines', '3')
CLOUD = Cloud('one', Path('runs/one'), 2, setup='true')


def task(capsys: pytest.CaptureFixture[str], preset: str, *arguments: str) -> dict[str, Any]:
  assert launch.run([preset, *ON, *arguments, '--dry-run']) == 0
  found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
  return found


def commands(script: str, machine: int) -> list[list[str]]:
  """What a machine keeps running, its head being 10.0.0.1."""
  (case,) = (x for x in script.split(';;') if f'\n{machine})\n' in x)
  lines = [x.strip() for x in case.split(f'\n{machine})\n')[1].splitlines()]
  found = [
    shlex.split(re.split(r' &| \|\|', x.replace('$head', '10.0.0.1'))[0]) for x in lines if x
  ]
  return [words[words.index('podrace') :] for words in found]


@pytest.fixture(autouse=True)
def no_sky(monkeypatch: pytest.MonkeyPatch) -> None:
  """No test may rent a machine."""
  monkeypatch.setenv('PATH', '/usr/bin:/bin')


@pytest.mark.parametrize('arrangement', CASES)
def test_podrace_accepts_the_commands_of_machines(
  arrangement: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  script = task(capsys, *CASES[arrangement], '--as', arrangement)['run']
  test_docs.stub(monkeypatch)
  kept = [commands(script, machine) for machine in range(3)]
  assert [words[1] for words in kept[0]] in (['train'], ['replay', 'train'], ['replay'] * 2 + ['train'])  # fmt: skip
  assert kept[1] and kept[2] and len(kept[1]) == len(kept[2])
  assert all('--give-up-after' in words for words in kept[1] + kept[2])
  listening, used = set(), set()
  for words in (x for machine in kept for x in machine):
    test_docs.read(words[1:])
    if '--listen' in words:
      listening.add(words[words.index('--listen') + 1].replace('*', '10.0.0.1'))
    for name in ('--connect', '--connect-replay', '--params'):
      if name in words:
        used |= set(words[words.index(name) + 1].split(','))
  assert used == listening
  assert len(listening) == len(kept[0])  # each at a port of its own
  kept_lines = [x for x in script.splitlines() if x.startswith('  keep ')]
  (learner,) = (x for x in kept_lines if ' train ' in x)
  assert [x for x in kept_lines if ' JAX_PLATFORMS=cpu ' not in x] == [learner]


@pytest.mark.parametrize(('lives', 'tries'), [('0 0 0 0', 2), ('0 40 40 0 0', 4)])
def test_a_command_that_fails_is_started_again(
  lives: str, tries: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  """Up to a number of times in a row; a life of 30 s makes the count begin anew."""
  script = task(capsys, 'catch', '--as', 'impala', '--machines', '1')['run']
  keep = script[script.index('keep()') : script.index("trap 'kill")].replace('10', '2')
  count = tmp_path / 'tries'
  fails = f'fails() {{ echo >> {count}; return 1; }}\n'
  # The clock of bash moves on by the life that a command has had.
  clock = f'sleep() {{ :; }}\nlives=({lives})\nwait() {{ builtin wait "$@"; local c=$?; ((SECONDS += ${{lives[$(wc -l < {count}) - 1]:-0}})); return $c; }}\n'
  done = subprocess.run(['bash', '-c', f'{fails}{clock}{keep}keep fails'], check=False, timeout=60)
  assert done.returncode == 1
  assert len(count.read_text().splitlines()) == tries


def test_what_is_asked_of_machines(capsys: pytest.CaptureFixture[str]) -> None:
  resources = ('accelerators=L4:1', 'cpus=8+', 'use_spot=true', 'disk_size=100')
  options = [x for one in resources for x in ('--resources', one)]
  found = task(capsys, 'catch', '--as', 'impala', *options)
  assert found['num_nodes'] == 3
  assert found['resources'] == {
    'accelerators': 'L4:1', 'cpus': '8+', 'use_spot': True, 'disk_size': 100, 'image_id': 'docker:me/podrace:1',
  }  # fmt: skip
  assert found['file_mounts'] == {'~/.podrace/one/keys': 'KEYS'}


def test_all_is_on_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
  script = task(capsys, 'catch', '--as', 'impala', '--machines', '1')['run']
  assert [x[1] for x in commands(script, 0)] == ['replay', 'train', 'act', 'act']


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    (('--machines', '0'), '--machines'),
    (('--setup', 'true'), '--setup COMMAND'),
    (('--resources', 'accelerator=L4'), 'accelerators'),
    (('--resources', 'cpus='), "''"),
    (('--resources', 'cpus=[1'), "'[1'"),
    (('--volume', 'disk'), '--volume'),
    ((), 'sky'),
  ],
)
def test_bad_usage_of_skypilot(arguments: tuple[str, ...], said: str) -> None:
  with pytest.raises(UsageError) as e:
    launch.run(['catch', '--as', 'impala', *ON, *arguments])
  assert said in str(e.value)


def test_a_node_that_chooses_its_address() -> None:
  node = Node('learner', ('train', '{announce}'), listens=('params',), main=True)
  with pytest.raises(UsageError, match='--on skypilot'):
    skypilot.task(Program((node,)), CLOUD, 'KEYS')


SKY = """#!/bin/sh
printf '%s\\n' "$@" > {made}/arguments
for last; do :; done
cp "$last" {made}/task.yaml
cp -r $(grep /keys: "$last" | cut -d: -f2) {made}/keys
exit {code}
"""


@pytest.mark.parametrize('code', [0, 3])
def test_what_sky_is_given(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  sky = tmp_path / 'sky'
  sky.write_text(SKY.format(made=tmp_path, code=code))
  sky.chmod(0o700)
  monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
  assert launch.run(['catch', '--as', 'impala', *ON]) == (1 if code else 0)
  words = (tmp_path / 'arguments').read_text().split()
  assert words[:4] == ['launch', '--cluster', 'one', '--detach-run']
  assert not Path(words[4]).exists()
  text = (tmp_path / 'task.yaml').read_text()
  assert not Path(yaml.safe_load(text)['file_mounts']['~/.podrace/one/keys']).exists()
  files = {p.name: p.read_text() for p in (tmp_path / 'keys').iterdir()}
  assert set(files) == {*manifests.SERVER_FILES, *manifests.keys.CLIENT_FILES}
  assert all(x not in text for x in files['server.key'].splitlines())


# --- the script, in bash ----------------------------------------------------------------------------


class Machines:
  """Runs a task's script as SkyPilot does on each machine, all of which are this one."""

  def __init__(self, home: Path, path: str = '') -> None:
    self.home, self.path = home, path
    self.shells: list[subprocess.Popen[str]] = []
    (home / '.podrace' / 'one').mkdir(parents=True)

  def start(self, run: str, machines: int = 1) -> None:
    keys = self.home / '.podrace' / 'one' / 'keys'
    manifests.keys.new_keys(keys)
    for file in keys.iterdir():
      file.chmod(0o644)  # SkyPilot may lose modes
    for rank in range(machines):
      environ = {
        **os.environ, 'HOME': str(self.home), 'SKYPILOT_NODE_RANK': str(rank), 'PYTHONPATH': str(ROOT),
        'SKYPILOT_NODE_IPS': '\n'.join(['127.0.0.1'] * machines), 'PATH': f'{self.path}:/usr/bin:/bin',
      }  # fmt: skip
      file = self.home / f'run-{rank}.sh'
      file.write_text(run)
      output, errors = (self.home / f'{name}-{rank}' for name in ('said', 'errors'))
      with output.open('w') as out, errors.open('w') as err:
        self.shells.append(subprocess.Popen(
          ['bash', '-i', str(file)], env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
          start_new_session=True, text=True,
        ))  # fmt: skip

  def wait(self) -> list[int]:
    return [shell.wait(DEADLINE) for shell in self.shells]

  def said(self, rank: int = 0, where: str = 'said') -> str:
    return (self.home / f'{where}-{rank}').read_text()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
  (tmp_path / 'bin').mkdir()
  podrace = tmp_path / 'bin' / 'podrace'
  podrace.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m podrace "$@"\n')
  podrace.chmod(0o700)
  found = Machines(tmp_path, str(podrace.parent))
  yield found
  for shell in found.shells:
    if shell.poll() is None:
      os.killpg(shell.pid, signal.SIGKILL)
      shell.wait()


def node(name: str, command: str, **more: Any) -> Node:
  return Node(name, ('sh', '-c', command), **more)


def script(*nodes: Node) -> str:
  return skypilot.script(Program(nodes), Cloud('one', Path('runs/one'), 1, setup='true'))


def forever(at_term: str) -> str:
  """Says so, to those as well that read the pipes which are its arguments."""
  code = (
    f'import signal, sys; signal.signal(signal.SIGTERM, {at_term}); print("waits")\n'
    'for path in sys.argv[1:]: open(path, "w").close()\nwhile True: signal.pause()'
  )
  return f'exec {sys.executable} -uc {shlex.quote(code)}'


FOR_EVER = forever('lambda *_: (print("asked"), sys.exit())')
TOLD = 'read _ < ~/pipe'  # returns when FOR_EVER has said so


@pytest.mark.parametrize('code', [0, 2])
def test_the_end_of_the_main_node_ends_the_others(machines: Machines, code: int) -> None:
  os.mkfifo(machines.home / 'pipe')
  main = node('y', f'{TOLD}; exit {code}', main=True)
  machines.start(script(node('x', f'{FOR_EVER} ~/pipe'), main))
  assert machines.wait() == [code]
  assert machines.said().split() == ['waits', 'asked']


def test_a_process_that_fails_starts_again(machines: Machines) -> None:
  once = 'if mkdir ~/once; then kill -9 $$; fi; echo again'
  machines.start(script(node('x', once, main=True)))
  assert machines.wait() == [0]
  assert machines.said().split().count('again') == 1


def test_a_process_that_fails_for_good_ends_all(machines: Machines) -> None:
  os.mkfifo(machines.home / 'pipe')
  main = node('y', f'{FOR_EVER} ~/pipe', main=True)
  machines.start(script(node('x', f'{TOLD}; exit 2'), main))
  assert machines.wait() == [1]
  assert machines.said().split() == ['waits', 'asked']


def test_a_task_that_is_cancelled_lets_processes_save(machines: Machines) -> None:
  machines.start(script(node('x', FOR_EVER, main=True)))
  until(lambda: 'waits' in machines.said())
  machines.shells[0].terminate()
  assert machines.wait() == [143]
  assert machines.said().split() == ['waits', 'asked']


def test_a_deaf_process_is_killed(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(skypilot, 'GRACE', 0.2)
  deaf = f'echo $$; {forever("signal.SIG_IGN")}'
  machines.start(script(node('x', deaf, main=True)))
  until(lambda: 'waits' in machines.said())
  machines.shells[0].terminate()
  assert machines.wait() == [143]
  assert not alive(int(machines.said().split()[0]))


def test_failures_have_an_end(machines: Machines) -> None:
  main = node('x', 'echo fails; exit 7', main=True, restart=Backoff(failures=2))
  machines.start(script(main))
  assert machines.wait() == [1]
  assert machines.said().split() == ['fails'] * 2


def test_odd_words_reach_a_process_as_they_are(machines: Machines) -> None:
  odd = ("it's", '$HOME', '', '*', '"', '{{x}}')
  words = Node('x', ('printf', '%s|', *odd, 'a b'), main=True)
  machines.start(script(words))
  assert machines.wait() == [0]
  assert machines.said() == 'it\'s|$HOME||*|"|{x}|a b|'


def test_keys_are_private_again(machines: Machines) -> None:
  machines.start(script(node('x', 'true', main=True)))
  assert machines.wait() == [0]
  keys = machines.home / '.podrace' / 'one' / 'keys'
  assert keys.stat().st_mode & 0o777 == 0o700
  assert {p.stat().st_mode & 0o777 for p in keys.iterdir()} == {0o600}


@pytest.mark.slow
def test_impala_on_two_machines(machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
  options = ('--total-steps', '2000', '--num-envs', '8', '--actors', '2', '--machines', '2')
  run = task(capsys, 'catch', '--as', 'impala', *options)['run']
  machines.start(run, 2)
  assert machines.wait() == [0, 0], machines.said(0) + machines.said(1)
  summary = machines.home / 'runs' / 'one' / 'summary.json'
  assert json.loads(summary.read_text())['step'] >= 2000
  assert machines.said(1, 'errors').count('complete') == 2
