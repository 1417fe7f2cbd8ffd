"""Kernels of an update, and the parts that make them few: packed steps, resets drawn ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shorthand import slow_after

from podrace import distributions, envs, returns
from podrace.agents import policy_gradient
from podrace.architectures.packing import Packing
from podrace.envs.base import batch
from podrace.types import MID, TimeStep

ROOT = Path(__file__).parents[2]
PINNED = f'jax=={jax.__version__}' in (ROOT / 'constraints.txt').read_text(encoding='utf-8')
# name -> operations, branches of an update compiled for a CPU
COUNTS = {'catch': (3_184, 0), 'ppo-cartpole': (66_876, 0), 'dqn-cartpole': (3_336, 0)}


@pytest.mark.skipif(not PINNED, reason='other versions of XLA join other operations')
@pytest.mark.parametrize('name', slow_after(1, *COUNTS))
def test_an_update_starts_few_kernels(name: str) -> None:
  """A bound that breaks if somebody adds a hundred operations to an update, or a branch to a step."""
  environ = {k: v for k, v in os.environ.items() if not k.startswith('JAX_COMPILATION')}
  command = [sys.executable, 'benchmarks/gpu/count_kernels.py', '--cpu', name]
  out = subprocess.run(
    command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
  ).stdout
  counts = {line.split()[0]: json.loads(line[line.index('{') :]) for line in out.splitlines()}
  assert set(counts) == {name}
  operations, branches = COUNTS[name]
  assert 0.5 * operations < counts[name]['by_program'] < operations + 50
  assert counts[name]['conditionals'] == branches


def test_packing_changes_no_bit() -> None:
  rng = np.random.default_rng(0)
  floats = rng.integers(0, 2**32, [3, 2, 4], dtype=np.uint32).view(np.float32)  # NaNs, too
  tree = dict(
    floats=floats,
    step=rng.integers(-128, 128, [3, 2]).astype(np.int8),
    byte=rng.integers(0, 256, [3, 2, 2, 2]).astype(np.uint8),
    flag=np.array([[True, False]] * 3),
    number=rng.integers(-(2**31), 2**31, [3, 2]).astype(np.int32),
    half=rng.normal(size=[3, 2]).astype(np.float16),
    image=rng.integers(0, 256, [3, 2, 5, 5]).astype(np.uint8),
    none=np.zeros([3, 2, 0], np.float32),
  )
  packing = Packing()
  _, packed = jax.lax.scan(lambda c, x: (c, packing.pack(x)), 0, jax.tree.map(jnp.asarray, tree))
  words, others = packed
  assert words.shape == (3, 4 + 1 + 4 + 1 + 1, 2) and len(others) == 3
  after = packing.unpack(packed)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
    lambda x: (x.shape, x.dtype), tree
  )
  for name, x in tree.items():
    assert np.asarray(after[name]).tobytes() == x.tobytes(), name


@pytest.mark.parametrize(
  'name', slow_after(2, 'podrace:catch', 'gymnax:CartPole-v1', 'gymnax:Asterix-MinAtar')
)
def test_draws_of_all_steps_at_once_are_the_draws_of_each_step(name: str) -> None:
  steps, n = 30, 5
  env = envs.make(name)
  many = batch(env, n)
  begin, _ = many.reset(jax.random.key(0))
  action = jnp.arange(n, dtype=jnp.int32) % 2

  def keys() -> jax.Array:
    return jax.random.split(jax.random.key(1), (steps, n))

  @jax.jit
  def one_by_one() -> TimeStep:
    return jax.lax.scan(lambda s, k: jax.vmap(env.step)(s, action, k), begin, keys())[1]

  @jax.jit
  def ahead() -> TimeStep:
    draws = jax.vmap(many.draw)(keys())
    return jax.lax.scan(lambda s, d: many.step_drawn(s, action, d), begin, draws)[1]

  timesteps, expected = ahead(), one_by_one()
  np.testing.assert_array_equal(timesteps.step_type, expected.step_type)
  for x, y in zip(jax.tree.leaves(timesteps), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)  # XLA joins a product and a sum, or not
  assert np.any(timesteps.step_type != MID)  # an episode has ended


def test_a_cheap_reset_is_drawn_ahead_and_a_costly_one_is_not() -> None:
  sizes = {}
  for name in ('gymnax:CartPole-v1', 'gymnax:Asterix-MinAtar'):
    many = batch(envs.make(name), 2)
    draws = jax.eval_shape(many.draw, jax.random.split(jax.random.key(0), 2))
    sizes[name] = len(jax.tree.leaves(draws))
  assert sizes['gymnax:Asterix-MinAtar'] == 2  # the keys of a step and of a reset
  assert sizes['gymnax:CartPole-v1'] > 5  # a state and its timestep


def test_few_actions_on_a_gpu_are_drawn_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
  policy = distributions.Categorical(4)
  logits = 3 * jax.random.normal(jax.random.key(0), [5_000, 4])
  logits = logits.at[::3, 1].set(distributions.MASKED)
  expected, expected_log_prob = policy_gradient.draw(policy, logits, jax.random.key(1))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  x, log_prob = policy_gradient.draw(policy, logits, jax.random.key(1))
  np.testing.assert_array_equal(x, expected)
  np.testing.assert_allclose(log_prob, expected_log_prob, rtol=1e-5, atol=1e-6)
  assert not np.any(np.asarray(x)[::3] == 1)


@pytest.mark.parametrize('length', [1, 2, 3, 16, 37, 128])
def test_a_recursion_on_a_gpu_is_that_on_a_cpu(
  length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  x, decay = jax.random.normal(jax.random.key(0), [2, length])
  expected = returns.discounted_sum(x, decay)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  np.testing.assert_allclose(returns.discounted_sum(x, decay), expected, rtol=1e-5, atol=1e-6)
