"""Runs that learn from a log: under every architecture, resumed exactly, evaluated without the log; and `record`."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from data_sets import balance, collected
from disks import small_disk
from shared_programs import shared_programs  # noqa: F401
from shorthand import slow_after
from test_runs import called

import podrace
from podrace.agents.bc import BC as CloneAgent
from podrace.commands import train
from podrace.envs.logs.minari_files import read_log
from podrace.errors import UsageError
from podrace.run import opening, record
from podrace.run.callbacks import Callbacks
from podrace.run.evaluate_host import WatchedPool
from podrace.settings.config import Config
from podrace.settings.record import to_json
from podrace.types import LAST

Capture = pytest.CaptureFixture[str]
BC = ['--agent', 'bc', '--agent.network.hidden', '32', '--agent.buffer.min-size', '64',
      '--agent.buffer.batch-size', '64']  # fmt: skip
DQN = ['--agent', 'dqn', '--agent.network.hidden', '16', '--agent.buffer.min-size', '64',
       '--agent.buffer.batch-size', '16']  # fmt: skip
R2D2 = ['--agent', 'r2d2', '--agent.network.core-size', '8', '--agent.network.hidden', '8', '--agent.sequence', '8',
        '--agent.burn-in', '4', '--agent.buffer.min-size', '64', '--agent.buffer.batch-size', '8']  # fmt: skip
SIZES = ['--num-envs', '4', '--unroll-length', '8', '--devices', '1', '--quiet']


@pytest.fixture(scope='module')
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Episodes of a policy that balances the pole, cut after 60 steps."""
  home = tmp_path_factory.mktemp('home')
  env = gymnasium.make('CartPole-v1')
  return collected(home, 'cartpole-v0', env, 20, balance, steps=60)[0]


def trained(capsys: Capture, run_dir: Path, steps: int, *args: str) -> dict[str, Any]:
  code, _, err = called(
    capsys,
    'train',
    *args,
    *SIZES,
    '--total-steps',
    str(steps),
    '--run-dir',
    str(run_dir),
    '--override',
  )
  assert code == 0, err
  summary: dict[str, Any] = json.loads((run_dir / 'summary.json').read_text())
  return summary


RUNS: dict[str, list[str]] = {
  'anakin, half': [*DQN, '--env', 'gymnax:CartPole-v1', '--log-share', '1/2', '--agent.buffer.online-share', '0.25'],
  'sebulba, host replay': [*DQN, '--architecture', 'sebulba', '--replay', 'host'],
  'anakin': R2D2,
  'sebulba': [*BC, '--architecture', 'sebulba', '--lag', '1'],
  'sebulba, half': [*BC, '--env', 'gymnax:CartPole-v1', '--log-share', '1/2', '--architecture', 'sebulba'],
  'sebulba, half, environments on the host': [*DQN, '--env', 'gymnasium:CartPole-v1', '--log-share', '1/2'],
}  # fmt: skip


@pytest.mark.parametrize('name', slow_after(1, *RUNS))
def test_a_resumed_run_ends_as_one_that_was_not(
  name: str, cartpole: Path, tmp_path: Path, capsys: Capture
) -> None:
  args = [*RUNS[name], '--log', str(cartpole)]
  whole = trained(capsys, tmp_path / 'whole', 640, *args)
  half = trained(capsys, tmp_path / 'half', 320, *args)
  resumed = trained(capsys, tmp_path / 'half', 640, *args)
  assert whole['params_sha256'] == resumed['params_sha256'] != half['params_sha256']


def test_another_data_set_is_refused_on_resume(
  cartpole: Path, tmp_path: Path, capsys: Capture
) -> None:
  path = shutil.copytree(cartpole, tmp_path / 'log')
  args = [*BC, '--log', str(path)]
  trained(capsys, tmp_path / 'run', 320, *args)
  with h5py.File(path / 'data' / 'main_data.hdf5', 'a') as file:
    file['episode_0/observations'][3, 0] += 0.01
  code, _, err = called(
    capsys, 'train', *args, *SIZES, '--run-dir', str(tmp_path / 'run'), '--total-steps', '640', '--override'
  )  # fmt: skip
  assert code == 2 and 'SHA-256' in err, err


def test_another_share_of_the_environments_is_refused_on_resume(
  cartpole: Path, tmp_path: Path, capsys: Capture
) -> None:
  args = [*DQN, '--env', 'gymnax:CartPole-v1', '--log', str(cartpole)]
  trained(capsys, tmp_path / 'run', 320, *args, '--log-share', '1/2')
  later = [*args, *SIZES, '--run-dir', str(tmp_path / 'run'), '--override', '--total-steps']
  code, _, err = called(capsys, 'train', *later, '640', '--log-share', '1/4')
  assert code == 2 and '--log-share 1/2' in err, err
  code, _, err = called(capsys, 'train', *later, '640', '--log-share', '2/4')
  assert code == 0, err


def test_spaces_are_compared_before_steps_are_read(
  cartpole: Path, tmp_path: Path, capsys: Capture
) -> None:
  path = shutil.copytree(cartpole, tmp_path / 'log')
  (path / 'data' / 'main_data.hdf5').write_bytes(b'')  # else reported, as damaged
  code, _, err = called(
    capsys, 'train', *BC, '--env', 'podrace:catch', '--log', str(path), *SIZES, '--run-dir', str(tmp_path / 'run')
  )  # fmt: skip
  assert code == 2 and 'observation space' in err, err


def test_the_clone_of_a_policy_is_as_good(cartpole: Path, tmp_path: Path, capsys: Capture) -> None:
  """From recorded actions alone; evaluated in an environment that the run does not have."""
  run = tmp_path / 'run'
  trained(capsys, run, 12_000, *BC, '--agent.learning-rate', '3e-3', '--log', str(cartpole))
  lines = [json.loads(x) for x in (run / 'metrics.jsonl').read_text().splitlines()]
  assert lines[-1]['action_error'] < 0.08 < lines[0].get('action_error', 1)
  assert 40 < lines[-1]['episode_return'] <= 60  # of the log
  code, _, err = called(capsys, 'eval', str(run))
  assert code == 2 and '--env' in err
  code, _, err = called(capsys, 'eval', str(run), '--env', 'podrace:catch')
  assert code == 2 and 'observation' in err
  code, out, err = called(
    capsys, 'eval', str(run), '--env', 'gymnasium:CartPole-v1', '--episodes', '10', '--greedy'
  )
  assert code == 0, err
  assert json.loads(out.splitlines()[-1])['episode_return_mean'] > 150
  code, out, err = called(capsys, 'export', str(run), str(tmp_path / 'policy'))
  assert code == 0, err
  policy = podrace.load_policy(tmp_path / 'policy')
  action, _ = policy.act(np.array([0, 0, 0.1, 0.5], np.float32))
  assert action == 1


@pytest.mark.parametrize('env, share, of_log', [('', '1', 1), ('a:B', '1', 1), ('a:B', '1/2', 0)])
def test_lines_name_the_return_of_the_log(
  env: str, share: str, of_log: int, tmp_path: Path, capsys: Capture
) -> None:
  config = Config(CloneAgent(), env=env, log='mixed', log_share=share)
  summary = {'step': 10, 'episode_return': 500.0, 'steps_per_s': 1.0}
  train._report(tmp_path, summary, config)
  options = opening.RunOptions(tmp_path / 'run', False, (), False, Callbacks((), False))
  with opening.open_run(config, options) as console:
    assert console.terminal is not None
    console.terminal.write(summary | {'episode_length': 9.0})
  for text in capsys.readouterr():
    assert text.count('return 500.00 of the log') == of_log


@pytest.mark.slow
def test_evaluation_is_in_the_plain_environment(
  cartpole: Path, tmp_path: Path, capsys: Capture
) -> None:
  run = tmp_path / 'run'
  trained(
    capsys, run, 640, *BC, '--log', str(cartpole), '--env', 'gymnax:CartPole-v1', '--eval-every', '320',
    '--eval-episodes', '4',
  )  # fmt: skip
  lines = [json.loads(x) for x in (run / 'eval.jsonl').read_text().splitlines()]
  assert len(lines) == 2 and all(x['episode_return_mean'] < 500.1 for x in lines)
  code, out, _ = called(capsys, 'eval', str(run), '--episodes', '4', '--greedy')
  assert code == 0
  mean = json.loads(out.splitlines()[-1])['episode_return_mean']
  code, out, _ = called(
    capsys, 'eval', str(run), '--episodes', '4', '--greedy', '--env', 'gymnax:CartPole-v1'
  )
  assert json.loads(out.splitlines()[-1])['episode_return_mean'] == mean


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--agent', 'ppo'], 'bc, sac, d4pg or qtopt'),
    (['--agent', 'muzero'], 'bc, sac, d4pg or qtopt'),
    (['--agent', 'sac'], 'sac cannot act'),
    ([*BC, '--log-share', '1/2'], '--env'),
    ([*BC, '--log-share', '2'], 'log-share'),
    ([*BC, '--eval-every', '100'], '--eval-env'),
    ([*BC, '--agent.buffer.online-share', '0.5'], 'online-share'),
    ([*BC, '--env', 'podrace:catch'], 'observation space'),
    ([*DQN, '--env', 'gymnax:CartPole-v1', '--log-share', '1/3'], 'multiple of 3'),
    ([*DQN, '--env', 'gymnasium:CartPole-v1', '--log-share', '1/4', '--num-envs', '12'], 'multiple of'),
    ([*DQN, '--env', 'gymnax:CartPole-v1', '--log-share', '1/2', '--architecture', 'sebulba',
      '--devices', '2', '--actor-devices', '0', '--learner-devices', '0,1',
      '--agent.buffer.online-share', '0.5'],
      'multiple of 8'),
    ([*DQN, '--env', 'gymnasium:CartPole-v1', '--log-share', '1/2', '--replay', 'host',
      '--agent.buffer.online-share', '0.5'], 'replay device'),
  ],
)  # fmt: skip
def test_settings_that_contradict_each_other(
  args: list[str], message: str, cartpole: Path, tmp_path: Path, capsys: Capture
) -> None:
  sizes = [x for x in SIZES if '--num-envs' not in args or x not in ('--num-envs', '4')]
  code, _, err = called(
    capsys, 'train', '--log', str(cartpole), *sizes, *args, '--run-dir', str(tmp_path / 'run')
  )
  assert code == 2 and message in err, err


def test_a_share_needs_a_log(capsys: Capture) -> None:
  for args in (
    ['--log-share', '1/2'], ['--agent', 'dqn', '--agent.buffer.online-share', '0.5'], ['--env', '']
  ):  # fmt: skip
    code, _, err = called(capsys, 'train', *args)
    assert code == 2 and '--log' in err, err


# --- record ----------------------------------------------------------------------------------------


def recorded(capsys: Capture, folder: Path, *args: str) -> dict[str, Any]:
  code, out, err = called(capsys, 'record', *args, '--to', str(folder))
  assert code == 0, err
  result: dict[str, Any] = json.loads(out.splitlines()[-1])
  return result


def test_recorded_episodes_are_of_their_seeds(tmp_path: Path, capsys: Capture) -> None:
  """Minari reads them, and Gymnasium returns the same from the seeds and actions."""
  import minari

  folder = tmp_path / 'cartpole-random-v3'
  result = recorded(
    capsys, folder, '--env', 'gymnasium:CartPole-v1', '--random', '--episodes', '35', '--seed', '7'
  )
  data = minari.MinariDataset(folder / 'data')
  assert (data.total_episodes, data.total_steps) == (result['episodes'], result['steps'])
  assert data.spec.dataset_id == 'cartpole-random-v3' and result['episodes'] == 35
  env, returns = gymnasium.make('CartPole-v1'), []
  metadata = list(data.storage.get_episode_metadata(range(35)))
  assert [m['seed'] for m in metadata] == list(range(7, 42))
  for episode, about in zip(data.iterate_episodes(), metadata, strict=True):
    observation, _ = env.reset(seed=about['seed'])
    np.testing.assert_array_equal(observation, episode.observations[0])
    for t, action in enumerate(episode.actions):
      observation, reward, terminated, truncated, _ = env.step(int(action))
      np.testing.assert_array_equal(observation, episode.observations[t + 1])
      assert (reward, terminated, truncated) == (
        episode.rewards[t], episode.terminations[t], episode.truncations[t]
      )  # fmt: skip
    returns.append(episode.rewards.sum())
  assert result['episode_return_mean'] == pytest.approx(np.mean(returns))
  assert read_log(str(folder)).steps == data.total_steps


def test_random_switches_are_ones_that_the_mask_allows(tmp_path: Path, capsys: Capture) -> None:
  env = 'python:test_check.wrapped,cls=Kept'
  recorded(capsys, tmp_path / 'log', '--env', env, '--random', '--episodes', '5')
  rows = read_log(str(tmp_path / 'log')).rows
  acted = rows.action[rows.step_type != LAST]
  assert acted[:, 0].tolist() == [1] * len(acted) and {*acted[:, 1].tolist()} == {0, 1}
  with h5py.File(tmp_path / 'log' / 'data' / 'main_data.hdf5', 'a') as file:
    file['episode_3/actions'][2, 0] = 0
  with pytest.raises(UsageError, match=r'episode_3.*action_mask'):
    read_log(str(tmp_path / 'log'))


def test_a_folder_with_the_name_of_a_preset_is_no_run(
  tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  (tmp_path / 'catch').mkdir()
  monkeypatch.chdir(tmp_path)
  assert recorded(capsys, tmp_path / 'log', 'catch', '--random', '--episodes', '1')['episodes'] == 1


def test_a_run_is_recorded_and_learned_from(
  cartpole: Path, tmp_path: Path, capsys: Capture
) -> None:
  run, folder = tmp_path / 'run', tmp_path / 'log'
  trained(capsys, run, 640, *DQN, '--env', 'gymnax:CartPole-v1')
  result = recorded(
    capsys, folder, str(run), '--greedy', '--episodes', '5', '--max-steps', '9', '--noise', '0.5'
  )
  assert result['steps'] <= 45
  again = recorded(
    capsys, tmp_path / 'again', str(run), '--greedy', '--episodes', '5', '--max-steps', '9', '--noise', '0.5'
  )  # fmt: skip
  assert read_log(str(folder)).sha256 == read_log(str(tmp_path / 'again')).sha256
  assert again['steps'] == result['steps']
  code, _, err = called(capsys, 'record', str(run), '--to', str(folder))
  assert code == 2 and 'exists already' in err
  code, _, err = called(capsys, 'record', str(run), '--member', '1', '--to', str(tmp_path / 'new'))
  assert code == 2 and 'no seed 1' in err
  trained(capsys, tmp_path / 'other', 320, *BC, '--log', str(folder), '--env', 'gymnax:CartPole-v1')
  trained(capsys, tmp_path / 'alone', 320, *BC, '--log', str(folder))


def test_without_its_data_set_a_run_is_evaluated_exported_and_recorded(
  cartpole: Path, tmp_path: Path, capsys: Capture
) -> None:
  folder, run, env = tmp_path / 'log', tmp_path / 'run', ['--env', 'gymnax:CartPole-v1']
  shutil.copytree(cartpole, folder)
  trained(capsys, run, 320, *BC, '--log', str(folder))
  commands = [
    ['eval', str(run), *env, '--episodes', '2'],
    ['export', str(run), str(tmp_path / 'policy')],
    ['record', str(run), *env, '--episodes', '2', '--to', str(tmp_path / 'recorded')],
    [
      'train',
      *BC,
      *env,
      '--init-from',
      str(run),
      *SIZES,
      '--total-steps',
      '320',
      '--run-dir',
      str(tmp_path / 'tuned'),
    ],
  ]
  before = called(capsys, *commands[0], '--json')
  shutil.rmtree(folder)
  assert called(capsys, *commands[0], '--json') == before
  for command in commands[1:]:
    code, _, err = called(capsys, *command)
    assert code == 0, err
  (run / 'spaces.json').write_text('{"observation_space": "{}"}')
  code, _, err = called(capsys, *commands[0])
  assert code == 2 and 'spaces.json' in err
  (run / 'spaces.json').unlink()  # a run before podrace kept it
  code, _, err = called(capsys, *commands[0])
  assert code == 2 and '--log' in err


OWN = """
import dataclasses
import gymnasium
import jax
import jax.numpy as jnp
from podrace.envs.base import NextStepReset, restart, transition
from podrace.types import ActorOutput, TrainState

N = 1000

class Dice:
  observation_space = gymnasium.spaces.Box(0.0, N, (1,), 'float32')
  action_space = gymnasium.spaces.Discrete(N)

  def reset(self, key):
    x = self.scripted(None, key)
    return x, restart(x[None].astype(jnp.float32))

  def step(self, state, action, key):
    return state, transition(state[None].astype(jnp.float32), 0.0, terminated=False, truncated=False)

  def scripted(self, state, key):
    return jax.random.randint(key, (), 0, N)

class Nested(Dice):
  observation_space = gymnasium.spaces.Dict({'a/b': Dice.observation_space})

  def reset(self, key):
    state, timestep = Dice.reset(self, key)
    return state, timestep._replace(observation={'a/b': timestep.observation})

  def step(self, state, action, key):
    state, timestep = Dice.step(self, state, action, key)
    return state, timestep._replace(observation={'a/b': timestep.observation})

def dice():
  return NextStepReset(Dice())

def nested():
  return NextStepReset(Nested())

@dataclasses.dataclass(frozen=True)
class Again:
  greedy: bool = False

  def init(self, key):
    return TrainState(jnp.zeros(2), jnp.int32(0))

  def initial_state(self, env_id):
    return jnp.zeros(env_id.shape, jnp.int32)

  def act(self, params, state, timestep, key, replace=lambda action: action):
    action = replace(state)
    return ActorOutput(action), action

  def learn(self, train, sample, key):
    return TrainState(train.params + 1, train.rest), jnp.ones_like(sample.weight), {'loss': jnp.sum(train.params)}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'recorded_own.py').write_text(OWN)
  monkeypatch.syspath_prepend(tmp_path)


def test_a_script_does_not_draw_by_the_key_of_its_environment(
  own: None, tmp_path: Path, capsys: Capture
) -> None:
  recorded(
    capsys, tmp_path / 'log', '--env', 'python:recorded_own.dice', '--scripted', '--episodes', '40',
    '--max-steps', '3',
  )  # fmt: skip
  log = read_log(str(tmp_path / 'log'))
  first = log.rows.step_type == 0
  same = log.rows.observation[first][:, 0] == log.rows.action[first]
  assert first.sum() == 40 and same.sum() <= 2


def test_keys_that_no_log_can_have_are_refused_before_playing(
  own: None, tmp_path: Path, capsys: Capture
) -> None:
  args = ['--env', 'python:recorded_own.nested', '--random', '--episodes', '2', '--max-steps', '3']
  code, _, err = called(capsys, 'record', *args, '--to', str(tmp_path / 'log'))
  assert code == 2 and 'a/b' in err and not (tmp_path / 'log').exists()


def test_noise_is_in_the_memory_of_the_policy(own: None, tmp_path: Path, capsys: Capture) -> None:
  """The policy repeats its previous action, at times one at random."""
  env = ('--env', 'python:recorded_own.dice')
  trained(capsys, tmp_path / 'run', 64, '--agent', 'recorded_own:Again', *env)
  recorded(
    capsys, tmp_path / 'log', str(tmp_path / 'run'), '--episodes', '20', '--max-steps', '20',
    '--noise', '0.5', '--allow-code', 'recorded_own',
  )  # fmt: skip
  actions = read_log(str(tmp_path / 'log')).rows.action.reshape(20, 21)[:, :20]
  repeated = (actions[:, 1:] == actions[:, :-1]).mean()
  assert 0.4 < repeated < 0.6 and (actions[:, 10:] == 0).mean() < 0.1


def test_a_recording_has_the_deadline_of_its_run(
  tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  config = podrace.configure(env='gymnasium:CartPole-v1', agent='dqn', env_deadline=77.0)
  (tmp_path / 'config.json').write_text(json.dumps(to_json(config)))
  deadlines: list[float] = []

  def watched(name: str, pool: Any, deadline: float) -> Any:
    deadlines.append(deadline)
    return WatchedPool(name, pool, deadline)

  monkeypatch.setattr(record, 'WatchedPool', watched)
  recorded(capsys, tmp_path / 'log', str(tmp_path), '--random', '--episodes', '1')
  assert deadlines == [77.0]


@pytest.mark.parametrize('kilobytes', [32, 100, 300])
def test_a_full_disk_ends_a_recording_with_a_message(
  kilobytes: int, tmp_path: Path, capsys: Capture
) -> None:
  with small_disk(tmp_path / 'disk', kilobytes):
    code, _, err = called(
      capsys, 'record', '--env', 'gymnax:Pendulum-v1', '--random', '--episodes', '30', '--to',
      str(tmp_path / 'disk' / 'log'),
    )  # fmt: skip
    assert code == 1 and 'No space left' in err and not list((tmp_path / 'disk').iterdir())


def test_a_limit_of_file_sizes_ends_a_recording_with_a_message(tmp_path: Path) -> None:
  """Each list of episodes is smaller than the limit, and all of them together are not."""
  from gymnasium import spaces

  from podrace.envs.logs.writing import Episode, write_log
  from podrace.errors import RunError

  x = np.zeros((1001, 1), np.float32)
  episodes = [[Episode(x, np.zeros(1000, np.int64), x[1:, 0], True, False, 0)]] * 20
  space = spaces.Box(0.0, 9.0, (1,), np.float32), spaces.Discrete(2)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, limits[1]))
  try:
    with pytest.raises(RunError, match='--to'):
      write_log(tmp_path / 'log', *space, episodes, {})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert not list(tmp_path.iterdir())


def test_recordings_at_once_do_not_mix(tmp_path: Path) -> None:
  from gymnasium import spaces

  from podrace.envs.logs.writing import Episode, write_log
  from podrace.errors import UsageError

  def episodes(value: float, before: Any = None) -> Any:
    for i in range(2):
      if before and i:
        before()
      x = np.full((3, 1), value, np.float32)
      yield [Episode(x, np.zeros(2, np.int64), x[:2, 0], True, False, i)]

  space = spaces.Box(0.0, 9.0, (1,), np.float32), spaces.Discrete(2)
  folder = tmp_path / 'log'
  with pytest.raises(UsageError):
    write_log(
      folder, *space, episodes(1.0, lambda: write_log(folder, *space, episodes(2.0), {})), {}
    )
  assert set(read_log(str(folder)).rows.observation.ravel()) == {2.0}
  assert [p.name for p in tmp_path.iterdir()] == ['log']


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, capsys: Capture) -> None:
  (tmp_path / 'file').touch()
  for place in ('/dev/null/x', str(tmp_path / 'file' / 'x'), '/proc/nothing/x'):
    args = ('--env', 'podrace:catch', '--random', '--episodes', '1', '--to', place)
    code, _, err = called(capsys, 'record', *args)
    assert code in (1, 2) and '--to' in err and 'Traceback' not in err, err


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['cartpole'], '--scripted'),
    (['cartpole', '--scripted'], 'scripted'),
    (['--env', 'gymnasium:CartPole-v1', '--scripted'], 'scripted'),
    (['cartpole', '--scripted', '--random'], 'one of them'),
    (['cartpole', '--random', '--episodes', '0'], '--episodes'),
    (['cartpole', '--random', '--noise', '2'], '--noise'),
    (['cartpole', '--random', '--noise', '0.5'], '--noise'),
    (['nowhere'], 'nowhere'),
    ([], 'run directory or preset'),
  ],
)
def test_recordings_that_are_refused(
  args: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
  code, _, err = called(capsys, 'record', *args, '--to', str(tmp_path / 'log'))
  assert code == 2 and message in err, err
  assert not list(tmp_path.iterdir())
