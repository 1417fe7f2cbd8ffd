"""PPO on CartPole against rejax: steady speed, compile time, final return, time to a return of 475.

Both sides: separate actor and critic of 2 x 64 tanh with Flax's default initialisation, the same
batch sizes, epochs, minibatches and hyper-parameters, Adam with its usual epsilon and a constant
rate, clipped values. They differ where the code does and there is no setting for it:
- rejax limits each gradient element to `max_grad_norm`, podrace the global norm;
- rejax normalises advantages over each minibatch, podrace over the batch;
- rejax shuffles the whole batch, podrace each environment's steps (see podrace/agents/ppo.py);
- rejax keeps an optimiser for each network, podrace one;
- rejax treats time limits as terminations, podrace bootstraps at them.

Each side runs in a process of its own, started anew for each repeat, the two taking turns. No
evaluation is compiled, run or timed within training: the actors are saved, and afterwards all are
evaluated by the same code here, greedily, for 128 episodes of gymnax's CartPole-v1.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import common
import numpy as np

HYPER = dict(
  env='CartPole-v1',
  hidden=(64, 64),
  learning_rate=7.5e-4,  # from here on as in rejax's configs/gymnax/cartpole.yaml
  max_grad_norm=0.5,
  discount=0.99,
  clip=0.2,
  entropy_cost=0.01,
  value_cost=0.5,
) | {'lambda': 0.95}
STEADY = dict(HYPER, unroll_length=128, epochs=4, minibatches=4)
STEADY_ENVS = (4, 64, 512)
STEPS_PER_CALL = 262_144
CALLS = 5  # the first is not in the rate
RACES = {
  # rejax's own setting for CartPole; and for 64 environments the best for rejax of five tried, 4
  # seeds each: rate 3e-4 and 1.5e-3 with entropy cost 0.01 and 0, 7.5e-4 with 0.01 only
  'rejax-config': dict(
    config=dict(HYPER, num_envs=5, unroll_length=100, epochs=5, minibatches=5),
    steps=5_000,
    calls=40,
  ),
  '64-envs': dict(
    config=dict(
      HYPER,
      num_envs=64,
      unroll_length=128,
      epochs=4,
      minibatches=4,
      learning_rate=1.5e-3,
      entropy_cost=0.0,
    ),
    steps=16_384,
    calls=48,
  ),
}
TARGET = 475.0
HELD = 3  # evaluations in succession; a single one is often luck of an unfinished policy
EPISODES = 128


# --- our worker -------------------------------------------------------------------------------


def work() -> None:
  """Answers the requests that peer_rejax.py answers, with podrace's PPO."""
  from podrace import envs

  run, updates = None, 0
  for request in common.requests():
    if request['do'] == 'setup':
      config = request['config']
      steps = config['num_envs'] * config['unroll_length']
      updates, rest = divmod(request['steps'], steps)
      assert not rest, f'{request["steps"]} steps are not whole updates of {steps}'
      env = envs.make(f'gymnax:{config["env"]}')
      run = common.start(
        common.bind(agent(config), env, 0), env, config['num_envs'], config['unroll_length']
      )
      common.answer(compile_s=run.compile_s)
    else:
      run.reset(request['seed'])
      seconds, actors = [], []
      for _ in range(request['calls']):
        seconds.append(run.seconds(updates))
        actors.append(actor(run.state.train.params.network))
      np.savez(request['save'], *(np.stack(x) for x in zip(*actors, strict=True)))
      common.answer(seconds=seconds)


def agent(config: dict[str, Any]) -> Any:
  """podrace's PPO with a peer's settings, rejax's if not said otherwise."""
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  network = ActorCritic(
    hidden=tuple(config['hidden']),
    activation='tanh',
    initializer=config.get('initializer', 'lecun'),
    shared=False,
  )
  return PPO(
    network=network,
    learning_rate=config['learning_rate'],
    anneal_learning_rate=False,
    adam_epsilon=config.get('adam_epsilon', 1e-8),
    max_grad_norm=config['max_grad_norm'],
    epochs=config['epochs'],
    minibatches=config['minibatches'],
    discount=config['discount'],
    lambda_=config['lambda'],
    clip=config['clip'],
    clip_value=config['clip'],
    value_cost=config['value_cost'],
    entropy_cost=config['entropy_cost'],
  )


def actor(params: Any) -> list[np.ndarray]:
  """Kernel and bias of each layer of the policy, in order, as peer_rejax.py saves them."""
  torso = params['torso']['Mlp_0']
  layers = [*(torso[name] for name in sorted(torso)), params['policy_head']]
  return [np.asarray(layer[part]) for layer in layers for part in ('kernel', 'bias')]


# --- the two sides ----------------------------------------------------------------------------


def side(name: str, python: str) -> common.Worker:
  here = 'benchmarks'
  if name == 'rejax':
    return common.Worker([python, f'{here}/peers/peer_rejax.py'])
  return common.Worker([sys.executable, f'{here}/ppo_cartpole.py', '--worker'])


def evaluate(actors: list[np.ndarray]) -> np.ndarray:
  """The mean return of 128 greedy episodes for each of N actors; each array is [N, ...]."""
  import gymnax
  import jax
  import jax.numpy as jnp

  env, params = gymnax.make('CartPole-v1')

  @jax.jit
  def mean_return(actor: list[Any], key: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
      observation, state, total, over = carry
      x = jnp.tanh(observation @ actor[0] + actor[1])
      x = jnp.tanh(x @ actor[2] + actor[3])
      action = jnp.argmax(x @ actor[4] + actor[5], axis=-1)
      observation, state, reward, terminated, _ = jax.vmap(
        env.step_env, in_axes=(None, 0, 0, None)
      )(key, state, action, params)
      total = total + jnp.where(over, 0.0, reward)
      return (observation, state, total, over | terminated), None

    keys = jax.random.split(key, EPISODES)
    observation, state = jax.vmap(env.reset_env, in_axes=(0, None))(keys, params)
    start = (observation, state, jnp.zeros(EPISODES), jnp.zeros(EPISODES, bool))
    (_, _, total, _), _ = jax.lax.scan(step, start, None, params.max_steps_in_episode)
    return jnp.mean(total)

  key = jax.random.key(2**20)  # the same episodes for everybody
  return np.asarray(jax.lax.map(lambda a: mean_return(a, key), [jnp.asarray(x) for x in actors]))


def train(
  workers: dict[str, common.Worker], calls: int, seed: int, folder: pathlib.Path
) -> dict[str, tuple[list[float], np.ndarray]]:
  """One run of each side: seconds of each call, greedy return after each."""
  results = {}
  for name, worker in workers.items():
    path = folder / f'{name}.npz'
    seconds = worker.ask(do='run', calls=calls, seed=seed, save=str(path))['seconds']
    results[name] = seconds, path
  return {
    name: (seconds, evaluate(list(np.load(path).values())))
    for name, (seconds, path) in results.items()
  }


# --- the measurements -------------------------------------------------------------------------


def steady(python: str, repeats: int, folder: pathlib.Path) -> dict[str, Any]:
  """Speed after compilation, compile time and the return at the end, by number of environments."""
  results: dict[str, Any] = {}
  for num_envs in STEADY_ENVS:
    rates: dict[str, list[float]] = {'rejax': [], 'podrace': []}
    compiles: dict[str, list[float]] = {'rejax': [], 'podrace': []}
    returns: dict[str, list[float]] = {'rejax': [], 'podrace': []}
    for seed in range(repeats):
      for name in rates:
        with side(name, python) as worker:
          config = dict(STEADY, num_envs=num_envs)
          setup = worker.ask(do='setup', config=config, steps=STEPS_PER_CALL)
          seconds, score = train({name: worker}, CALLS, seed, folder)[name]
        compiles[name].append(sum(setup['compile_s'].values()))
        rates[name].append(STEPS_PER_CALL * (CALLS - 1) / sum(seconds[1:]))
        returns[name].append(float(score[-1]))
    results[num_envs] = dict(
      total_steps=STEPS_PER_CALL * CALLS,
      steps_per_s={k: common.summary(v) for k, v in rates.items()},
      speedup=statistics.median(rates['podrace']) / statistics.median(rates['rejax']),
      compile_s={k: common.summary(v) for k, v in compiles.items()},
      final_greedy_return={k: common.summary(v) for k, v in returns.items()},
    )
    print(
      f'{num_envs} environments: '
      + ', '.join(
        f'{k} {statistics.median(rates[k]):,.0f} steps/s, compile {statistics.median(compiles[k]):.1f} s, '
        f'return {statistics.median(returns[k]):.0f}'
        for k in rates
      )
      + f'; {results[num_envs]["speedup"]:.2f}x',
      flush=True,
    )
  return results


def race(python: str, seeds: int, folder: pathlib.Path) -> dict[str, Any]:
  """Training time to a greedy return of 475, evaluated at equal intervals of steps.

  `first` is the first evaluation that reaches it, `held` the first of three in succession that do.
  """
  results: dict[str, Any] = {}
  for title, setting in RACES.items():
    steps, calls = setting['steps'], setting['calls']
    compiles: dict[str, float] = {}
    runs: dict[str, list[Any]] = {'rejax': [], 'podrace': []}
    with side('rejax', python) as peer, side('podrace', python) as ours:
      workers = {'rejax': peer, 'podrace': ours}
      for name, worker in workers.items():
        setup = worker.ask(do='setup', config=setting['config'], steps=steps)
        compiles[name] = sum(setup['compile_s'].values())
      train(workers, 2, 0, folder)  # not counted: both are warm from here on
      for seed in range(seeds):
        for name, run in train(workers, calls, seed, folder).items():
          runs[name].append(run)
    result = results[title] = dict(
      config=setting['config'],
      evaluated_every_steps=steps,
      at_most_steps=steps * calls,
      seeds=seeds,
      compile_s=compiles,
      returns={k: [[round(float(x), 1) for x in c] for _, c in v] for k, v in runs.items()},
    )
    for criterion, length in (('first', 1), ('held', HELD)):
      result[criterion] = {k: arrivals(v, length, steps) for k, v in runs.items()}
      walls = {k: v['train_s']['median'] for k, v in result[criterion].items()}
      result[criterion]['speedup'] = (
        walls['rejax'] / walls['podrace'] if all(walls.values()) else None
      )
      print(
        f'{title}, {criterion}: '
        + ', '.join(
          f'{k} {result[criterion][k]["reached"]}/{seeds} runs, median '
          f'{result[criterion][k]["train_s"]["median"]} s, '
          f'{result[criterion][k]["steps"]["median"]} steps'
          for k in runs
        ),
        flush=True,
      )
  return results


def arrivals(runs: list[Any], length: int, steps: int) -> dict[str, Any]:
  """When runs (seconds and score of each call) first have `length` scores of 475 in succession."""
  seconds, needed = [], []
  for took, scores in runs:
    windows = np.lib.stride_tricks.sliding_window_view(scores >= TARGET, length).all(axis=-1)
    first = int(np.argmax(windows)) + 1 if windows.any() else None
    seconds.append(sum(took[:first]) if first else float('inf'))
    needed.append(first * steps if first else float('inf'))
  reached = sum(np.isfinite(seconds).tolist())
  return dict(reached=reached, train_s=finite(seconds), steps=finite(needed))


def finite(values: list[float]) -> dict[str, Any]:
  """A summary; runs that never arrive count as endless, written as null."""
  return {k: None if v == float('inf') else v for k, v in common.summary(values).items()} | dict(
    all=[None if v == float('inf') else v for v in values]
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=3, help='processes of each side, for speed')
  parser.add_argument('--seeds', type=int, default=10, help='for the time to 475')
  parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    work()
    return
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  python = common.peer('rejax')
  with tempfile.TemporaryDirectory() as name, side('rejax', python) as peer:
    folder = pathlib.Path(name)
    found = peer.ask(do='versions')
    print('peer:', json.dumps(found), flush=True)
    results = dict(
      steady=dict(config=STEADY, results=steady(python, args.repeats, folder)),
      race=race(python, args.seeds, folder),
    )
  common.record('ppo_cartpole', results, peer=found)


if __name__ == '__main__':
  main()
