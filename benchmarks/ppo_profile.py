"""Where an update of PPO goes, on gymnax CartPole in the setting of ppo_cartpole.py.

Parts of the update as compiled programs of their own, in loops of the same lengths, taken in turn:
the environments alone under random actions, the whole of acting, what is computed once of a
trajectory (values, advantages), and the gradients without the optimiser. Learning's rest is the
optimiser, the shuffling and the statistics. Apart they need not add up to the whole.

  python benchmarks/ppo_profile.py [--num-envs 4 64 512] [--repeats 7]
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import common
import ppo_cartpole

TINY = 1e-30  # ties a round of a loop to the one before it, so that none is left out


def parts(num_envs: int) -> tuple[dict[str, Callable[[], Any]], int]:
  """What is timed, and how many updates each does in one call."""
  import jax
  import jax.numpy as jnp
  from jax import lax
  from jax.sharding import PartitionSpec as P

  from podrace import envs
  from podrace.agents import policy_gradient
  from podrace.envs.base import batch
  from podrace.learner import _mean_over, learner

  config = dict(ppo_cartpole.STEADY, num_envs=num_envs)
  length = config['unroll_length']
  env = envs.make(f'gymnax:{config["env"]}')
  agent = common.bind(ppo_cartpole.agent(config), env, 0)
  run = common.start(agent, env, num_envs, length)
  runner, mesh = run.runner, run.runner.mesh
  updates = max(1, 65_536 // (num_envs * length))
  unroll = runner._actor[1]
  many = batch(env, num_envs)
  env_state, _ = many.reset(jax.random.key(1))
  state = jax.tree.map(jnp.copy, run.state)
  train, memory = state.train, state.memory
  _, trajectory = jax.jit(unroll)(train.params, state.actor, jax.random.key(2))

  @jax.jit
  def environments(env_state: Any, key: Any) -> Any:
    def step(state: Any, key: Any) -> Any:
      key, action_key = jax.random.split(key)
      actions = jax.random.randint(action_key, (num_envs,), 0, 2)
      state, timestep = many.step(state, actions, jax.random.split(key, num_envs))
      return state, jnp.sum(timestep.observation)

    return lax.scan(step, env_state, jax.random.split(key, updates * length))

  @jax.jit
  def act(params: Any, actor: Any, key: Any) -> Any:
    return lax.fori_loop(
      0, updates, lambda i, a: unroll(params, a, jax.random.fold_in(key, i))[0], actor
    )

  @jax.jit
  def learn(train: Any, memory: Any, key: Any) -> Any:
    step = learner(agent, runner.replay, mesh)

    def body(i: Any, train: Any) -> Any:
      return step(train, memory, trajectory, jax.random.fold_in(key, i), i)[0]

    return lax.fori_loop(0, updates, body, train)

  def on_mesh(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def loop(network: Any) -> Any:
      return lax.fori_loop(0, updates, lambda _, n: body(n), network)

    return jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))

  def tie(network: Any, x: Any) -> Any:
    return jax.tree.map(lambda p: p + TINY * jnp.sum(x), network)

  def advantages(network: Any) -> Any:
    made = agent.batch(train.params._replace(network=network), trajectory)
    return tie(network, made.advantage + made.target)

  made = jax.jit(
    jax.shard_map(
      lambda: agent.batch(train.params, trajectory),
      mesh=mesh, in_specs=(), out_specs=P(), check_vma=False,
    )
  )()  # fmt: skip
  indices = agent.minibatch_indices(jax.random.key(3), trajectory)

  def gradients(network: Any) -> Any:
    def one(network: Any, index: Any) -> Any:
      def loss(network: Any, index: Any) -> Any:
        minibatch, core = agent.take(made, (), index)
        params = train.params._replace(network=network)
        return agent.loss(params, core, minibatch, jax.random.key(4))[0]

      grads = _mean_over(
        policy_gradient.chunks(agent.network, index, 1), lambda c: jax.grad(loss)(network, c)
      )
      return jax.tree.map(lambda p, g: p + TINY * g, network, grads), None

    return lax.scan(one, network, indices)[0]

  network = train.params.network
  return {
    'update': lambda: run.run(jax.tree.map(jnp.copy, state), jnp.int32(updates)),
    'act': lambda: act(train.params, state.actor, jax.random.key(5)),
    'environments': lambda: environments(env_state, jax.random.key(6)),
    'learn': lambda: learn(train, memory, jax.random.key(7)),
    'advantages': functools.partial(on_mesh(advantages), network),
    'gradients': functools.partial(on_mesh(gradients), network),
  }, updates


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--num-envs', type=int, nargs='+', default=ppo_cartpole.STEADY_ENVS)
  parser.add_argument('--repeats', type=int, default=7)
  args = parser.parse_args()
  results = {}
  for num_envs in args.num_envs:
    calls, updates = parts(num_envs)
    seconds = common.interleave(calls, args.repeats)
    row = {name: 1e3 * statistics.median(s) / updates for name, s in seconds.items()}
    row['rest_of_learn'] = row['learn'] - row['advantages'] - row['gradients']
    results[str(num_envs)] = dict(milliseconds=row, of_updates=updates)
    print(num_envs, {k: round(v, 3) for k, v in row.items()}, flush=True)
  common.record('ppo_profile', results)


if __name__ == '__main__':
  main()
