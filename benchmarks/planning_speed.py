"""Acting with a search, steps/s: against mctx alone with the same network, and where the time goes.

    .venv/bin/python benchmarks/planning_speed.py [acting] [shares] [pong] [--repeats 5] [--seconds 3]

acting: MuZero with the model of the preset muzero-catch acts on Catch, with 25 and with 50 simulations. The bare
program is one loop of representation, mctx's Gumbel policy and the environment, compiled as a whole, which keeps
nothing. What Anakin runs is its own unroll; what Sebulba runs is its actor thread's program and its environments, one
after the other. shares: the microseconds of the bare program's steps, and of the network and the
environment alone in loops of their own; what is left is the tree. pong: acting on ale:pong with 50 simulations under
Sebulba, by the default settings for pixels: IMPALA's shallow convolutions and a hidden state of 256. Its ceilings are
mctx alone on the same frames, and the network alone, called once a step. Parts that are not named keep what results/planning_speed.json has of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import mctx
import numpy as np
from jax import lax

from podrace import configure, topology
from podrace.agents.search import MuZeroParams
from podrace.architectures.sebulba import Actors
from podrace.architectures.sebulba.acting import example_timestep
from podrace.architectures.sebulba.device_programs import pack
from podrace.architectures.unroll import begin, unroll
from podrace.envs import make
from podrace.envs.base import batch
from podrace.envs.host import base as host
from podrace.experiments.bench import acting_program
from podrace.networks import outside_loops
from podrace.networks.planning import decode
from podrace.run import build
from podrace.settings.agents import bind
from podrace.settings.presets import PRESETS

NUM_ENVS, LENGTH = 64, 16
SIMULATIONS = (25, 50)
PARTS = ('acting', 'shares', 'pong')


def predict(model: Any, params: Any, hidden: Any) -> Any:
  said = model.predict(params, hidden)
  return said.policy, decode(said.value, model.support)


def represent(model: Any, params: Any, timestep: Any) -> Any:
  return model.represent(params, (), jax.tree.map(lambda x: x[None], timestep))[0][0]


def searched(agent: Any, params: Any, timestep: Any, key: Any) -> Any:
  """mctx's answer to timesteps, as somebody writes it by hand."""
  model = agent.network

  def recurrent(params: Any, key: Any, action: Any, hidden: Any) -> Any:
    hidden, reward = model.dynamics(params, hidden, action)
    policy, value = predict(model, params, hidden)
    reward, discount = decode(reward, model.support), jnp.full_like(value, agent.discount)
    return mctx.RecurrentFnOutput(
      reward=reward, discount=discount, prior_logits=policy, value=value
    ), hidden

  hidden = represent(model, params, timestep)
  policy, value = predict(model, params, hidden)
  root = mctx.RootFnOutput(prior_logits=policy, value=value, embedding=hidden)
  return mctx.gumbel_muzero_policy(params, key, root, recurrent, agent.simulations).action


def networks(agent: Any, params: Any, timestep: Any) -> Any:
  """All that a search asks the network for, without a tree: the actions are the likeliest ones."""
  model = agent.network
  hidden = represent(model, params, timestep)

  def once(_: Any, carry: Any) -> Any:
    hidden, policy, total = carry
    hidden, reward = model.dynamics(params, hidden, jnp.argmax(policy, axis=-1))
    policy, value = predict(model, params, hidden)
    return hidden, policy, total + value + decode(reward, model.support)

  _, policy, total = lax.fori_loop(
    0, agent.simulations, once, (hidden, *predict(model, params, hidden))
  )
  return jnp.argmax(policy, axis=-1), total


def looped(step: Any, carry: Any) -> Callable[[int], Any]:
  """So many times LENGTH steps, (carry, key) -> carry, in one program."""

  @jax.jit
  def run(carry: Any, key: Any, loops: Any) -> Any:
    def once(i: Any, carry: Any) -> Any:
      keys = jax.random.split(jax.random.fold_in(key, i), LENGTH)
      return lax.scan(lambda c, k: (step(c, k), ()), carry, keys)[0]

    return lax.fori_loop(0, loops, once, carry)

  return lambda loops: run(carry, jax.random.key(1), jnp.int32(loops))


def bare(agent: Any, env: Any, params: Any) -> Callable[[int], Any]:
  """So many times LENGTH steps of mctx and the environment."""
  envs = batch(env, NUM_ENVS)

  def step(carry: Any, key: Any) -> Any:
    state, timestep = carry
    search_key, env_key = jax.random.split(key)
    action = searched(agent, params, timestep, search_key)
    return envs.step(state, action, jax.random.split(env_key, NUM_ENVS))

  return looped(step, jax.jit(envs.reset)(jax.random.key(0)))


def alone(function: Callable[[Any, Any], Any], timestep: Any) -> Callable[[int], Any]:
  """So many times LENGTH calls of (timestep, key) -> some numbers [B, ...], each of which waits for the one before."""

  def step(total: Any, key: Any) -> Any:
    more = total > 1e30  # never, but the compiler does not know

    def with_more(x: Any) -> Any:
      return x + more.reshape(-1, *(1,) * (x.ndim - 1)).astype(x.dtype)

    observation = jax.tree.map(with_more, timestep.observation)
    leaves = jax.tree.leaves(function(timestep._replace(observation=observation), key))
    return total + sum(jnp.sum(x, axis=tuple(range(1, x.ndim))).astype(jnp.float32) for x in leaves)

  return looped(step, jnp.zeros_like(timestep.reward))


def anakin(agent: Any, env: Any, params: Any) -> Callable[[int], Any]:
  """So many unrolls, as Anakin's program makes them."""
  envs, all_params = batch(env, NUM_ENVS), MuZeroParams(params, jnp.int32(0))

  @jax.jit
  def run(actor: Any, key: Any, loops: Any) -> Any:
    def once(i: Any, carry: Any) -> Any:
      return unroll(agent, envs, all_params, carry[0], jax.random.fold_in(key, i), LENGTH)

    # the last trajectory is what the learner would be given
    return lax.fori_loop(1, loops, once, once(jnp.int32(0), (actor,)))

  started = jax.jit(functools.partial(begin, agent, envs))(jnp.arange(NUM_ENVS), jax.random.key(0))
  return lambda loops: run(started, jax.random.key(1), jnp.int32(loops))


def called(function: Callable[[Any, Any], Any], timestep: Any) -> Callable[[int], Any]:
  """So many times LENGTH calls of a program of one step, as an actor thread makes them."""

  def step(timestep: Any, key: Any) -> Any:
    with outside_loops():  # convolutions in a loop are slower on CPU
      return function(timestep, key)

  one, key = jax.jit(step), jax.random.key(1)

  def calls(loops: int) -> None:
    for _ in range(loops * LENGTH):
      jax.block_until_ready(one(timestep, key))

  return calls


def sebulba(agent: Any, spec: Any, num_envs: int, length: int, seconds: float) -> dict[str, float]:
  """Steps/s of one actor thread: of inference and of environments, by the time in each, and of both in turn."""
  driver = build.sebulba(
    agent, spec, agent.memory(num_envs, length), topology.split_devices('0', '0'), num_envs, length, threads=1,
  )  # fmt: skip
  keys = jax.random.split(jax.random.key(0), 1)
  state, acting = driver.init(jax.random.clone(keys)), acting_program(driver)
  (pool,) = Actors(acting, {0: state.train.params}, state.key, jax.random.key(2), start=False).pools
  with contextlib.closing(pool), jax.default_device(acting.device_of(0)):
    seconds_in, calls = stepped(acting, pool, state.train.params, seconds)
  steps = calls * num_envs
  rates = {k: steps / v for k, v in seconds_in.items()}
  return rates | dict(acting=steps / sum(seconds_in.values()))


def stepped(acting: Any, pool: Any, params: Any, seconds: float) -> tuple[dict[str, float], int]:
  """The seconds in inference and in the environments, and how often both answered."""
  programs, device = acting.programs, acting.device_of(0)
  params = jax.device_put(params, device)
  env_id = jax.device_put(np.zeros(pool.num_envs, np.int32), device)
  pool.reset()
  arrival = pool.recv()
  carry = programs.begin(params, env_id, arrival.timestep, jax.random.key(0))
  keys = programs.keys(jax.random.key(1))
  taken, calls, begun = dict(inference=0.0, environments=0.0), -acting.unroll_length, 0.0
  while calls <= 0 or time.perf_counter() < begun + seconds:
    if calls == 0:  # all is compiled
      taken, begun = dict.fromkeys(taken, 0.0), time.perf_counter()
    t, start = calls % acting.unroll_length, time.perf_counter()
    numbers = pack(arrival.timestep, t, t)
    carry, action = programs.step(params, carry, keys, numbers, arrival.timestep.observation)
    action = np.asarray(action)
    middle = time.perf_counter()
    pool.send(arrival.env_id, action)
    arrival = pool.recv()
    taken['inference'] += middle - start
    taken['environments'] += time.perf_counter() - middle
    calls += 1
  return taken, calls


def measure(simulations: int, repeats: int, seconds: float) -> dict[str, Any]:
  env = make('podrace:catch')
  config = PRESETS['muzero-catch']()
  agent = bind(dataclasses.replace(config.agent, simulations=simulations), env, 100, NUM_ENVS)
  params = jax.jit(agent.network.init)(jax.random.key(0))
  makers, compile_s = {'bare': bare, 'anakin': anakin}, {}
  calls = {}
  for name, make_one in makers.items():
    calls[name] = make_one(agent, env, params)
    compile_s[name] = common.timed(lambda name=name: calls[name](1))[0]
  loops = max(1, round(seconds / common.timed(lambda: calls['bare'](1))[0]))
  taken = common.interleave(
    {name: functools.partial(f, loops) for name, f in calls.items()}, repeats
  )
  steps = loops * LENGTH * NUM_ENVS
  rates = {name: common.summary([steps / s for s in each]) for name, each in taken.items()}
  stages = [
    sebulba(agent, host.make('podrace:catch'), NUM_ENVS, LENGTH, seconds)
    for _ in range(min(repeats, 3))
  ]
  rates['sebulba'] = common.summary([x['acting'] for x in stages])
  ratio = {k: rates[k]['median'] / rates['bare']['median'] for k in ('anakin', 'sebulba')}
  return dict(
    steps_per_s=rates, over_bare=ratio, compile_s=compile_s, envs=NUM_ENVS, unroll_length=LENGTH,
    origin=common.origin(),
  )  # fmt: skip


def microseconds(calls: dict[str, Callable[[int], Any]], repeats: int, seconds: float) -> Any:
  """Of one step of all environments, in loops that are taken in turn."""
  loops = {}
  for name, call in calls.items():
    common.timed(lambda call=call: call(1))
    took = common.timed(lambda call=call: call(1))[0]
    loops[name] = max(1, round(seconds / took))
  taken = common.interleave(
    {name: functools.partial(call, loops[name]) for name, call in calls.items()}, repeats
  )
  return {
    name: common.summary([1e6 * s / (loops[name] * LENGTH) for s in each])
    for name, each in taken.items()
  }


def shares(simulations: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Where the bare program's time goes."""
  env = make('podrace:catch')
  agent = dataclasses.replace(PRESETS['muzero-catch']().agent, simulations=simulations)
  agent = bind(agent, env, 100, NUM_ENVS)
  params, envs = jax.jit(agent.network.init)(jax.random.key(0)), batch(env, NUM_ENVS)
  state, timestep = jax.jit(envs.reset)(jax.random.key(0))

  def moved(carry: Any, key: Any) -> Any:
    draw_key, env_key = jax.random.split(key)
    action = jax.random.randint(draw_key, (NUM_ENVS,), 0, env.action_space.n)
    return envs.step(carry[0], action, jax.random.split(env_key, NUM_ENVS))

  calls = dict(
    whole=bare(agent, env, params),
    network=alone(lambda t, key: networks(agent, params, t), timestep),
    environment=looped(moved, (state, timestep)),
  )
  found = microseconds(calls, repeats, seconds)
  whole, network, environment = (found[k]['median'] for k in calls)
  share = dict(network=network / whole, environment=environment / whole)
  share['search'] = 1 - sum(share.values())
  return dict(microseconds=found, share=share, envs=NUM_ENVS, origin=common.origin())


def pong(repeats: int, seconds: float) -> dict[str, Any]:
  """Acting on Pong, and its ceilings."""
  spec, simulations = host.make('ale:pong'), 50
  config = configure(env='ale:pong', agent='muzero', architecture='sebulba')
  agent = dataclasses.replace(config.agent, simulations=simulations)
  n, length = config.num_envs, config.unroll_length
  agent = bind(agent, spec, 100, n)
  stages = [sebulba(agent, spec, n, length, seconds) for _ in range(repeats)]
  params = jax.jit(agent.network.init)(jax.random.key(0))
  timestep = jax.tree.map(jnp.asarray, example_timestep(spec, n))
  calls = dict(
    mctx=called(lambda t, key: searched(agent, params, t, key), timestep),
    network=called(lambda t, key: networks(agent, params, t), timestep),
  )
  ceilings = {
    k: {x: 1e6 * n / v[y] for x, y in (('median', 'median'), ('min', 'max'), ('max', 'min'))}
    for k, v in microseconds(calls, repeats, seconds).items()
  }
  rates = {k: common.summary([x[k] for x in stages]) for k in stages[0]}
  return dict(
    steps_per_s=rates | ceilings,
    over={k: rates['acting']['median'] / x['median'] for k, x in ceilings.items()},
    envs=n, simulations=simulations, unroll_length=length, origin=common.origin(),
  )  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('parts', nargs='*', help=f'of {PARTS}; none: all')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=3.0)
  args = parser.parse_args()
  path = common.RESULTS / 'planning_speed.json'
  results: dict[str, Any] = json.loads(path.read_text())['results'] if path.exists() else {}
  parts = args.parts or PARTS
  for simulations in SIMULATIONS if 'acting' in parts else ():
    found = results[f'{simulations} simulations'] = measure(simulations, args.repeats, args.seconds)
    rates = {k: round(v['median']) for k, v in found['steps_per_s'].items()}
    print(simulations, rates, found['over_bare'], flush=True)
    common.record('planning_speed', results)
  for simulations in SIMULATIONS if 'shares' in parts else ():
    found = results[f'shares, {simulations} simulations'] = shares(
      simulations, args.repeats, args.seconds
    )
    times = {k: round(v['median']) for k, v in found['microseconds'].items()}
    print(simulations, times, found['share'], flush=True)
    common.record('planning_speed', results)
  if 'pong' in parts:
    found = results['pong, 50 simulations'] = pong(args.repeats, args.seconds)
    print({k: round(v['median'], 1) for k, v in found['steps_per_s'].items()}, found['over'])
    common.record('planning_speed', results)


if __name__ == '__main__':
  main()
