"""A program as a job: tests/support/slurm.py stands in for SLURM, whose steps are real processes."""

from __future__ import annotations

import contextlib
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
from children import SUPPORT, Process, alive, environment, until
from test_local import SAVES, UNTIL, WAITS

from podrace.commands import launch as command
from podrace.distributed.net import announce, keys
from podrace.errors import UsageError
from podrace.launch.engines import slurm
from podrace.launch.program import Backoff, Node, Program, literal
from podrace.launch.supervisor.local import lock_logs

SAVES_AT_INT = SAVES.replace('SIGTERM', 'SIGINT').replace('143', '130')  # which srun passes on


class Cluster:
  """What the commands of SLURM were given, and the job."""

  def __init__(self, tmp_path: Path) -> None:
    self.directory, self.log = tmp_path / 'run', tmp_path / 'slurm.jsonl'

  def calls(self, name: str) -> list[list[str]]:
    lines = self.log.read_text().splitlines() if self.log.exists() else []
    return [words[1:] for words in map(json.loads, lines) if words[0] == name]

  @property
  def pid(self) -> int:
    return int(self.log.with_name('job.pid').read_text())

  @property
  def output(self) -> str:
    file = self.directory / 'logs' / 'slurm-7.txt'
    return file.read_text() if file.exists() else ''

  def submit(self, *nodes: Node) -> None:
    self.directory.mkdir()
    program = Program(nodes)
    (self.directory / 'logs').mkdir()
    slurm.prepare(program, self.directory)
    (self.directory / 'job.sbatch').write_text(slurm.job(program, self.directory, []))
    assert slurm.submit('sbatch', self.directory) == 0

  def says(self, text: str, times: int = 1) -> None:
    """Returns when the job has printed `text`, so often."""
    until(lambda: self.output.count(text) >= times or not alive(self.pid))
    assert self.output.count(text) >= times, self.output

  def ends(self) -> None:
    until(lambda: not alive(self.pid))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: Any) -> Iterator[Cluster]:
  """Commands of SLURM on PATH."""
  for name in ('sbatch', 'srun', 'scontrol'):
    words = shlex.join((sys.executable, str(SUPPORT / 'slurm.py'), name))
    (tmp_path / 'bin').mkdir(exist_ok=True)
    (tmp_path / 'bin' / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (tmp_path / 'bin' / name).chmod(0o700)
  monkeypatch.setenv('PATH', f'{tmp_path / "bin"}{os.pathsep}{os.environ["PATH"]}')
  monkeypatch.setenv('PYTHONPATH', environment()['PYTHONPATH'])
  found = Cluster(tmp_path)
  monkeypatch.setenv('SLURM_LOG', str(found.log))
  yield found
  if found.log.with_name('job.pid').exists() and alive(found.pid):
    os.kill(found.pid, signal.SIGTERM)
    found.ends()


def node(name: str, code: str, *arguments: str, **fields: Any) -> Node:
  words = (sys.executable, '-uc', literal(code), *arguments)
  return Node(name, words, restart=Backoff(first=0.0), **fields)


PID = 'import os; print("pid", os.getpid())\n'


def pids(cluster: Cluster, name: str) -> list[int]:
  return [int(x) for x in re.findall(rf'{name} +\| pid (\d+)', cluster.output)]


def test_a_job_ends_with_its_main_node(cluster: Cluster, capsys: Any) -> None:
  go = cluster.log.with_name('go')
  os.mkfifo(go)
  names = '("SLURM_JOB_ID", "SLURM_NTASKS")'
  tells = f'import os; print(*(os.environ[x] for x in {names}), flush=True)\n'
  main = node('main', tells + f'open({str(go)!r}).read()', main=True, cpus=2.5, gpus=1)
  cluster.submit(main, node('other', PID + SAVES_AT_INT, replicas=2))
  assert capsys.readouterr().out.startswith('job 7: ')
  cluster.says('up', 2)
  go.write_text('')
  cluster.ends()
  assert re.search(r'main +\| 7 1', cluster.output)
  assert cluster.output.count('saved') == 2
  assert not any(map(alive, pids(cluster, r'other-\d')))
  steps = {words[1]: words for words in cluster.calls('srun')}
  assert {'--cpus-per-task=3', '--gpus-per-task=1', '--exact'} < set(steps['--job-name=main'])
  assert {'--cpus-per-task=1', '--gres=none', '--nodes=1'} < set(steps['--job-name=other'])
  assert {p.name for p in (cluster.directory / 'logs').glob('*.log')} == {
    'main.log', 'other-0.log', 'other-1.log',
  }  # fmt: skip


def test_a_replica_that_is_killed_is_another_step(cluster: Cluster) -> None:
  cluster.submit(node('main', PID + WAITS, main=True), node('other', PID + WAITS))
  for name in ('main', 'other'):
    cluster.says('up', 2)
    (first,) = until(lambda n=name: pids(cluster, n))
    os.kill(first, signal.SIGKILL)
    until(lambda n=name: len(pids(cluster, n)) == 2)
  assert [x[1] for x in cluster.calls('srun')].count('--job-name=main') == 2
  assert cluster.output.count('ended with 137') == 2
  assert alive(pids(cluster, 'main')[-1])


@pytest.mark.parametrize(('signum', 'queued'), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_out_of_time_is_queued_again(cluster: Cluster, signum: int, queued: bool) -> None:
  cluster.submit(node('main', SAVES_AT_INT, main=True), node('other', SAVES_AT_INT))
  cluster.says('up', 2)
  os.kill(cluster.pid, signum)
  cluster.ends()
  assert cluster.output.count('saved') == 2
  assert cluster.calls('scontrol') == ([['requeue', '7']] if queued else [])


def test_a_job_that_is_complete_is_not_queued_again(cluster: Cluster) -> None:
  go = cluster.log.with_name('go')
  os.mkfifo(go)
  slow = (
    PID + 'import signal; signal.signal(2, lambda *_: print("saving")); print("up")\n'
    'while True: signal.pause()'
  )
  cluster.submit(node('main', UNTIL, str(go), main=True), node('other', slow))
  cluster.says('up')
  go.write_text('')
  cluster.says('saving')
  os.kill(cluster.pid, signal.SIGUSR1)  # its time is up just then
  cluster.ends()
  assert not cluster.calls('scontrol')
  (other,) = pids(cluster, 'other')
  until(lambda: not alive(other))


def test_steps_find_each_other_by_announcements(cluster: Cluster) -> None:
  announces = (
    'import json, signal, sys\nfrom pathlib import Path\nlisten, file, number = sys.argv[1:]\n'
    'assert listen == "tcp://0.0.0.0:0"\n'
    'Path(file).write_text(json.dumps({"it": f"tcp://h:{number}"})); signal.pause()'
  )
  asks = (
    'import sys\nfrom changes import changes\nfrom podrace.distributed.net.address import current\n'
    'for one in sys.argv[1].split(","):\n'
    '  for _ in changes(one.removeprefix("announced:")):\n'
    '    try: print("at", current(one)); break\n'
    '    except OSError: pass'
  )
  own = ('{listen}', '{announce}', '1{replica}')
  serve = node('serve', announces, *own, replicas=2, listens=('it',))
  cluster.submit(serve, node('main', asks, '{serve:all}', main=True))
  cluster.ends()
  assert re.findall(r'at (.*)', cluster.output) == ['tcp://h:10', 'tcp://h:11']
  assert (cluster.directory / 'announced').stat().st_mode & 0o777 == 0o700


def test_announcements_do_not_outlive_their_process(tmp_path: Path) -> None:
  serve = Node('serve', ('serve', '{announce}'), replicas=2, listens=('it',))
  program = Program((serve, Node('main', ('true',), main=True)))
  where = slurm.places(program, tmp_path)
  (tmp_path / 'announced').mkdir()
  for i in range(2):
    where.file(serve, i).touch()
  where.forget(serve, 1)
  assert [p.name for p in (tmp_path / 'announced').iterdir()] == ['serve-0']
  (tmp_path / 'announced' / 'folder').mkdir()
  where.open()  # as the program starts anew
  assert not list((tmp_path / 'announced').iterdir())


def test_each_job_has_new_keys_that_are_its_users_alone(tmp_path: Path) -> None:
  program = Program((Node('main', ('true',), main=True),))
  slurm.prepare(program, tmp_path)
  made = keys.readable(tmp_path / 'keys' / 'client.key').read_text()
  slurm.prepare(program, tmp_path)
  # The directory may be of a stranger.
  assert (tmp_path / 'keys' / 'client.key').read_text() != made
  assert (tmp_path / 'keys' / keys.ALLOWED).read_text().count('\n') == 1
  assert (tmp_path / 'keys').stat().st_mode & 0o777 == 0o700
  assert not (tmp_path / 'keys' / 'authority.key').exists()
  assert sorted(p.name for p in tmp_path.iterdir()) == ['keys', 'program.json']


def test_a_job_runs_only_the_submitted_program(cluster: Cluster) -> None:
  """A run directory with somebody's program.json, whose commands are run by nobody's word."""
  mine, ran = Program((node('main', 'pass', main=True),)), cluster.directory / 'ran'
  (cluster.directory / 'logs').mkdir(parents=True)
  slurm.prepare(Program((node('main', f'open({str(ran)!r}, "w")', main=True),)), cluster.directory)
  script = slurm.job(mine, cluster.directory, [])
  words = shlex.split(script.splitlines()[-1].removeprefix('exec '))
  for line in (words, words[:-1]):  # a person may leave the hash out
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
  slurm.prepare(mine, cluster.directory)
  assert slurm.sha256((cluster.directory / 'program.json').read_text()) == words[-1]
  assert not ran.exists() and not cluster.calls('srun')


@pytest.mark.slow
def test_impala_as_a_job(cluster: Cluster) -> None:
  words = ('catch', '--as', 'impala', '--on', 'slurm', '--total-steps', '2000')
  at = ('--run-dir', str(cluster.directory))
  with Process(cluster.log.with_name('said'), '-m', 'podrace', 'launch', *words, *at) as launch:
    assert launch.wait() == 0, launch.output
    assert launch.output.startswith(f'job 7: {cluster.directory}/job.sbatch')
  cluster.ends()
  assert json.loads((cluster.directory / 'summary.json').read_text())['step'] >= 2000
  assert re.search(r'act-1 +\| .*complete', cluster.output)
  assert 'PRIVATE' not in cluster.output + cluster.log.read_text()


@pytest.mark.slow
def test_learners_as_a_job(cluster: Cluster) -> None:
  """The first one is killed, so both start again; they meet at another port."""

  def learner(cluster: Cluster) -> int:
    for process in Path('/proc').glob('[0-9]*'):
      with contextlib.suppress(OSError):
        words = (process / 'cmdline').read_text().split('\0')
        if {'train', str(cluster.directory), '0'} < {*words} and 'srun' not in words:
          return int(process.name)
    raise AssertionError(cluster.output)

  words = ('catch', '--as', 'learners', '--learners-insecure', '--on', 'slurm')
  words += ('--total-steps', '60_000')
  at = ('--checkpoint-every', '5000', '--run-dir', str(cluster.directory))
  with Process(cluster.log.with_name('said'), '-m', 'podrace', 'launch', *words, *at) as launch:
    assert launch.wait() == 0, launch.output
  kept = cluster.directory / 'checkpoints'
  until(lambda: kept.is_dir() and any(x.name.isdigit() for x in kept.iterdir()))
  calls = map(' '.join, cluster.calls('srun'))
  assert ['0.0.0.0:0' in call for call in calls if '--process-id 0' in call] == [True]
  before = announce.read(cluster.directory / 'announced' / 'learner-0')['coordinator']
  os.kill(learner(cluster), signal.SIGKILL)
  cluster.says('resuming')
  assert announce.read(cluster.directory / 'announced' / 'learner-0')['coordinator'] != before
  cluster.ends()
  assert json.loads((cluster.directory / 'summary.json').read_text())['step'] >= 60_000


LAUNCH = ('catch', '--as', 'impala', '--on', 'slurm')


def test_what_would_be_submitted_is_shown(tmp_path: Path, capsys: Any) -> None:
  more = (
    '--sbatch', 'time=8:00:00', '--sbatch=exclusive', '--gpus', 'learner=2', '--gpus', 'act=1', '--cpus', 'act=3',
  )  # fmt: skip
  assert command.run([*LAUNCH, '--run-dir', str(tmp_path / 'run'), '--dry-run', *more]) == 0
  shown = capsys.readouterr().out
  options = re.findall(r'^#SBATCH --(.*)', shown, re.M)
  assert options == [
    'job-name=podrace-run', 'ntasks=4', 'cpus-per-task=3', 'gpus=4',
    f'output={tmp_path}/run/logs/slurm-%j.txt', 'open-mode=append', 'requeue', 'signal=B:USR1@90',
    'time=8:00:00', 'exclusive',
  ]  # fmt: skip
  assert re.findall(r'^# (.*)', shown, re.M) == ['replay', 'learner', 'act-0', 'act-1']
  assert f'announced:{tmp_path}/run/announced/learner-0#params' in shown
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('more', 'said'),
  [
    ((), '--run-dir'),
    (('--run-dir', 'a,b'), 'a,b: '),
    (('--run-dir', 'a b'), 'a b: '),
    (('--run-dir', 'a', '--sbatch', '-p gpu'), '--sbatch'),
    (('--run-dir', 'a', '--gpus', 'lerner=1'), 'replay, learner, act'),
    (('--run-dir', 'a', '--cpus', 'act=two'), '--cpus act=N'),
    (('--run-dir', 'a'), 'sbatch'),
    (('--run-dir', 'a', '--metrics-listen', '0.0.0.0:9100'), '--metrics-insecure'),
    (('--run-dir', 'a', '--on', 'local', '--gpus', 'act=1'), '--gpus'),
  ],
)
def test_what_is_refused(
  more: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: Any
) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(UsageError) as e:
    command.run([*LAUNCH, *more])
  assert said in str(e.value)
  assert not list(tmp_path.iterdir())


def test_a_job_has_the_accelerators_of_its_user(cluster: Cluster, monkeypatch: Any) -> None:
  monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
  seen = cluster.log.with_name('seen')
  (cluster.log.with_name('bin') / 'sbatch').write_text(f'#!/bin/sh\necho $JAX_PLATFORMS > {seen}\n')
  assert command.run([*LAUNCH, '--run-dir', str(cluster.directory)]) == 0
  assert seen.read_text() == 'cuda\n'


def test_a_program_that_runs_is_not_submitted_again(cluster: Cluster) -> None:
  words = [*LAUNCH, '--run-dir', str(cluster.directory)]
  with lock_logs(cluster.directory / 'logs'), pytest.raises(UsageError, match='already'):
    command.run(words)
  assert not cluster.calls('sbatch')


def test_what_listens_must_announce(tmp_path: Path) -> None:
  serve = Node('serve', ('serve', '{listen}'), listens=('it',), main=True)
  with pytest.raises(UsageError, match=r'--announce \{announce\}'):
    slurm.places(Program((serve,)), tmp_path)


def test_a_job_that_is_refused_says_why(cluster: Cluster, capfd: Any) -> None:
  refuses = cluster.log.with_name('refuses')
  refuses.write_text('#!/bin/sh\necho "no such partition" >&2\nexit 1\n')
  refuses.chmod(0o700)
  assert slurm.submit(str(refuses), cluster.directory) == 1
  assert capfd.readouterr() == ('', 'no such partition\n')


def test_the_names_of_directories_are_no_patterns_of_sbatch(tmp_path: Path) -> None:
  program = Program((Node('learner', ('true',), main=True),))
  for name, written in (
    ('lr=1%j', 'lr=1%%j'),
    ('[64,64] $HOME', '[64,64] $HOME'),
    ("it's", "it's"),
  ):
    script = slurm.job(program, tmp_path / name, []).splitlines()
    words = [shlex.split(x.removeprefix('#SBATCH ')) for x in script if x.startswith('#SBATCH ')]
    assert [f'--output={tmp_path}/{written}/logs/slurm-%j.txt'] in words
    assert [f'--job-name=podrace-{name}'] in words
  for name in ('a\\b', 'a\nscancel 1'):
    with pytest.raises(UsageError, match='--run-dir'):
      slurm.job(program, tmp_path / name, [])
