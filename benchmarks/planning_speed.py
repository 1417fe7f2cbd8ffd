"""Acting with a search, steps/s: under Anakin and under Sebulba, against mctx alone with the same network.

    .venv/bin/python benchmarks/planning_speed.py [--repeats 5] [--seconds 3]

MuZero with the model of the preset muzero-catch acts on Catch, with 25 and with 50 simulations. The bare program is
one loop of representation, mctx's Gumbel policy and the environment, compiled as a whole, which keeps nothing. What
Anakin runs is its own unroll; what Sebulba runs is its actor thread's program and its environments, each measured
alone and added up. Writes results/planning_speed.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import mctx
from jax import lax

from podrace import build, topology
from podrace.actor import begin, unroll
from podrace.agents.searching import Params
from podrace.bench import acting_of, environment_rate, inference_rate
from podrace.config import bind
from podrace.envs import make
from podrace.envs.base import batch
from podrace.envs.host import base as host
from podrace.networks.planning import decode
from podrace.presets import muzero_catch

NUM_ENVS, LENGTH = 64, 16
SIMULATIONS = (25, 50)


def bare(agent: Any, env: Any, params: Any) -> Callable[[int], Any]:
  """So many times LENGTH steps of mctx and the environment, as somebody writes them by hand."""
  model, envs = agent.network, batch(env, NUM_ENVS)

  def predict(params: Any, hidden: Any) -> Any:
    said = model.predict(params, hidden)
    return said.policy, decode(said.value, model.support)

  def recurrent(params: Any, key: Any, action: Any, hidden: Any) -> Any:
    hidden, reward = model.dynamics(params, hidden, action)
    policy, value = predict(params, hidden)
    reward, discount = decode(reward, model.support), jnp.full_like(value, agent.discount)
    return mctx.RecurrentFnOutput(
      reward=reward, discount=discount, prior_logits=policy, value=value
    ), hidden

  def step(carry: Any, key: Any) -> Any:
    state, timestep = carry
    search_key, env_key = jax.random.split(key)
    one = jax.tree.map(lambda x: x[None], timestep)
    hidden = model.represent(params, (), one)[0][0]
    policy, value = predict(params, hidden)
    root = mctx.RootFnOutput(prior_logits=policy, value=value, embedding=hidden)
    found = mctx.gumbel_muzero_policy(params, search_key, root, recurrent, agent.simulations)
    return envs.step(state, found.action, jax.random.split(env_key, NUM_ENVS)), ()

  @jax.jit
  def run(carry: Any, key: Any, loops: Any) -> Any:
    def once(i: Any, carry: Any) -> Any:
      return lax.scan(step, carry, jax.random.split(jax.random.fold_in(key, i), LENGTH))[0]

    return lax.fori_loop(0, loops, once, carry)

  carry = jax.jit(envs.reset)(jax.random.key(0))
  return lambda loops: run(carry, jax.random.key(1), jnp.int32(loops))


def anakin(agent: Any, env: Any, params: Any) -> Callable[[int], Any]:
  """So many unrolls, as Anakin's program makes them."""
  envs, all_params = batch(env, NUM_ENVS), Params(params, jnp.int32(0))

  @jax.jit
  def run(actor: Any, key: Any, loops: Any) -> Any:
    def once(i: Any, carry: Any) -> Any:
      return unroll(agent, envs, all_params, carry[0], jax.random.fold_in(key, i), LENGTH)

    # the last trajectory is what the learner would be given
    return lax.fori_loop(1, loops, once, once(jnp.int32(0), (actor,)))

  started = jax.jit(functools.partial(begin, agent, envs))(jnp.arange(NUM_ENVS), jax.random.key(0))
  return lambda loops: run(started, jax.random.key(1), jnp.int32(loops))


def sebulba(agent: Any, seconds: float) -> float:
  """Steps/s of one actor thread: 1 / (1 / inference + 1 / environments)."""
  spec = host.make('podrace:catch')
  driver = build.sebulba(
    agent, spec, agent.memory(NUM_ENVS, LENGTH), topology.split_devices('0', '0'), NUM_ENVS, LENGTH, threads=1,
  )  # fmt: skip
  keys = jax.random.split(jax.random.key(0), 1)
  state = driver.init(jax.random.clone(keys))
  acting = acting_of(driver)
  rates = (
    inference_rate(acting, state, seconds),
    environment_rate(acting, state, keys, seconds),
  )
  return 1 / sum(1 / r for r in rates)


def measure(simulations: int, repeats: int, seconds: float) -> dict[str, Any]:
  env = make('podrace:catch')
  config = muzero_catch()
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
  rates['sebulba'] = common.summary([sebulba(agent, seconds) for _ in range(min(repeats, 3))])
  ratio = {k: rates[k]['median'] / rates['bare']['median'] for k in ('anakin', 'sebulba')}
  return dict(
    steps_per_s=rates, over_bare=ratio, compile_s=compile_s, envs=NUM_ENVS, unroll_length=LENGTH
  )  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=3.0)
  args = parser.parse_args()
  results = {}
  for simulations in SIMULATIONS:
    found = results[f'{simulations} simulations'] = measure(simulations, args.repeats, args.seconds)
    rates = {k: round(v['median']) for k, v in found['steps_per_s'].items()}
    print(simulations, rates, found['over_bare'], flush=True)
    common.record('planning_speed', results)


if __name__ == '__main__':
  main()
