"""DQN and SAC against rejax (on the device) and stable-baselines3 (on the host).

Against rejax: the same environment, networks, batch, gradient steps for each environment step, replay, exploration and
rates; each side in a process of its own, in turn, with a greedy evaluation behind it that is not timed. They differ where
there is no setting for it: rejax clips each element of a gradient and podrace its norm (of DQN; the bound is set so high
that neither does), rejax moves DQN's target by environment steps and podrace by gradient steps (the same moments here),
rejax's SAC clips where podrace's doesn't, and rejax treats time limits as terminations.

Against stable-baselines3: DQN on CartPole and SAC on Pendulum with 8 environments, for the same steps, with the same
gradients, batch, replay, networks, exploration, target networks, rates and Adam, and greedy episodes of both; podrace under
Anakin and, with Gymnasium's environments in worker processes, Sebulba. Until it learns, SB3's SAC acts at random, podrace's
by its policy; and podrace counts DQN's exploration and target updates from where it begins to learn.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import common

CALLS = 4  # the first is not in the rate
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
SB3: dict[str, dict[str, Any]] = {
  f'sb3-{name}': dict(
    algorithm=name, env=ENVS[name], num_envs=8, gradients=8, hidden=[64, 64], capacity=BUFFER, min_size=FILL,
    discount=0.99, episodes=100, **settings,
  )
  for name, settings in dict(
    dqn=dict(
      batch=64, steps=40_000, learning_rate=2.5e-4, adam_epsilon=1e-8, max_grad_norm=10.0,
      target_steps=TARGET_STEPS, epsilon=0.05, explore_steps=EXPLORE,
    ),
    sac=dict(batch=256, steps=16_000, learning_rate=1e-3, target_rate=0.005),
  ).items()
}  # fmt: skip


def rejax_settings(s: dict[str, Any]) -> dict[str, Any]:
  """Returns the settings in rejax's words."""
  shared = dict(
    algorithm=s['algorithm'], env=ENVS[s['algorithm']], num_envs=s['num_envs'], num_epochs=s['gradients'],
    batch_size=s['batch'], buffer_size=BUFFER, fill_buffer=FILL, gamma=0.99, max_grad_norm=1e6,
    agent_kwargs=dict(activation='relu'),
  )  # fmt: skip
  if s['algorithm'] == 'dqn':
    return shared | dict(
      learning_rate=2.5e-4, polyak=0.0, ddqn=True, target_update_freq=TARGET_STEPS,
      exploration_fraction=EXPLORE / s['steps'],
    )  # fmt: skip
  # rejax moves the target once for all gradients of a step, as often as podrace would by 0.005 each
  return shared | dict(learning_rate=1e-3, polyak=0.995 ** s['gradients'])


def agent(s: dict[str, Any]) -> Any:
  """Returns podrace's agent with the same settings."""
  from podrace.agents.dqn import DQN
  from podrace.agents.sac import SAC
  from podrace.networks import Actor, Critic, QNetwork
  from podrace.replay import Buffer

  per_step = s['gradients'] / s['num_envs']
  samples = per_step * s['batch']
  buffer = Buffer(capacity=BUFFER, batch_size=s['batch'], min_size=FILL, samples_per_insert=samples)
  if s['algorithm'] == 'dqn':
    return DQN(
      network=QNetwork(hidden=(64, 64)), buffer=buffer, learning_rate=2.5e-4, adam_epsilon=1e-8,
      max_grad_norm=1e6, huber=0.0, target_period=round(TARGET_STEPS * per_step),
      epsilon_steps=round(EXPLORE * per_step),
    )  # fmt: skip
  rates = {f'{part}_learning_rate': 1e-3 for part in ('actor', 'critic', 'temperature')}
  return SAC(Actor(hidden=(64, 64)), Critic(hidden=(64, 64), critics=2), buffer, **rates)


class ValueWorker:
  """Answers the same requests as peer_rejax.py."""

  def setup(self, setting: dict[str, Any], **_: Any) -> dict[str, Any]:
    import timing

    from podrace import envs

    self.s, self.env = setting, envs.make(f'gymnax:{ENVS[setting["algorithm"]]}')
    self.trained = timing.start(agent(setting), self.env, setting['num_envs'], 1)
    return dict(compile_s=sum(self.trained.compile_s.values()))

  def run(self, seed: int, calls: int, episodes: int) -> dict[str, Any]:
    import jax

    from podrace.hooks import greedily
    from podrace.run import evaluate

    self.trained.reset(seed)
    updates = self.s['steps'] // self.s['num_envs']
    seconds = [self.trained.seconds(updates) for _ in range(calls)]
    play = evaluate.make_evaluator(greedily(self.trained.runner.agent), self.env, episodes)
    returns = play(self.trained.state.train.params, jax.random.key(2**20))
    return dict(seconds=seconds, score=float(returns.mean()))


def against_rejax(name: str, repeats: int, steps: int) -> dict[str, Any]:
  """Returns rates after the first call, compile times and greedy returns of both sides."""
  s = SETTINGS[name] | ({'steps': steps} if steps else {})
  sides = {
    'rejax': [common.peer('rejax'), 'benchmarks/peers/peer_rejax.py'],
    'podrace': [sys.executable, 'benchmarks/value_agents.py', '--worker'],
  }
  setup = dict(rejax_settings=rejax_settings(s), setting=s, steps=s['steps'])
  answers = common.versus(sides, repeats, setup, dict(calls=CALLS, episodes=128))
  parts: dict[str, Any] = {}
  for side, each in answers.items():
    rate = [s['steps'] * (CALLS - 1) / sum(a['seconds'][1:]) for a in each]
    compiled, score = ([a[k] for a in each] for k in ('compile_s', 'score'))
    parts[side] = common.summaries(dict(rate=rate, compile=compiled, score=score))
  speedup = parts['podrace']['rate']['median'] / parts['rejax']['rate']['median']
  return dict(setting=s, total_steps=s['steps'] * CALLS, speedup=speedup, **parts)


def sb3_flags(s: dict[str, Any]) -> list[Any]:
  """Returns podrace's flags for the settings of stable-baselines3."""
  per_step = s['gradients'] / s['num_envs']
  flags: dict[str, Any] = {
    '--agent': s['algorithm'], '--num-envs': s['num_envs'], '--unroll-length': 1, '--total-steps': s['steps'],
    '--agent.discount': s['discount'], '--agent.buffer.capacity': s['capacity'],
    '--agent.buffer.min-size': s['min_size'], '--agent.buffer.batch-size': s['batch'],
    '--agent.buffer.samples-per-insert': per_step * s['batch'],
  }  # fmt: skip
  if s['algorithm'] == 'dqn':
    nets = ['--agent.network.hidden', *s['hidden']]
    flags |= {
      '--agent.double': False, '--agent.huber': 1.0, '--agent.learning-rate': s['learning_rate'],
      '--agent.adam-epsilon': s['adam_epsilon'], '--agent.max-grad-norm': s['max_grad_norm'],
      '--agent.target-period': round(s['target_steps'] * per_step),
      '--agent.epsilon': s['epsilon'], '--agent.epsilon-steps': round(s['explore_steps'] * per_step),
    }  # fmt: skip
  else:
    nets = ['--agent.actor.hidden', *s['hidden'], '--agent.critic.hidden', *s['hidden']]
    rates = [f'--agent.{part}-learning-rate' for part in ('actor', 'critic', 'temperature')]
    flags |= {'--agent.target-rate': s['target_rate']} | dict.fromkeys(rates, s['learning_rate'])
  return [*(x for pair in flags.items() for x in pair), *nets]


def trained(flags: list[Any], episodes: int) -> dict[str, float]:
  """Trains and evaluates, by the command line."""
  with tempfile.TemporaryDirectory() as folder:
    run_dir = pathlib.Path(folder) / 'run'
    common.podrace('train', 'catch', *flags, '--run-dir', run_dir)
    greedy = common.evaluate_run(run_dir, '--episodes', episodes, '--greedy')
    rate = common.summary_of(run_dir)['steps_per_s']
  return dict(steps_per_s=rate, greedy_return=greedy['episode_return_mean'])


def against_sb3(name: str, repeats: int, steps: int) -> dict[str, Any]:
  """Returns steps/s after learning has begun, and greedy returns."""
  s = SB3[name] | ({'steps': steps} if steps else {})
  sebulba = ['--env', f'gymnasium:{s["env"]}', '--architecture', 'sebulba', '--actor-threads', 1]
  sides = {'anakin': ['--env', f'gymnax:{s["env"]}'], 'sebulba': sebulba}
  peer = [common.peer('torch'), 'benchmarks/peers/peer_sb3.py', s['algorithm']]
  runs: dict[str, list[Any]] = {'sb3': [], **{side: [] for side in sides}}
  for seed in range(repeats):
    runs['sb3'].append(common.last_json([*peer, json.dumps(s | dict(seed=seed))]))
    for side, flags in sides.items():
      runs[side].append(trained([*flags, *sb3_flags(s), '--seed', seed], s['episodes']))
  rates, scores = ({side: common.summary([x[k] for x in each]) for side, each in runs.items()} for k in ('steps_per_s', 'greedy_return'))  # fmt: skip
  over = {f'{side}_over_sb3': rates[side]['median'] / rates['sb3']['median'] for side in sides}
  return dict(setting=s, steps_per_s=rates, greedy_return=scores, **over)


def main() -> None:
  args = common.arguments(__doc__, [*SETTINGS, *SB3], repeats=3, steps=(0, 'other steps'))
  if args.worker is not None:
    worker = ValueWorker()
    common.serve(setup=worker.setup, run=worker.run)
    return
  names = ('stable-baselines3', 'torch', 'rejax', 'jax', 'flax', 'gymnax')
  for name in args.cases:
    measure, peer = (against_sb3, 'torch') if name in SB3 else (against_rejax, 'rejax')
    result = measure(name, args.repeats, args.steps)
    print(name, {k: v for k, v in result.items() if k != 'setting'}, flush=True)
    common.keep('value_agents', name, result, (), common.pins(common.peer(peer), *names))


if __name__ == '__main__':
  main()
