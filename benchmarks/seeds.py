"""Several seeds of one configuration in one program under Anakin, as `podrace train --seeds` has them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace import hooks, topology
from podrace.architectures.anakin import Anakin
from podrace.envs import make
from podrace.run.build import agreement
from podrace.settings.agents import bind
from podrace.settings.config import Config

POINTS = 20


@dataclasses.dataclass(frozen=True)
class Trained:
  """What came of a training."""

  agent: Any  # bound
  params: list[Any]  # of each seed
  numbers: dict[
    str, Any
  ]  # steps, returns of each seed in the last tenth, seconds, compile_s, curve


def train(config: Config, seeds: int, metrics: str = '-') -> Trained:
  """Trains seeds 0 to `seeds` - 1; the return is that of the episodes in training.

  On `config.devices`, or one. The curve has the metrics whose names begin with `metrics` as well.
  """
  env = make(config.env)
  updates = config.total_steps // (config.num_envs * config.unroll_length)
  agent = bind(config.agent, env, updates, config.num_envs)
  replay = hooks.memory(agent, env, config.num_envs, config.unroll_length)
  mesh, sizes = (
    topology.learner_mesh(config.devices or 1),
    (config.num_envs, config.unroll_length, seeds),
  )
  program = Anakin(agent, env, replay, mesh, *sizes, agreement(config))
  begin = time.perf_counter()
  keys = jnp.stack([jax.random.key(i) for i in range(seeds)])
  state = program.init(keys if seeds > 1 else keys[0])
  step = program.run.lower(state, jnp.int32(1)).compile()
  compile_s = time.perf_counter() - begin
  curve, done = [], 0
  begin = time.perf_counter()
  for i in range(1, POINTS + 1):
    until = updates * i // POINTS
    state = step(state, jnp.int32(until - done))
    log, state = program.read_log(state)
    done = until
    episodes = np.atleast_1d(log['episodes'])
    returns = np.atleast_1d(log['return_sum']) / np.maximum(episodes, 1)
    own = {k: np.asarray(x).tolist() for k, x in log['metrics'].items() if k.startswith(metrics)}
    curve.append(dict(
      step=done * config.num_envs * config.unroll_length, returns=returns.tolist(), episodes=episodes.tolist(), **own,
    ))  # fmt: skip
  seconds = time.perf_counter() - begin
  last = curve[-POINTS // 10 :]
  episodes = np.sum([p['episodes'] for p in last], axis=0)
  sums = np.sum([np.multiply(p['returns'], p['episodes']) for p in last], axis=0)
  params = jax.device_get(state.train.params)
  each = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(seeds)]
  return Trained(agent, each if seeds > 1 else [params], dict(
    steps=curve[-1]['step'], returns=(sums / np.maximum(episodes, 1)).tolist(), seconds=seconds,
    compile_s=compile_s, curve=curve,
  ))  # fmt: skip
