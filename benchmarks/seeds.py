"""Several seeds of one configuration in one program under Anakin, as `podrace train --seeds` has them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace import topology
from podrace.architectures.anakin import Anakin
from podrace.run.build import agreement
from podrace.settings.config import Config
from podrace.settings.resolved import resolve

POINTS = 20


@dataclasses.dataclass(frozen=True)
class Trained:
  """The bound agent, the parameters of each seed, and numbers: steps, returns of each seed in the last tenth,
  seconds, compile_s, curve."""

  agent: Any
  params: list[Any]
  numbers: dict[str, Any]


def train(config: Config, seeds: int, metrics: str = '-') -> Trained:
  """Trains seeds 0 to `seeds` - 1 on `config.devices`, or one; returns are those of training episodes.

  The curve has the metrics whose names begin with `metrics` as well.
  """
  resolved = resolve(config)
  sizes = (config.num_envs, config.unroll_length, seeds)
  mesh = topology.learner_mesh(config.devices or 1)
  program = Anakin(resolved.agent, resolved.env, resolved.replay, mesh, *sizes, agreement(config))
  begin = time.perf_counter()
  keys = jnp.stack([jax.random.key(i) for i in range(seeds)])
  state = program.init(keys)
  step = program.run.lower(state, jnp.int32(1)).compile()
  compile_s = time.perf_counter() - begin
  updates, curve, done = config.total_steps // config.steps_per_update, [], 0
  begin = time.perf_counter()
  for i in range(1, POINTS + 1):
    until = updates * i // POINTS
    log, state = program.read_log(step(state, jnp.int32(until - done)))
    done, episodes = until, np.atleast_1d(log['episodes'])
    returns = np.atleast_1d(log['return_sum']) / np.maximum(episodes, 1)
    shown = {k: np.asarray(x).tolist() for k, x in log['metrics'].items() if k.startswith(metrics)}
    point = dict(step=done * config.steps_per_update, returns=returns.tolist())
    curve.append(point | dict(episodes=episodes.tolist(), **shown))
  seconds = time.perf_counter() - begin
  last = curve[-POINTS // 10 :]
  episodes = np.sum([p['episodes'] for p in last], axis=0)
  sums = np.sum([np.multiply(p['returns'], p['episodes']) for p in last], axis=0)
  returns = (sums / np.maximum(episodes, 1)).tolist()
  params = jax.device_get(state.train.params)
  each = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(seeds)]
  numbers = dict(steps=curve[-1]['step'], returns=returns, seconds=seconds, compile_s=compile_s, curve=curve)  # fmt: skip
  return Trained(resolved.agent, each if seeds > 1 else [params], numbers)
