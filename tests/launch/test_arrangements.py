"""Ready-made programs: their commands, what is refused, and two of them in full."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
from children import ROOT, Process, until
from shorthand import Capture
from test_runs import called

import podrace
from podrace import cli
from podrace.agents.muzero import MuZero
from podrace.errors import UsageError
from podrace.launch.arrangements import ARRANGEMENTS, LaunchRequest
from podrace.launch.program import Program
from podrace.launch.supervisor.addresses import Addresses, Announcements
from podrace.launch.supervisor.replica import NO_ACCELERATORS, extra_environ
from podrace.settings.record import to_json
from podrace.system.files import write_json


def asked(preset: str, *arguments: str, **counts: int) -> LaunchRequest:
  return LaunchRequest(podrace.configure(preset), preset, arguments, 'runs/one', **counts)


def commands(program: Program, tmp_path: Path) -> dict[str, str]:
  return dict(Addresses(program, Path('S'), tmp_path).commands())


def test_a_run_needs_its_options_again(tmp_path: Path) -> None:
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'config.json').touch()
  with Launch(tmp_path, '--as', 'apex') as launch:
    assert launch.wait() == 2
    assert str(tmp_path / 'run') in launch.output


def test_a_run_without_a_preset_goes_on_by_the_same_command(
  tmp_path: Path, capsys: Capture
) -> None:
  begun = dataclasses.replace(podrace.configure('catch'), num_envs=32, architecture='sebulba')
  write_json(tmp_path / 'config.json', to_json(begun))
  command = ('launch', '--as', 'learners', '--dry-run', '--run-dir', str(tmp_path))
  code, out, _ = called(capsys, *command, '--num-envs', '32', '--total-steps', '9')
  assert code == 0 and '--total-steps 9' in out
  code, _, err = called(capsys, *command)
  assert code == 2 and 'num_envs: 32 -> 64' in err and 'architecture' not in err


def test_seed(tmp_path: Path) -> None:
  found = commands(ARRANGEMENTS['seed'](asked('pong', '--seed', '3', actors=2)), tmp_path)
  num_envs = podrace.configure('pong').num_envs
  assert found == {
    'learner': 'podrace train pong --seed 3 --envs remote --listen unix:S/learner-0 '
    '--announce S/announced/learner-0 --run-dir runs/one',
    'envs-0': f'podrace envs --connect unix:S/learner-0 --env ale:pong --num-envs {num_envs // 2}',
    'envs-1': f'podrace envs --connect unix:S/learner-0 --env ale:pong --num-envs {num_envs // 2}',
  }


def test_each_process_gets_options_that_it_takes(tmp_path: Path) -> None:
  arguments = ('--seed', '0', '--actor_devices', '0', '--total-steps', '9')
  found = commands(ARRANGEMENTS['apex'](asked('dqn-cartpole', *arguments, actors=1)), tmp_path)
  assert ' --actor_devices 0' in found['act'] and 'actor' not in found['learner']
  assert ' --seed 0 --total-steps 9 ' in found['learner']
  with pytest.raises(UsageError, match='--max-staleness'):
    ARRANGEMENTS['apex'](asked('dqn-cartpole', '--max_lag', '2'))
  assert ' --max-lag 2' in str(
    commands(ARRANGEMENTS['impala'](asked('catch', '--max-lag', '2')), tmp_path)
  )


def test_each_process_that_loads_code_may_do_so(tmp_path: Path) -> None:
  code = ('--allow-code', 'a', '--allow-code', 'b')
  found = commands(ARRANGEMENTS['reanalyse'](asked('muzero-catch', *code, actors=1)), tmp_path)
  assert [name for name in found if ' '.join(code) in found[name]] == [
    'learner',
    'act',
    'reanalyse',
  ]


def test_listeners_get_their_peer_timeout(tmp_path: Path) -> None:
  found = commands(ARRANGEMENTS['apex'](asked('apex-pong', '--peer-timeout', '30')), tmp_path)
  assert [x for x in found if ' --peer-timeout 30' in found[x]] == ['replay', 'learner']


def test_every_process_has_keys_on_several_machines() -> None:
  presets = (('seed', 'pong'), ('apex', 'apex-pong'), ('reanalyse', 'muzero-catch'))
  for arrangement, preset in presets:
    for node in ARRANGEMENTS[arrangement](asked(preset, keyed=True)).nodes:
      at = node.command.index('--keys')
      assert node.command[at + 1] == '{keys}', node


def test_qtopt(tmp_path: Path) -> None:
  """Every process learns from labels, and those with windows have the log."""
  arguments = ('--log', 'grasps', '--log-share', '1/2', '--total-steps', '9')
  request = asked('qtopt-grasp', *arguments, actors=1, labellers=2)
  found = commands(ARRANGEMENTS['qtopt'](request), tmp_path)
  log, labels = '--log grasps --log-share 1/2', '--agent.labels stage'
  at = '--connect-replay unix:S/replay-0 --params unix:S/learner-0'
  assert found == {
    'replay': 'podrace replay --listen unix:S/replay-0 --announce S/announced/replay-0 --dir '
    f'{tmp_path}/replay-0',
    'learner': f'podrace train qtopt-grasp {log} --total-steps 9 {labels} --replay service --lag '
    'async --connect-replay unix:S/replay-0 --listen unix:S/learner-0 --announce '
    'S/announced/learner-0 --run-dir runs/one',
    'act': f'podrace act qtopt-grasp {log} {labels} {at} --local-envs 32',
    'label-0': f'podrace label qtopt-grasp {log} {labels} {at}',
    'label-1': f'podrace label qtopt-grasp {log} {labels} {at}',
  }


def test_acting_processes_get_the_options_they_need(tmp_path: Path) -> None:
  arguments = (
    '--agent.learning-rate', '1e-3', '--total-steps', '9', '--num_envs=8', '--agent', 'impala',
    '--agent.network.hidden', '8', '8', '--seed', '1', '--actor-threads', '1', '--no-compile-cache',
  )  # fmt: skip
  whole = asked('catch', *arguments, actors=4)
  whole = dataclasses.replace(whole, config=dataclasses.replace(whole.config, num_envs=8))
  found = commands(ARRANGEMENTS['impala'](whole), tmp_path)
  assert found['act-3'] == (
    'podrace act catch --agent.learning-rate 1e-3 --num_envs=8 --agent impala --agent.network.hidden 8 8 '
    '--actor-threads 1 --no-compile-cache --connect-replay unix:S/replay-0 --params unix:S/learner-0 --local-envs 2'
  )
  assert found['learner'].startswith('podrace train catch ' + ' '.join(arguments))
  assert '--replay service --lag async --connect-replay unix:S/replay-0' in found['learner']


def test_shards_of_replay_are_all_told(tmp_path: Path) -> None:
  found = commands(ARRANGEMENTS['apex'](asked('apex-pong', shards=2, actors=2)), tmp_path)
  assert found['replay-1'].startswith('podrace replay --listen unix:S/replay-1')
  assert f'--dir {tmp_path}/replay-1' in found['replay-1']
  for name in ('learner', 'act-0', 'act-1'):
    assert '--connect-replay unix:S/replay-0,unix:S/replay-1' in found[name]


def test_reanalysing_processes(tmp_path: Path) -> None:
  one = asked('muzero-catch', '--total-steps', '9', '--agent.simulations=4', reanalysers=2)
  found = commands(ARRANGEMENTS['reanalyse'](one), tmp_path)
  assert found['reanalyse-1'] == (
    'podrace reanalyse muzero-catch --agent.simulations=4 --connect-replay unix:S/replay-0 '
    '--params unix:S/learner-0'
  )


def test_processes_that_learn_as_one(tmp_path: Path) -> None:
  found = commands(ARRANGEMENTS['learners'](asked('catch', '--seed', '3', learners=3)), tmp_path)
  assert list(found) == ['learner', 'learner-1', 'learner-2']
  assert found['learner-2'] == (
    "podrace train catch --seed 3 --coordinator 'announced:S/announced/learner-0#coordinator' --num-processes 3 "
    '--process-id 2 --run-dir runs/one'
  )


def test_learners_of_a_service_have_the_options_of_the_first(tmp_path: Path) -> None:
  found = commands(ARRANGEMENTS['impala'](asked('catch', learners=2)), tmp_path)
  assert list(found) == ['replay', 'learner', 'learner-1', 'act-0', 'act-1']
  assert found['learner-1'] == (
    'podrace train catch --replay service --lag async --connect-replay unix:S/replay-0 '
    "--coordinator 'announced:S/announced/learner-0#coordinator' --num-processes 2 --process-id 1 --listen 'tcp://127.0.0.1:*' --run-dir runs/one"
  )
  alone = commands(ARRANGEMENTS['impala'](asked('catch')), tmp_path)['learner']
  assert '--coordinator' not in alone


def test_learners_on_several_machines_meet_where_the_first_one_announces(tmp_path: Path) -> None:
  several = dict(learners=2, keyed=True, learners_insecure=True)
  for arrangement in 'learners', 'impala':
    program = ARRANGEMENTS[arrangement](asked('catch', **several))
    where = Announcements(program, Path('/A'), Path('/K'), tmp_path)
    found = {n.name: ' '.join(where.command(n, 0, where.known())) for n in program.nodes}
    assert '--coordinator 0.0.0.0:0' in found['learner']
    assert '--announce /A/learner-0' in found['learner']
    assert '--coordinator announced:/A/learner-0#coordinator' in found['learner-1']
    if arrangement == 'impala':
      assert '--connect-replay announced:/A/replay-0#replay' in found['learner-1']
      assert '--listen tcp://127.0.0.1:* --keys /K' in found['learner-1']


def test_each_learner_has_environments_of_its_own_with_seed(tmp_path: Path) -> None:
  found = commands(ARRANGEMENTS['seed'](asked('pong', learners=2, actors=1)), tmp_path)
  assert list(found) == ['learner', 'learner-1', 'envs']
  assert '--process-id 1 --listen unix:S/learner-1-0' in found['learner-1']
  assert '--connect unix:S/learner-0,unix:S/learner-1-0 --env ale:pong' in found['envs']


def test_one_learner_has_the_accelerators_and_several_have_none(tmp_path: Path) -> None:
  found = [
    extra_environ(node)
    for n in (1, 2)
    for node in ARRANGEMENTS['impala'](asked('catch', learners=n)).nodes
    if node.name.startswith('learner')
  ]
  assert found == [{}, NO_ACCELERATORS, NO_ACCELERATORS]


def test_the_first_learner_chooses_where_the_others_come_to(tmp_path: Path) -> None:
  found = commands(ARRANGEMENTS['learners'](asked('catch', learners=2)), tmp_path)
  assert '--coordinator 127.0.0.1:0' in found['learner']
  assert '--announce S/announced/learner-0' in found['learner']


@pytest.mark.parametrize(
  ('arrangement', 'preset', 'counts', 'said'),
  [
    ('seed', 'catch', {}, 'podrace:catch'),
    ('impala', 'dqn-cartpole', {}, '--as apex'),
    ('apex', 'catch', {}, '--as impala'),
    ('reanalyse', 'catch', {}, '--agent muzero'),
    ('impala', 'catch', {'actors': 0}, '--actors'),
    ('impala', 'catch', {'actors': 7}, '--actors 7'),
    ('apex', 'apex-pong', {'shards': 0}, '--shards'),
    ('seed', 'dqn-pong', {}, '--replay host'),
    ('seed', 'pong', {'actors': 16, 'learners': 2}, '--actors 16'),
    ('learners', 'catch', {'learners': 0}, '--learners'),
    ('learners', 'catch', {'learners': 2, 'keyed': True}, '--learners-insecure'),
    ('impala', 'catch', {'learners': 2, 'keyed': True}, '--learners-insecure'),
    ('impala', 'catch', {'keyed': True, 'learners_insecure': True}, '--learners N'),
  ],
)
def test_what_is_refused(arrangement: str, preset: str, counts: dict[str, int], said: str) -> None:
  with pytest.raises(UsageError) as e:
    ARRANGEMENTS[arrangement](asked(preset, **counts))
  assert said in str(e.value)


def test_an_agent_of_the_users_with_targets_is_reanalysed() -> None:
  class Mine(MuZero):
    pass

  config = dataclasses.replace(podrace.configure('muzero-catch'), agent=Mine())
  program = ARRANGEMENTS['reanalyse'](LaunchRequest(config, None, (), 'runs/one'))
  assert [node.name for node in program.nodes] == ['replay', 'learner', 'act', 'reanalyse']


@pytest.mark.parametrize(
  ('arrangement', 'preset', 'arguments', 'said'),
  [
    ('impala', 'catch', ('--lag', '0'), '--lag async'),
    ('impala', 'catch', ('--replay=host',), '--replay service'),
    ('seed', 'pong', ('--envs', 'local'), '--envs remote'),
    ('seed', 'pong', ('--architecture', 'anakin'), '--architecture sebulba'),
  ],
)
def test_options_that_an_arrangement_sets_are_refused(
  arrangement: str, preset: str, arguments: tuple[str, ...], said: str
) -> None:
  with pytest.raises(UsageError) as e:
    ARRANGEMENTS[arrangement](asked(preset, *arguments))
  assert said in str(e.value)


def test_braces_of_arguments_are_no_references(tmp_path: Path) -> None:
  one = dataclasses.replace(asked('catch'), run_dir='runs/{learner}')
  assert "--run-dir 'runs/{learner}'" in commands(ARRANGEMENTS['impala'](one), tmp_path)['learner']


class Launch(Process):
  """`podrace launch`."""

  def __init__(self, tmp_path: Path, *arguments: str) -> None:
    self.run_dir = tmp_path / 'run'
    super().__init__(
      tmp_path / 'launch.txt', '-m', 'podrace', 'launch', *arguments, '--run-dir', str(self.run_dir)
    )

  def pid(self, *words: str) -> int:
    """Of the newest of its processes whose command has one of these words."""
    return max(int(x) for x in self.children() if set(words) & set(_command(x)))

  def children(self) -> list[str]:
    path = Path(f'/proc/{self.process.pid}/task/{self.process.pid}/children')
    return path.read_text().split()

  def learner(self, number: str) -> int:
    """Of the process with this number among those that learn as one."""
    which = f'--process-id\0{number}\0'
    (pid,) = (x for x in self.children() if which in '\0'.join(_command(x)))
    return int(pid)

  def goes_on(self) -> None:
    """Waits for two more lines of metrics and a checkpoint, or the end."""
    before, folder = len(self.lines()), self.run_dir / 'checkpoints'

    def has_gone_on() -> bool:
      saved = any(path.name.isdigit() for path in folder.glob('*'))
      return saved and len(self.lines()) > before + 1

    until(lambda: has_gone_on() or self.process.poll() is not None)

  def lines(self) -> list[dict[str, float]]:
    path = self.run_dir / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(x) for x in lines if x.endswith('\n')]


def _command(pid: str) -> list[str]:
  try:
    return Path(f'/proc/{pid}/cmdline').read_text().split('\0')
  except OSError:
    return []


def test_what_would_be_started_is_shown(tmp_path: Path) -> None:
  with Launch(tmp_path, 'catch', '--as', 'impala', '--dry-run', '--actors', '1') as launch:
    assert launch.wait() == 0
    assert '\npodrace replay --listen' in launch.output
    assert not launch.run_dir.exists()


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    (('catch',), '--as'),
    (('catch', '--as', 'sead'), "'sead'"),
    (('catch', '--as', 'impala', '--on', 'mars'), "'mars'"),
    (('catch', '--as', 'impala', '--actors', '5'), '--actors 5'),
    (('pong', '--as', 'seed', '--shards', '2'), '--shards'),
    (('catch', '--as', 'impala', '--reanalysers', '2'), '--reanalysers'),
    (('catch', '--as', 'learners', '--actors', '2'), '--actors'),
    (('catch', '--as', 'learners', '--on', 'skypilot'), '--learners 2'),
    (('catch', '--as', 'impala', '--listen', 'unix:x'), '--listen'),
    (('catch', '--as', 'learners', '--peer-timeout', '30'), '--peer-timeout'),
  ],
)
def test_bad_usage(
  arguments: tuple[str, ...], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  with pytest.raises(SystemExit) as end:
    cli.main(['launch', *arguments, '--run-dir', str(tmp_path / 'run')])
  assert end.value.code == 2
  assert said in capfd.readouterr().err
  assert not (tmp_path / 'run').exists()


def test_impala_in_four_processes(tmp_path: Path) -> None:
  with Launch(tmp_path, 'catch', '--as', 'impala', '--total-steps', '2000') as launch:
    assert launch.wait() == 0, launch.output
    assert json.loads((launch.run_dir / 'summary.json').read_text())['step'] >= 2000
    logs = {p.name for p in (launch.run_dir / 'logs').glob('*.log')}
    assert logs == {'act-0.log', 'act-1.log', 'learner.log', 'replay.log'}
    assert 'complete' in (launch.run_dir / 'logs' / 'act-0.log').read_text()


@pytest.mark.slow
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
  program = str(ROOT / 'examples' / 'program.py')
  with Process(tmp_path / 'said.txt', program, str(tmp_path / 'run')) as example:
    assert example.wait() == 0, example.output
    assert "{'windows': " in example.output
    assert json.loads((tmp_path / 'run' / 'summary.json').read_text())['step'] >= 10_000
    assert list((tmp_path / 'run' / 'policies').iterdir())


@pytest.mark.slow
def test_a_run_goes_on_whatever_is_killed(tmp_path: Path) -> None:
  env = ('--agent', 'impala', '--env', 'gymnasium:CartPole-v1', '--num-envs', '8')
  rest = ('--total-steps', '100000', '--checkpoint-every', '1000', '--log-every', '1000')
  rest += ('--actor-devices', '0', '--learner-devices', '0', '--actor-threads', '1')
  with Launch(tmp_path, *env, '--as', 'seed', *rest) as launch:
    for words in (('envs',), ('train',), ('envs',), ('train',)):
      launch.goes_on()
      os.kill(launch.pid(*words), signal.SIGKILL)
    steps = len(launch.lines())
    until(lambda: len(launch.lines()) > steps)
    assert launch.output.count('ended with 137') == 4
    assert launch.output.count('resuming') == 2
    launch.signal(signal.SIGTERM)
    assert launch.wait() == 143


@pytest.mark.slow
def test_killed_learners_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """With Anakin: Sebulba's actors of several processes are not saved."""
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '2')  # of each process
  options = ('--architecture', 'anakin', '--total-steps', '400000')
  options += ('--checkpoint-every', '10000', '--log-every', '10000')

  def learned(name: str, *kills: str) -> str:
    (tmp_path / name).mkdir()
    with Launch(tmp_path / name, 'catch', '--as', 'learners', *options) as launch:
      for number in kills:
        launch.goes_on()
        begun = launch.output.count('resuming')
        os.kill(launch.learner(number), signal.SIGKILL)
        until(lambda n=begun: launch.output.count('resuming') > n)
      assert launch.wait() == 0, launch.output
      return str(json.loads((launch.run_dir / 'summary.json').read_text())['params_sha256'])

  assert learned('killed', '1', '0') == learned('whole')


@pytest.mark.slow
def test_learners_of_a_service_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
  often = ('--total-steps', '60000', '--checkpoint-every', '5000', '--log-every', '5000')
  with Launch(tmp_path, 'catch', '--as', 'impala', '--learners', '2', *often) as launch:
    for number in '10':
      launch.goes_on()
      os.kill(launch.learner(number), signal.SIGKILL)
      launch.goes_on()
    assert launch.wait() == 0, launch.output
    assert launch.output.count('resuming') == 2
    assert json.loads((launch.run_dir / 'summary.json').read_text())['step'] >= 60_000
