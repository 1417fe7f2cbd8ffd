"""Disco: its update against numbers recorded of the released code, its rule's files, and that it learns by one."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import disco_inputs as inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_files
from gymnasium import spaces
from test_value_agents import anakin

from podrace import distributions, rules, topology
from podrace.agents.disco import Disco, Extras, divergence
from podrace.config import bind
from podrace.envs import make
from podrace.errors import UsageError
from podrace.learner import sample_learner
from podrace.networks import Predictions, Predictor
from podrace.types import ActorOutput, Sample, TimeStep, TrainState, Trajectory

SLOW = pytest.mark.slow
REFERENCE = Path(__file__).parents[1] / 'data' / 'disco_reference.json'
SPACE = spaces.Box(-1, 1, (4,), np.float32)
SMALL: dict[str, Any] = dict(hidden=(16,), model_size=8, head_hidden=(8,), predictions=12, bins=21)


def small(path: str = '', network: dict[str, Any] | None = None, **settings: Any) -> Disco:
  given = dict(lifetime=6, capacity=512, batch_size=24, min_size=64, replay_ratio=6.0) | settings
  return Disco(path or rule_files.small(), network=Predictor(**SMALL | (network or {})), **given)


# --- against the released code -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table(Predictor):
  """What is predicted in each timestep is a parameter."""

  def unroll(self, params: Any, state: Any, timesteps: Any, *args: Any) -> Any:
    return params, state

  def unroll_taken(self, params: Any, state: Any, timesteps: Any, action: Any) -> Any:
    taken = {k: rules.chosen(getattr(params, k), action) for k in ('z', 'q', 'next_policy')}
    return params._replace(**taken)


def table() -> Predictions:
  return Predictions(*(jnp.asarray(x) for x in inputs.predictions().values()))


def window_of(update: int) -> Trajectory:
  t = inputs.trajectory(update)
  last, action = t['last'], t['action'][:-1]
  zeros = np.zeros((*last.shape, 4), np.float32)
  step_type = np.where(last, 2, 1).astype(np.int8)
  step_type[1:][last[:-1]] = 0
  steps = TimeStep(zeros, t['reward'], 1 - last.astype(np.float32), step_type)
  extras = Extras(t['behaviour'][:-1])
  return Trajectory(steps, ActorOutput(action, extras), (), np.arange(inputs.B, dtype=np.int32))


def by_stream(batch: Trajectory) -> Trajectory:
  """Time and batch change places, as the learner's batches have them."""
  t, outputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (batch.timesteps, batch.outputs))
  return Trajectory(t, outputs, batch.agent_state, batch.env_id)


def learning(agent: Disco, devices: int = 1) -> Any:
  def sample(batch: Trajectory) -> Sample:
    size = batch.env_id.shape[0]
    return Sample(by_stream(batch), jnp.ones(size), jnp.arange(size))

  return jax.jit(sample_learner(agent, topology.learner_mesh(devices), sample))


def close(found: Any, expected: list[float], what: str, scale: float = 1.0) -> None:
  """To 1e-5, of the largest number where they are larger than 1."""
  x = np.asarray(expected, np.float32)
  most = scale * max(1.0, float(np.abs(x).max()))
  np.testing.assert_allclose(np.ravel(found), x, rtol=0, atol=1e-5 * most, err_msg=what)


@functools.cache
def reference() -> dict[str, Any]:
  document: dict[str, Any] = json.loads(REFERENCE.read_text())
  return document


def released_agent(cls: Any = Disco) -> Any:
  path = rule_files.released()
  network = Table(observation_space=SPACE, action_space=spaces.Discrete(inputs.A))
  return cls(path, network=network, learning_rate=inputs.LEARNING_RATE)


def test_the_update_is_that_of_the_released_code() -> None:
  """Over three updates: targets, losses, gradients, parameters, and all that the rule remembers."""
  agent, params = released_agent(), table()
  assert agent.rule_sha256 == reference()['weights_sha256']
  assert rules.KNOWN[agent.rule_sha256] == 'Disco103' and 'Disco103' in agent.opening()
  rest = dataclasses.replace(agent).init(jax.random.key(0)).rest
  train = TrainState(params, rest._replace(target=params, opt_state=agent.optimiser().init(params)))
  step = learning(agent)
  for update, expected in enumerate(reference()['updates']):
    window = window_of(update)
    check_targets(agent, train, window, expected)
    train, _, metrics = step(train, by_stream(window), jax.random.key(0))
    close(metrics['loss'], expected['total_loss'], 'loss')
    memory, moments = train.rest.memory, train.rest.moments
    close(memory.hidden, expected['hidden'], 'hidden')
    close(memory.cell, expected['cell'], 'cell')
    close(jnp.stack(moments), expected['moments'], 'moments')
    mean = unflattened(agent, train)
    for name, tree in (
      ('params', train.params),
      ('target_params', train.rest.target),
      ('mean_gradient', mean),
    ):
      shown = inputs.shown(dict(zip(inputs.SHAPES, tree, strict=True)))
      for key, numbers in expected[name].items():
        close(shown[key], numbers, f'{name} {key}', 1e-2 if name == 'mean_gradient' else 1.0)


def unflattened(agent: Disco, train: TrainState) -> Predictions:
  """Adam's mean of the gradients, as a table."""
  (mean,) = (s.mu for s in train.rest.opt_state if hasattr(s, 'mu'))
  found: Predictions = jax.flatten_util.ravel_pytree(train.params)[1](mean)
  return found


def check_targets(agent: Disco, train: TrainState, window: Trajectory, expected: Any) -> None:
  from podrace.agents.disco import inputs_of

  found = agent.estimates(train.params, train.rest.target, window)
  first, second = jnp.mean(found.advantage), jnp.mean(found.advantage**2)
  moments = agent.moved(train.rest.moments, first, second)
  told = inputs_of(train.params, train.rest.target, found, window, moments)
  targets, _ = rules.update(agent.params(), train.rest.memory, told)
  close(found.q_target, expected['q_targets'], 'q')
  close(found.advantage, expected['advantage'], 'advantage')
  close(told.scaled_advantage, expected['scaled_advantage'], 'scaled advantage')
  close(targets.policy, expected['pi_hat'], 'policy')
  close(targets.y[..., ::60], expected['y_hat'], 'y')
  close(targets.z[..., ::60], expected['z_hat'], 'z')
