"""DQN and SAC against rejax (on the device) and stable-baselines3 (on the host).

Against rejax: the same environment, networks, batch, gradient steps for each environment step,
replay, exploration and rates; each side in a process of its own, in turn, with a greedy evaluation
behind it that is not timed. What differs because there is no setting for it: rejax clips each element of a
gradient and podrace its norm (of DQN; the bound is set so high that neither does), rejax moves DQN's target
by environment steps and podrace by gradient steps (the same moments here), rejax's SAC clips where
podrace's doesn't, and rejax treats time limits as terminations.

Against stable-baselines3: DQN on CartPole with 8 environments, the gradient steps, batch and network
of both alike; podrace under Anakin and, with Gymnasium's environments in worker processes, Sebulba.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import common

CALLS = 4  # the first is not in the rate
EPISODES = 128
SETTINGS: dict[str, dict[str, Any]] = {
  'dqn-1': dict(algorithm='dqn', num_envs=1, gradients=1, batch=64, steps=20_000),
  'dqn-64': dict(algorithm='dqn', num_envs=64, gradients=64, batch=64, steps=64 * 640),
  'dqn-128-few': dict(algorithm='dqn', num_envs=128, gradients=16, batch=256, steps=128 * 640),
  'sac-1': dict(algorithm='sac', num_envs=1, gradients=1, batch=256, steps=6_000),
  'sac-16': dict(algorithm='sac', num_envs=16, gradients=16, batch=256, steps=16 * 400),
}
ENVS = {'dqn': 'CartPole-v1', 'sac': 'Pendulum-v1'}
BUFFER, FILL = 65_536, 1_024
TARGET_STEPS = 512  # environment steps between copies of DQN's target
EXPLORE = 20_000  # environment steps until epsilon is 0.05


def rejax_settings(s: dict[str, Any]) -> dict[str, Any]:
  common_settings = dict(
    algorithm=s['algorithm'], env=ENVS[s['algorithm']], num_envs=s['num_envs'],
    num_epochs=s['gradients'], batch_size=s['batch'], buffer_size=BUFFER, fill_buffer=FILL,
    gamma=0.99, max_grad_norm=1e6,
  )  # fmt: skip
  if s['algorithm'] == 'dqn':
    return common_settings | dict(
      agent_kwargs=dict(activation='relu'), learning_rate=2.5e-4, polyak=0.0, ddqn=True,
      target_update_freq=TARGET_STEPS, exploration_fraction=EXPLORE / s['steps'],
    )  # fmt: skip
  # rejax moves the target once for all gradients of a step, as often as podrace would by 0.005 each
  return common_settings | dict(
    agent_kwargs=dict(activation='relu'), learning_rate=1e-3, polyak=0.995 ** s['gradients']
  )


def agent(s: dict[str, Any]) -> Any:
  """podrace's, with the same settings."""
  from podrace.agents.dqn import DQN
  from podrace.agents.sac import SAC
  from podrace.networks import Actor, Critic, QNetwork
  from podrace.replay import Buffer

  buffer = Buffer(
    capacity=BUFFER, batch_size=s['batch'], min_size=FILL,
    samples_per_insert=s['gradients'] * s['batch'] / s['num_envs'],
  )  # fmt: skip
  if s['algorithm'] == 'dqn':
    per_step = s['gradients'] / s['num_envs']
    return DQN(
      network=QNetwork(hidden=(64, 64)), buffer=buffer, learning_rate=2.5e-4, adam_epsilon=1e-8,
      max_grad_norm=1e6, huber=0.0, target_period=round(TARGET_STEPS * per_step),
      epsilon_steps=round(EXPLORE * per_step),
    )  # fmt: skip
  return SAC(
    Actor(hidden=(64, 64)), Critic(hidden=(64, 64), critics=2), buffer,
    actor_learning_rate=1e-3, critic_learning_rate=1e-3, temperature_learning_rate=1e-3,
  )  # fmt: skip


def work() -> None:
  """Answers the requests that peer_rejax_value.py answers."""
  import dataclasses

  import jax

  from podrace import config, envs, evaluate

  for request in common.requests():
    if request['do'] == 'setup':
      s = request['setting']
      env = envs.make(f'gymnax:{ENVS[s["algorithm"]]}')
      bound = config.bind(agent(s), env, 0, s['num_envs'])
      run = common.start(bound, env, s['num_envs'], 1)
      common.answer(compile_s=sum(run.compile_s.values()))
    else:
      run.reset(request['seed'])
      updates = s['steps'] // s['num_envs']
      seconds = [run.seconds(updates) for _ in range(request['calls'])]
      greedy = dataclasses.replace(bound, greedy=True)
      returns = evaluate.episode_returns(
        greedy, env, run.state.train.params, request['episodes'], jax.random.key(2**20)
      )
      common.answer(seconds=seconds, score=float(returns.mean()))


def against_rejax(
  names: list[str], repeats: int, results: dict[str, Any], versions: Any
) -> dict[str, Any]:
  python = common.peer('rejax')
  for name in names:
    s = SETTINGS[name]
    found: dict[str, dict[str, list[float]]] = {
      side: dict(rate=[], compile=[], score=[]) for side in ('rejax', 'podrace')
    }
    for seed in range(repeats):
      for side, told in found.items():
        command = (
          [python, 'benchmarks/peer_rejax_value.py']
          if side == 'rejax'
          else [sys.executable, 'benchmarks/value_agents.py', '--worker']
        )
        with common.Worker(command) as worker:
          setup = worker.ask(do='setup', rejax=rejax_settings(s), setting=s, steps=s['steps'])
          ran = worker.ask(do='run', seed=seed, calls=CALLS, episodes=EPISODES)
        told['compile'].append(setup['compile_s'])
        told['rate'].append(s['steps'] * (CALLS - 1) / sum(ran['seconds'][1:]))
        told['score'].append(ran['score'])
    medians = {side: statistics.median(told['rate']) for side, told in found.items()}
    results[name] = dict(
      setting=s,
      total_steps=s['steps'] * CALLS,
      speedup=medians['podrace'] / medians['rejax'],
      **{side: {k: common.summary(v) for k, v in told.items()} for side, told in found.items()},
    )
    print(
      f'{name}: '
      + ', '.join(
        f'{side} {medians[side]:,.0f} steps/s, compile {statistics.median(told["compile"]):.1f} s, '
        f'return {statistics.median(told["score"]):.0f}'
        for side, told in found.items()
      )
      + f'; {results[name]["speedup"]:.2f}x',
      flush=True,
    )
    common.record('value_agents', results, versions)
  return results


SB3 = dict(num_envs=8, gradients=8, batch=64, seconds=8)


def against_sb3(repeats: int) -> dict[str, Any]:
  """DQN on CartPole; steps/s after learning has begun."""
  python = common.peer('torch')
  n, g, b = SB3['num_envs'], SB3['gradients'], SB3['batch']
  flags = [
    '--agent', 'dqn', '--num-envs', str(n), '--unroll-length', '1',
    '--agent.buffer.samples-per-insert', str(g * b / n), '--agent.buffer.batch-size', str(b),
    '--agent.network.hidden', '64', '64', '--agent.epsilon-steps', '5000',
  ]  # fmt: skip
  rates: dict[str, list[float]] = {'sb3': [], 'anakin': [], 'sebulba': []}
  for _ in range(repeats):
    command = [
      python,
      'benchmarks/peer_sb3.py',
      'dqn',
      *map(str, (n, 1, g, b, SB3['seconds'])),
      'dummy',
    ]
    rates['sb3'].append(common.last_json(command)['steps_per_s'])
    for side, env, steps in (
      ('anakin', ['--env', 'gymnax:CartPole-v1'], 150_000),
      ('sebulba', ['--env', 'gymnasium:CartPole-v1', '--architecture', 'sebulba',
                   '--actor-threads', '1'], 40_000),
    ):  # fmt: skip
      rates[side].append(podrace_rate([*env, *flags, '--total-steps', str(steps)]))
  medians = {k: statistics.median(v) for k, v in rates.items()}
  print('; '.join(f'{k} {v:,.0f} steps/s' for k, v in medians.items()), flush=True)
  return dict(
    setting=SB3,
    steps_per_s={k: common.summary(v) for k, v in rates.items()},
    anakin_over_sb3=medians['anakin'] / medians['sb3'],
    sebulba_over_sb3=medians['sebulba'] / medians['sb3'],
  )


def podrace_rate(args: list[str]) -> float:
  import pathlib
  import tempfile

  with tempfile.TemporaryDirectory() as folder:
    run_dir = pathlib.Path(folder) / 'run'
    command = [
      sys.executable,
      '-m',
      'podrace.cli',
      'train',
      'catch',
      *args,
      '--run-dir',
      str(run_dir),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=common.ROOT)
    return json.loads((run_dir / 'summary.json').read_text())['steps_per_s']


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('names', nargs='*', help=f'of {[*SETTINGS, "sb3"]}; none: all')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    return work()
  names = args.names or [*SETTINGS, 'sb3']
  path = (
    common.RESULTS / 'value_agents.json'
  )  # settings that are not named keep what it has of them
  known = json.loads(path.read_text())['results'] if path.exists() else {}
  with common.Worker([common.peer('rejax'), 'benchmarks/peer_rejax_value.py']) as worker:
    versions = worker.ask(do='versions')
  results = against_rejax([n for n in names if n != 'sb3'], args.repeats, known, versions)
  if 'sb3' in names:
    results['sb3'] = against_sb3(args.repeats)
    common.record('value_agents', results, versions)
  return None


if __name__ == '__main__':
  main()
