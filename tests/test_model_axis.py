"""A model axis: the same updates, less of each parameter on a device, and that such a run is a run like any other."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from jax.sharding import PartitionSpec as P

import podrace
from podrace import cli, hooks, topology
from podrace.actor import actor_on_mesh
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.agreement import Gossip
from podrace.anakin import Anakin
from podrace.checkpoint import Checkpoints, snapshot
from podrace.config import bind, from_json, to_json
from podrace.envs import make
from podrace.envs.base import batch
from podrace.errors import UsageError
from podrace.learner import learner
from podrace.networks import ActorCritic, QNetwork
from podrace.networks.transformer import Transformer
from podrace.presets import PRESETS
from podrace.record import params_sha256
from podrace.replay import Buffer, on_policy
from podrace.sharding import train_specs
from podrace.types import TrainState

SIZES = Transformer(layers=1, width=16, heads=8)
TINY = ActorCritic(torso='transformer', transformer=SIZES, hidden=(8,), initializer='lecun')
quickly = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


def program(agent: Any, devices: int, model: int, seeds: int = 1, envs: int = 8) -> Anakin:
  world = make('podrace:catch')
  agent = bind(agent, world, 100, envs)
  replay, mesh = hooks.memory(agent, world, envs, 8), topology.learner_mesh(devices, model)
  return Anakin(agent, world, replay, mesh, envs, 8, seeds)


def close(found: Any, expected: Any, atol: float = 2e-6) -> None:
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol)


# --- the same update ----------------------------------------------------------------------------


@functools.cache
def experience(normalize: bool) -> tuple[Any, Any]:
  """The beginning of an agent, and trajectories of 16 environments."""
  agent = bind(Impala(TINY, normalize_observations=normalize), make('podrace:catch'), 100, 16)
  train = quickly(agent.init)(jax.random.key(0))
  start, unroll = actor_on_mesh(agent, batch(agent_env(), 16), topology.learner_mesh(1), 8)
  actor = quickly(start)(jnp.arange(16), jax.random.key(1))
  return train, jax.device_get(quickly(unroll)(train.params, actor, jax.random.key(2))[1])


def agent_env() -> Any:
  return make('podrace:catch')


@functools.cache
def updated(kind: Any, data: int, model: int) -> tuple[Any, Any]:
  """Parameters and metrics after three updates on `data` x `model` devices, from the same trajectories."""
  mesh = topology.learner_mesh(data * model, model)
  agent = bind(kind(TINY, normalize_observations=True), agent_env(), 100, 16)
  train, trajectory = experience(True)
  with topology.on_mesh(mesh):
    train = TrainState(train.params, agent.optimiser().init(train.params.network))
  specs = train_specs(agent, train, mesh)
  shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
  train = jax.device_put(train, shardings)

  def learn(train: Any) -> Any:
    step = learner(agent, on_policy(), mesh)
    for k in range(3):
      train, _, metrics, _ = step(train, (), trajectory, jax.random.key(3 + k), jnp.int32(k))
    return train, metrics

  train, metrics = quickly(learn, out_shardings=(shardings, None))(train)
  return jax.device_get((train.params, metrics))


@pytest.mark.parametrize('shape', [(4, 2), (1, 8)])
@pytest.mark.parametrize('kind', [Impala, PPO])
def test_the_same_update_on_8_devices_however_they_are_grouped(
  kind: Any, shape: tuple[int, int]
) -> None:
  """To the tolerance of float32 sums in another order, after three updates with Adam."""
  (params, metrics), (expected, of_data) = updated(kind, *shape), updated(kind, 8, 1)
  begun = experience(True)[0].params
  moved = [
    float(np.abs(x - y).max())
    for x, y in zip(jax.tree.leaves(expected.network), jax.tree.leaves(begun.network), strict=True)
  ]
  assert max(moved) > 1e-3
  close(params, expected, atol=2e-5)
  close(metrics, of_data, atol=2e-5)
