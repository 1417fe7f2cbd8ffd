"""What a run has that names an agent or an environment, but no preset."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from podrace import api, cli, envs
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.commands import configure, train
from podrace.fields import flag, negate
from podrace.settings import defaults
from podrace.settings.agents import bind, default_agent
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.system.options import Options

BOARD = spaces.Box(0, 1, (10, 10, 4), np.float32)
FRAMES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ENVS = {  # one of each kind
  'vector': 'podrace:catch',
  'grid': 'gymnax:Freeway-MinAtar',
  'pixels': 'craftax:Craftax-Classic-Pixels-v1',
  'continuous': 'gymnax:Pendulum-v1',
}


@pytest.mark.parametrize(
  ('observation', 'action', 'kind'),
  [
    (spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 'vector'),
    (spaces.Box(-1, 1, (3, 3)), spaces.Discrete(2), 'vector'),
    (spaces.Discrete(5), spaces.MultiDiscrete([2, 3]), 'vector'),
    (BOARD, spaces.Discrete(2), 'grid'),
    (spaces.Box(0, 1, (3, 3, 1)), spaces.Discrete(2), 'grid'),
    (spaces.Box(0, 1, (2, 7, 1)), spaces.Discrete(2), 'vector'),
    (FRAMES, spaces.Discrete(2), 'pixels'),
    (spaces.Dict(board=BOARD, action_mask=spaces.MultiBinary(2)), spaces.Discrete(2), 'grid'),
    (spaces.Dict(a=FRAMES, b=BOARD), spaces.Discrete(2), 'grid'),
    (FRAMES, spaces.Box(-1, 1, (3,)), 'continuous'),
  ],
)
def test_kinds(observation: Any, action: Any, kind: str) -> None:
  assert defaults.kind_of(observation, action) == kind


@pytest.mark.parametrize(
  ('agent', 'kind'),
  [
    pytest.param(*x, marks=pytest.mark.slow) if (x[0] == 'muzero' and x[1] != 'vector') or (x[0] != 'ppo' and x[1] == 'pixels') else x
    for x in defaults.TABLE
  ],
)  # fmt: skip
def test_every_entry_makes_an_agent_that_acts(agent: str, kind: defaults.Kind) -> None:
  name = ENVS[kind]
  plain = Config(agent=default_agent(agent))
  config = defaults.with_defaults(plain, name)
  entry = defaults.TABLE[agent, kind]
  assert (config.num_envs, config.unroll_length) == (entry.num_envs, entry.unroll_length)
  assert config.total_steps == Config.total_steps and config.agent != plain.agent
  env = envs.make(name)
  bound = bind(config.agent, env, config.total_updates, config.num_envs)
  network = getattr(bound, 'network', None) or bound.actor

  def act(key: Any) -> Any:
    timestep = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), network.example())
    return bound.act(bound.init(key).params, bound.initial_state(jnp.arange(2)), timestep, key)[0]

  with jax.debug_key_reuse(False):
    action = jax.eval_shape(act, jax.random.key(0)).action
  assert action.shape[0] == 2
  if hasattr(bound, 'memory'):
    bound.memory(config.num_envs, config.unroll_length)
  if agent == 'ppo':
    assert config.unroll_length % config.agent.minibatches == 0


def test_integers_are_not_normalized() -> None:
  class Counting:
    observation_space, action_space = spaces.Discrete(3), spaces.Box(-1, 1, (1,))

  entry = defaults.TABLE['ppo', 'continuous']
  assert entry.agent['normalize_observations']
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(envs, 'make', lambda name: Counting)
    assert not defaults.with_defaults(
      Config(agent=PPO()), 'podrace:any'
    ).agent.normalize_observations
  assert defaults.with_defaults(
    Config(agent=PPO()), ENVS['continuous']
  ).agent.normalize_observations


def recorded(tmp_path: Path, *args: str) -> Any:
  """The record of a run with these arguments; one update long."""
  run_dir = tmp_path / 'run'
  steps = ('--total-steps', '100') if '--total-steps' not in args else ()
  with pytest.raises(SystemExit) as ended:
    cli.main(['train', *args, *steps, '--run-dir', str(run_dir), '--devices', '1', '--quiet'])
  assert ended.value.code == 0
  return json.loads((run_dir / 'config.json').read_text())


@pytest.mark.slow
def test_the_command_takes_them(tmp_path: Path) -> None:
  """By --env and --agent; a flag goes before them, and a run that is resumed keeps what it has."""
  args = ['--env', ENVS['grid'], '--agent', 'ppo', '--unroll-length', '16', '--agent.epochs', '1']
  made = recorded(tmp_path, *args)
  entry = defaults.TABLE['ppo', 'grid']
  assert made['num_envs'] == entry.num_envs and made['unroll_length'] == 16
  agent = made['agent']
  assert (
    agent['epochs'] == 1 and agent['minibatches'] == entry.agent['minibatches'] != PPO().minibatches
  )
  assert agent['learning_rate'] == entry.agent['learning_rate'] != PPO().learning_rate
  assert recorded(tmp_path) == made


def settings(*args: str) -> Config:
  """What `podrace train ARGS` would train."""
  rest = list(args)
  preset = configure.take_preset(rest)
  return configure.parse_config(preset, Options(rest, train.COMMAND), 'podrace train')


def test_what_they_are_for() -> None:
  """An agent or an environment without a preset, and an agent that a preset does not have."""
  assert settings() == PRESETS['catch']()
  assert settings('cartpole', '--agent', 'ppo') == PRESETS['cartpole']()
  game = settings('minatar-breakout', '--env', ENVS['grid'])
  assert game == dataclasses.replace(PRESETS['minatar-breakout'](), env=ENVS['grid'])
  alone = settings('--env', ENVS['continuous'])
  assert isinstance(alone.agent, Impala) and alone.agent.normalize_rewards
  assert alone.total_steps == Config.total_steps and alone.env == ENVS['continuous']
  other = settings('cartpole', '--agent', 'dqn')
  assert isinstance(other.agent, DQN) and other.agent.buffer.batch_size == 128
  entry = defaults.TABLE['dqn', 'vector']
  assert (other.num_envs, other.unroll_length) == (entry.num_envs, entry.unroll_length)
  assert (other.env, other.total_steps) == ('gymnax:CartPole-v1', 600_000)


def test_the_help_has_them(capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit):
    cli.main(['train', '--help-all'])
  said = capsys.readouterr().out
  for (agent, kind), entry in defaults.TABLE.items():
    part = said.partition(f'\n  {agent}, {kind}:\n')[2].partition(':\n')[0]
    told = ' '.join(part.split())
    assert f'--num-envs {entry.num_envs} --unroll-length {entry.unroll_length} ' in told
    for path, value in entry.agent.items():
      option = f'--agent.{".".join(map(flag, path.split(".")))}'
      assert f'{negate(option) if value is False else option} ' in told


@pytest.mark.parametrize('kind', ['symbolic', 'symbolic_first_person', 'categorical'])
def test_symbols_of_navix_are_no_pixels(kind: str) -> None:
  """A network sees them as fractions of the largest; pictures are divided by 255."""
  env = envs.make(f'navix:Navix-Empty-Random-6x6-v0,observation={kind}')
  network = bind(PPO(), env).network

  @jax.jit
  def see(key: Any) -> Any:
    return network.prepare(env.reset(key)[1].observation[None])[0]

  seen = np.asarray(see(jax.random.key(0)))
  assert seen.dtype == np.float32 and 0.2 < np.max(np.abs(seen)) <= 1
  drawn = envs.make('navix:Navix-Empty-Random-6x6-v0,observation=rgb').observation_space
  assert np.max(drawn.high) == 255


@pytest.mark.slow
@pytest.mark.parametrize(('env', 'least'), [('CartPole-v1', 350), ('Acrobot-v1', -150)])
def test_impala_learns_by_its_defaults(env: str, least: float, tmp_path: Path) -> None:
  """Without normalized rewards it stays below 300 and at -500."""
  config = api.configure(env=f'gymnax:{env}', agent='impala', total_steps=500_000)
  result = api.train(config, tmp_path / 'run', quiet=True)
  returns = [row['episode_return'] for row in result.metrics if row['episodes']]
  assert np.mean(returns[-10:]) > least
