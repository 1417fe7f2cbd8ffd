"""Acting with a search, steps/s: against mctx alone with the same network, and where the time goes.

acting: MuZero with the model of the preset muzero-catch acts on Catch, with 25 and with 50 simulations. The bare program
is one loop of representation, mctx's Gumbel policy and the environment, compiled as a whole, which keeps nothing. Anakin
runs its own unroll; Sebulba runs its actor thread's program and its environments, one after the other. shares: the
microseconds of the bare program's steps, and of the network and the environment alone in loops of their own; the rest is
the tree. pong: acting on ale:pong with 50 simulations under Sebulba, by the default settings for pixels: IMPALA's shallow
convolutions and a hidden state of 256. Its ceilings are mctx alone on the same frames, and the network alone, called once a
step. Parts that are not run keep their results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import mctx
import timing
from environments import Rollout
from jax import lax
from sebulba import bench

from podrace import configure
from podrace.agents.search import MuZeroParams
from podrace.architectures.sebulba.acting import example_timestep
from podrace.architectures.unroll import begin, unroll
from podrace.envs import make
from podrace.envs.base import batch
from podrace.envs.host import base as host
from podrace.networks import outside_loops
from podrace.networks.planning import decode
from podrace.settings.agents import bind
from podrace.settings.presets import PRESETS

NUM_ENVS, LENGTH = 64, 16
PARTS = ('acting', 'shares', 'pong')


def predict(model: Any, params: Any, hidden: Any) -> Any:
  prediction = model.predict(params, hidden)
  return prediction.policy, decode(prediction.value, model.support)


def represent(model: Any, params: Any, timestep: Any) -> Any:
  return model.represent(params, (), jax.tree.map(lambda x: x[None], timestep))[0][0]


def searched(agent: Any, params: Any, timestep: Any, key: Any) -> Any:
  """Returns mctx's actions for timesteps, as written by hand."""
  model = agent.network

  def recurrent(params: Any, key: Any, action: Any, hidden: Any) -> Any:
    hidden, reward = model.dynamics(params, hidden, action)
    policy, value = predict(model, params, hidden)
    reward, discount = decode(reward, model.support), jnp.full_like(value, agent.discount)
    return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=policy, value=value), hidden  # fmt: skip

  hidden = represent(model, params, timestep)
  policy, value = predict(model, params, hidden)
  root = mctx.RootFnOutput(prior_logits=policy, value=value, embedding=hidden)
  return mctx.gumbel_muzero_policy(params, key, root, recurrent, agent.simulations).action


def networks(agent: Any, params: Any, timestep: Any) -> Any:
  """Calls the network as often as a search does, without a tree: the actions are the likeliest ones."""
  model = agent.network
  hidden = represent(model, params, timestep)

  def once(_: Any, carry: Any) -> Any:
    hidden, policy, total = carry
    hidden, reward = model.dynamics(params, hidden, jnp.argmax(policy, axis=-1))
    policy, value = predict(model, params, hidden)
    return hidden, policy, total + value + decode(reward, model.support)

  carry = (hidden, *predict(model, params, hidden))
  _, policy, total = lax.fori_loop(0, agent.simulations, once, carry)
  return jnp.argmax(policy, axis=-1), total


def looped(step: Any, carry: Any) -> Callable[[int], Any]:
  """Returns a program of a number of loops of LENGTH steps, (carry, key) -> carry."""

  @jax.jit
  def run(carry: Any, key: Any, loops: Any) -> Any:
    def once(i: Any, carry: Any) -> Any:
      keys = jax.random.split(jax.random.fold_in(key, i), LENGTH)
      return lax.scan(lambda c, k: (step(c, k), ()), carry, keys)[0]

    return lax.fori_loop(0, loops, once, carry)

  return lambda loops: run(carry, jax.random.key(1), jnp.int32(loops))


def bare(agent: Any, env: Any, params: Any) -> Callable[[int], Any]:
  """Returns loops of LENGTH steps of mctx and the environment."""
  envs = batch(env, NUM_ENVS)

  def step(carry: Any, key: Any) -> Any:
    state, timestep = carry
    search_key, env_key = jax.random.split(key)
    action = searched(agent, params, timestep, search_key)
    return envs.step(state, action, jax.random.split(env_key, NUM_ENVS))

  return looped(step, jax.jit(envs.reset)(jax.random.key(0)))


def alone(function: Callable[[Any, Any], Any], timestep: Any) -> Callable[[int], Any]:
  """Returns loops of LENGTH calls of (timestep, key) -> numbers [B, ...], each waiting for the one before."""

  def step(total: Any, key: Any) -> Any:
    more = total > 1e30  # never, but the compiler does not know

    def with_more(x: Any) -> Any:
      return x + more.reshape(-1, *(1,) * (x.ndim - 1)).astype(x.dtype)

    observation = jax.tree.map(with_more, timestep.observation)
    leaves = jax.tree.leaves(function(timestep._replace(observation=observation), key))
    return total + sum(jnp.sum(x, axis=tuple(range(1, x.ndim))).astype(jnp.float32) for x in leaves)

  return looped(step, jnp.zeros_like(timestep.reward))


def anakin(agent: Any, env: Any, params: Any) -> Callable[[int], Any]:
  """Returns a number of unrolls, as Anakin's program makes them."""
  envs, all_params = batch(env, NUM_ENVS), MuZeroParams(params, jnp.int32(0))

  @jax.jit
  def run(actor: Any, key: Any, loops: Any) -> Any:
    def once(i: Any, carry: Any) -> Any:
      return unroll(agent, envs, all_params, carry[0], jax.random.fold_in(key, i), LENGTH)

    # the last trajectory is for the learner
    return lax.fori_loop(1, loops, once, once(jnp.int32(0), (actor,)))

  started = jax.jit(functools.partial(begin, agent, envs))(jnp.arange(NUM_ENVS), jax.random.key(0))
  return lambda loops: run(started, jax.random.key(1), jnp.int32(loops))


def called(function: Callable[[Any, Any], Any], timestep: Any) -> Callable[[int], Any]:
  """Returns loops of LENGTH calls of a program of one step, as an actor thread makes them."""

  def step(timestep: Any, key: Any) -> Any:
    with outside_loops():  # convolutions in a loop are slower on CPU
      return function(timestep, key)

  one, key = jax.jit(step), jax.random.key(1)

  def calls(loops: int) -> None:
    for _ in range(loops * LENGTH):
      jax.block_until_ready(one(timestep, key))

  return calls


def sebulba(simulations: int, seconds: float, *args: Any) -> dict[str, float]:
  """Returns steps/s of one actor thread's inference and environments, and of both in turn, by `podrace bench`."""
  search = ('--agent.simulations', str(simulations), '--actor-threads', '1')
  rates = bench([*map(str, args), *search, '--architecture', 'sebulba'], seconds)
  inference, environments = rates['inference'], rates['environment']
  acting = 1 / (1 / inference + 1 / environments)
  return dict(inference=inference, environments=environments, acting=acting)


def bound(simulations: int, env: Any) -> tuple[Any, Any]:
  """Returns the agent of muzero-catch with that many simulations, and parameters of its network."""
  agent = dataclasses.replace(PRESETS['muzero-catch']().agent, simulations=simulations)
  agent = bind(agent, env, 100, NUM_ENVS)
  return agent, jax.jit(agent.network.init)(jax.random.key(0))


def microseconds(calls: dict[str, Callable[[int], Any]], repeats: int, seconds: float) -> Any:
  """Returns the time of one step of all environments, in loops that are taken in turn."""
  loops = {}
  for name, call in calls.items():
    timing.timed(lambda call=call: call(1))
    loops[name] = max(1, round(seconds / timing.timed(lambda call=call: call(1))[0]))
  partial = {name: functools.partial(call, loops[name]) for name, call in calls.items()}
  taken = timing.interleave(partial, repeats)
  return {k: common.summary([1e6 * s / (loops[k] * LENGTH) for s in v]) for k, v in taken.items()}


def per_s(times: dict[str, dict[str, float]], envs: int) -> dict[str, dict[str, float]]:
  """Turns microseconds of a step of all environments into environments' steps/s."""
  order = (('median', 'median'), ('min', 'max'), ('max', 'min'))
  return {k: {x: 1e6 * envs / v[y] for x, y in order} for k, v in times.items()}


def acting(simulations: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Measures mctx alone and Anakin in turn, then Sebulba."""
  env = make('podrace:catch')
  agent, params = bound(simulations, env)
  calls = {'bare': bare(agent, env, params), 'anakin': anakin(agent, env, params)}
  rates = per_s(microseconds(calls, repeats, seconds), NUM_ENVS)
  flags = ('muzero-catch', '--num-envs', NUM_ENVS, '--unroll-length', LENGTH)
  stages = [sebulba(simulations, seconds, *flags) for _ in range(min(repeats, 3))]
  rates['sebulba'] = common.summary([x['acting'] for x in stages])
  ratio = {k: rates[k]['median'] / rates['bare']['median'] for k in ('anakin', 'sebulba')}
  return dict(steps_per_s=rates, over_bare=ratio, unroll_length=LENGTH)


def shares(simulations: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Divides the bare program's time into network, environment and search."""
  env = make('podrace:catch')
  agent, params = bound(simulations, env)
  _, timestep = jax.jit(batch(env, NUM_ENVS).reset)(jax.random.key(0))
  calls = dict(
    whole=bare(agent, env, params),
    network=alone(lambda t, key: networks(agent, params, t), timestep),
    environment=Rollout(env, NUM_ENVS, LENGTH).seconds,
  )
  times = microseconds(calls, repeats, seconds)
  share = {k: times[k]['median'] / times['whole']['median'] for k in ('network', 'environment')}
  return dict(microseconds=times, share=share | dict(search=1 - sum(share.values())))


def pong(repeats: int, seconds: float, simulations: int = 50) -> dict[str, Any]:
  """Measures acting on Pong, and its ceilings."""
  spec = host.make('ale:pong')
  config = configure(env='ale:pong', agent='muzero', architecture='sebulba')
  n, length = config.num_envs, config.unroll_length
  agent = bind(dataclasses.replace(config.agent, simulations=simulations), spec, 100, n)
  flags = ('--env', 'ale:pong', '--agent', 'muzero')
  stages = [sebulba(simulations, seconds, *flags) for _ in range(repeats)]
  params = jax.jit(agent.network.init)(jax.random.key(0))
  timestep = jax.tree.map(jnp.asarray, example_timestep(spec, n))
  calls = dict(
    mctx=called(lambda t, key: searched(agent, params, t, key), timestep),
    network=called(lambda t, key: networks(agent, params, t), timestep),
  )
  ceilings = per_s(microseconds(calls, repeats, seconds), n)
  rates = common.columns(stages)
  over = {k: rates['acting']['median'] / x['median'] for k, x in ceilings.items()}
  return dict(steps_per_s=rates | ceilings, over=over, simulations=simulations, unroll_length=length)  # fmt: skip


def main() -> None:
  args = common.arguments(__doc__, PARTS, repeats=5, seconds=3.0, simulations=[25, 50])
  for part in args.cases:
    for n in args.simulations if part != 'pong' else [max(args.simulations)]:
      measure = {'acting': acting, 'shares': shares}.get(part, lambda n, *more: pong(*more, n))
      result = measure(n, args.repeats, args.seconds)
      result |= dict(envs=NUM_ENVS if part != 'pong' else 16, origin=common.origin())
      print(part, n, {k: v for k, v in result.items() if k != 'origin'}, flush=True)
      name = f'{n} simulations' if part == 'acting' else f'{part}, {n} simulations'
      common.keep('planning_speed', name, result)


if __name__ == '__main__':
  main()
