"""AVRIL: its loss against NumPy, what it learns from a log, exact resume, two devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import avril
import gymnasium
import jax
import numpy as np
import pytest
import streams
from data_sets import balance, collected

import podrace
from podrace.replay import Buffer
from podrace.types import TimeStep

B, N, A = 24, 4, 3


# --- the loss -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Linear:
  """A network [.., N] -> [.., A, atoms] that NumPy can compute as well."""

  atoms: int

  def unroll(self, params: Any, state: Any, timesteps: TimeStep) -> tuple[Any, Any]:
    x = timesteps.observation @ params
    return x.reshape(*x.shape[:-1], A, self.atoms), state


def reference(agent: Any, params: Any, trajectory: Any) -> float:
  """One pair after the other, in float64; nothing is stopped."""
  steps, total = trajectory.timesteps, 0.0
  for b in range(B):
    if steps.last[0, b] or steps.last[1, b]:
      continue
    a, following = trajectory.outputs.action[:2, b]
    x, x_next = steps.observation[0, b].astype(float), steps.observation[1, b].astype(float)
    q = x @ params['q']
    error = q[a] - agent.discount * (x_next @ params['q'])[following]
    mean, log_std = (x @ params['reward']).reshape(A, 2)[a]
    variance = np.exp(2 * log_std)
    policy = np.exp(agent.beta * q) / np.sum(np.exp(agent.beta * q))
    total += np.log(policy[a])
    total -= 0.5 * (variance + mean**2 - 1 - np.log(variance))
    density = np.exp(-0.5 * (error - mean) ** 2 / variance) / np.sqrt(2 * np.pi * variance)
    total += agent.likelihood * np.log(density)
  return -total / B


def test_the_loss_and_its_gradient() -> None:
  agent = avril.AVRIL(Linear(1), Linear(2), discount=0.8, beta=1.7, likelihood=0.6)
  rng = np.random.default_rng(0)
  steps = streams.timesteps(rng, 3, B, streams.floats(N))
  assert steps.last[0].any() and (steps.last[1] & ~steps.last[0]).any() and not steps.last.all()
  trajectory = streams.trajectory(steps, rng.integers(0, A, (2, B)), (), ())
  params = dict(q=rng.normal(size=(N, A)), reward=0.5 * rng.normal(size=(N, 2 * A)))
  both = jax.jit(jax.value_and_grad(agent.loss, has_aux=True))
  (loss, _), grads = jax.device_get(both(jax.tree.map(np.float32, params), trajectory))
  np.testing.assert_allclose(loss, reference(agent, params, trajectory), rtol=1e-5)
  for name, x in params.items():
    for index in np.ndindex(*x.shape):
      moved = [reference(agent, params | {name: x + e * unit(x, index)}, trajectory) for e in EPS]
      expected = (moved[0] - moved[1]) / (EPS[0] - EPS[1])
      np.testing.assert_allclose(grads[name][index], expected, rtol=1e-3, atol=1e-4)


EPS = (1e-5, -1e-5)


def unit(x: np.ndarray, index: Any) -> np.ndarray:
  e = np.zeros(x.shape)
  e[index] = 1.0
  return e


# --- runs from a log ------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Ten episodes of a policy that balances the pole, cut after 60 steps."""
  env = gymnasium.make('CartPole-v1')
  return collected(tmp_path_factory.mktemp('home'), 'cartpole-v0', env, 10, balance, steps=60)[0]


def learned(run_dir: Path, log: Path, steps: int) -> Any:
  """Learn on two devices; with the same directory, go on."""
  buffer = Buffer(capacity=2_000, min_size=640, batch_size=64, samples_per_insert=8.0)
  config = podrace.configure(
    agent=avril.AVRIL(buffer=buffer, learning_rate=3e-3), log=str(log), num_envs=8, unroll_length=16,
    total_steps=steps, log_every=640, devices=2,
  )  # fmt: skip
  return podrace.train(config, run_dir, override=True, quiet=True)


@pytest.mark.slow
def test_it_imitates_and_its_rewards_explain_its_values(log: Path, tmp_path: Path) -> None:
  """Resumed from the half it ends with the same bytes, and it balances the pole for longer than it has seen."""
  whole = learned(tmp_path / 'whole', log, 5_120)
  half = learned(tmp_path / 'half', log, 2_560)
  resumed = learned(tmp_path / 'half', log, 5_120)
  hashes = [x.summary['params_sha256'] for x in (whole, half, resumed)]
  assert hashes[0] == hashes[2] != hashes[1]
  line = whole.metrics[-1]
  assert line['imitation'] > -0.35  # log(1/2) is -0.69
  assert line['likelihood'] > -0.3  # of a posterior that is the prior, at most -0.92
  returns = whole.evaluate(10, env='gymnax:CartPole-v1', acting='greedy')
  assert returns['episode_return_mean'] > 150
  assert 'sampled_episodes' not in returns
