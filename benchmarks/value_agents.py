"""DQN and SAC against rejax (on the device) and stable-baselines3 (on the host).

Against rejax: the same environment, networks, batch, gradient steps for each environment step,
replay, exploration and rates; each side in a process of its own, in turn, with a greedy evaluation
behind it that is not timed. What differs because there is no setting for it: rejax clips each element of a
gradient and podrace its norm (of DQN; the bound is set so high that neither does), rejax moves DQN's target
by environment steps and podrace by gradient steps (the same moments here), rejax's SAC clips where
podrace's doesn't, and rejax treats time limits as terminations.

Against stable-baselines3: DQN on CartPole and SAC on Pendulum with 8 environments, for the same steps, with the same
gradients, batch, replay, networks, exploration, target networks, rates and Adam, and greedy episodes of both;
podrace under Anakin and, with Gymnasium's environments in worker processes, Sebulba. What differs: until it learns, SB3's SAC acts at random,
podrace's by its policy; and podrace counts DQN's exploration and target updates from where it begins to learn.
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

  from podrace import envs
  from podrace.run import evaluate
  from podrace.settings import agents

  for request in common.requests():
    if request['do'] == 'setup':
      s = request['setting']
      env = envs.make(f'gymnax:{ENVS[s["algorithm"]]}')
      bound = agents.bind(agent(s), env, 0, s['num_envs'])
      run = common.start(bound, env, s['num_envs'], 1)
      common.answer(compile_s=sum(run.compile_s.values()))
    else:
      run.reset(request['seed'])
      updates = s['steps'] // s['num_envs']
      seconds = [run.seconds(updates) for _ in range(request['calls'])]
      greedy = dataclasses.replace(bound, greedy=True)
      returns = evaluate.make_evaluator(greedy, env, request['episodes'])(
        run.state.train.params, jax.random.key(2**20)
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
          [python, 'benchmarks/peers/peer_rejax_value.py']
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


SB3: dict[str, dict[str, Any]] = {
  algorithm: dict(
    env=ENVS[algorithm], num_envs=8, gradients=8, hidden=[64, 64], capacity=BUFFER, min_size=FILL, discount=0.99,
    episodes=100, **settings,
  )
  for algorithm, settings in dict(
    dqn=dict(
      batch=64, steps=40_000, learning_rate=2.5e-4, adam_epsilon=1e-8, max_grad_norm=10.0,
      target_steps=TARGET_STEPS, epsilon=0.05, explore_steps=EXPLORE,
    ),
    sac=dict(batch=256, steps=16_000, learning_rate=1e-3, target_rate=0.005),
  ).items()
}  # fmt: skip


def sb3_flags(algorithm: str) -> list[str]:
  """podrace's, with the same settings."""
  s = SB3[algorithm]
  per_step = s['gradients'] / s['num_envs']
  hidden = [str(n) for n in s['hidden']]
  flags: dict[str, Any] = {
    '--agent': algorithm, '--num-envs': s['num_envs'], '--unroll-length': 1, '--total-steps': s['steps'],
    '--agent.discount': s['discount'], '--agent.buffer.capacity': s['capacity'],
    '--agent.buffer.min-size': s['min_size'], '--agent.buffer.batch-size': s['batch'],
    '--agent.buffer.samples-per-insert': per_step * s['batch'],
  }  # fmt: skip
  if algorithm == 'dqn':
    nets = ['--agent.network.hidden', *hidden]
    flags |= {
      '--agent.double': False, '--agent.huber': 1.0, '--agent.learning-rate': s['learning_rate'],
      '--agent.adam-epsilon': s['adam_epsilon'], '--agent.max-grad-norm': s['max_grad_norm'],
      '--agent.target-period': round(s['target_steps'] * per_step),
      '--agent.epsilon': s['epsilon'], '--agent.epsilon-steps': round(s['explore_steps'] * per_step),
    }  # fmt: skip
  else:
    nets = ['--agent.actor.hidden', *hidden, '--agent.critic.hidden', *hidden]
    rates = [f'--agent.{part}-learning-rate' for part in ('actor', 'critic', 'temperature')]
    flags['--agent.target-rate'] = s['target_rate']
    flags |= dict.fromkeys(rates, s['learning_rate'])
  return [*(str(x) for pair in flags.items() for x in pair), *nets]


def against_sb3(algorithm: str, repeats: int) -> dict[str, Any]:
  """Steps/s after learning has begun, and greedy returns."""
  python, s = common.peer('torch'), SB3[algorithm]
  sebulba = ['--env', f'gymnasium:{s["env"]}', '--architecture', 'sebulba', '--actor-threads', '1']
  sides = {'anakin': ['--env', f'gymnax:{s["env"]}'], 'sebulba': sebulba}
  told: dict[str, list[Any]] = {'sb3': [], **{side: [] for side in sides}}
  for seed in range(repeats):
    settings = json.dumps(s | dict(seed=seed))
    told['sb3'].append(
      common.last_json([python, 'benchmarks/peers/peer_sb3.py', algorithm, settings])
    )
    for side, flags in sides.items():
      flags = [*flags, *sb3_flags(algorithm), '--seed', str(seed)]
      told[side].append(podrace_run(flags, s['episodes']))
  rates = {k: common.summary([x['steps_per_s'] for x in v]) for k, v in told.items()}
  scores = {k: common.summary([x['greedy_return'] for x in v]) for k, v in told.items()}
  for side in told:
    rate, score = rates[side]['median'], scores[side]['median']
    print(f'{algorithm}, {side}: {rate:,.0f} steps/s, return {score:.0f}', flush=True)
  return dict(
    setting=s,
    steps_per_s=rates,
    greedy_return=scores,
    anakin_over_sb3=rates['anakin']['median'] / rates['sb3']['median'],
    sebulba_over_sb3=rates['sebulba']['median'] / rates['sb3']['median'],
  )


def podrace_run(flags: list[str], episodes: int) -> dict[str, float]:
  """Trains and evaluates, by the command line."""
  import pathlib
  import tempfile

  def podrace(*args: str) -> str:
    command = [sys.executable, '-m', 'podrace.cli', *args]
    return subprocess.run(
      command, check=True, stdout=subprocess.PIPE, text=True, cwd=common.ROOT
    ).stdout

  with tempfile.TemporaryDirectory() as folder:
    run_dir = pathlib.Path(folder) / 'run'
    podrace('train', 'catch', *flags, '--run-dir', str(run_dir))
    greedy = json.loads(
      podrace('eval', str(run_dir), '--episodes', str(episodes), '--greedy').splitlines()[-1]
    )
    rate = json.loads((run_dir / 'summary.json').read_text())['steps_per_s']
  return dict(steps_per_s=rate, greedy_return=greedy['episode_return_mean'])


def main() -> None:
  names = [*SETTINGS, *(f'sb3-{algorithm}' for algorithm in SB3)]
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('names', nargs='*', help=f'of {names}; none: all')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    return work()
  names = args.names or names
  path = (
    common.RESULTS / 'value_agents.json'
  )  # settings that are not named keep what it has of them
  known = json.loads(path.read_text())['results'] if path.exists() else {}
  with common.Worker([common.peer('rejax'), 'benchmarks/peers/peer_rejax_value.py']) as worker:
    versions = worker.ask(do='versions')
  results = against_rejax([n for n in names if n in SETTINGS], args.repeats, known, versions)
  for name in (n for n in names if n not in SETTINGS):
    results[name] = against_sb3(name.removeprefix('sb3-'), args.repeats)
    common.record('value_agents', results, versions)
  return None


if __name__ == '__main__':
  main()
