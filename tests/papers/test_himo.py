"""Hindsight modelling: losses against NumPy, the order of errors, and runs."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import himo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import streams
from resumes import assert_resumes_exactly

import podrace
from podrace import cli
from podrace.envs.contract import check
from podrace.learner import learner
from podrace.replay import on_policy
from podrace.topology import learner_mesh
from podrace.types import ActorOutput, TimeStep, Trajectory

T, B, N = 6, 4, 5
NETWORK = himo.HindsightNetwork(hidden=7, inputs=N, actions=3)
AGENT = himo.HiMo(NETWORK, k=2, alpha=0.7, entropy_cost=0.3)


# --- losses in NumPy, float64, with stopped values at other parameters ----------------------------


def mlp(layers: Any, *inputs: np.ndarray, final: bool = False) -> np.ndarray:
  x = np.concatenate(inputs, -1)
  for i, (w, b) in enumerate(layers):
    x = x @ w + (b if x.ndim > 1 else b[0])
    x = np.maximum(x, 0.0) if final or i < len(layers) - 1 else x
  return x


def regression_loss(p: Any, fixed: Any, x: Any, x_next: Any, r: Any) -> float:
  """Equation 3 of the paper; `fixed` are the parameters behind stop_gradient."""
  h, h_fixed = mlp(p['h'], x, final=True), mlp(fixed['h'], x, final=True)
  v = mlp(p['v'], h, mlp(fixed['phi_hat'], h_fixed))[:, 0]
  plus = mlp(p['v_plus'], h, mlp(p['phi'], x_next))[:, 0]
  model = (mlp(p['phi_hat'], h) - mlp(fixed['phi'], x_next)) ** 2
  return np.mean((v - r) ** 2) + np.mean((plus - r) ** 2) + 3.0 * np.mean(model)


def heads(p: Any, fixed: Any, x: np.ndarray, hindsight: bool) -> tuple[np.ndarray, ...]:
  h = mlp(p['h'], x, final=True)
  phi_hat = mlp(p['phi_hat'], h)
  seen = mlp(fixed['phi_hat'], mlp(fixed['h'], x, final=True)) if hindsight else phi_hat
  logits = mlp(p['policy'], h, seen)
  log_policy = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
  return phi_hat, log_policy, mlp(p['v'], h, seen)[..., 0]


def agent_loss(p: Any, fixed: Any, agent: Any, trajectory: Trajectory) -> float:
  """One transition after the other; V-trace by its recursion."""
  steps, outputs = trajectory.timesteps, trajectory.outputs
  phi_hat, log_policy, value = heads(p, fixed, steps.observation, agent.hindsight)
  _, fixed_policy, v = heads(fixed, fixed, steps.observation, agent.hindsight)
  h_fixed = mlp(fixed['h'], steps.observation, final=True)
  last, discount, total = steps.last, agent.discount * steps.discount, 0.0
  for b in range(B):
    target, following = v[T, b], v[T, b]
    for t in reversed(range(T)):
      if last[t + 1, b]:
        following = v[t + 1, b]  # nothing passes the end of an episode
      a = outputs.action[t, b]
      rho = min(1.0, np.exp(fixed_policy[t, b, a] - outputs.extras[t, b]))
      q = steps.reward[t + 1, b] + discount[t + 1, b] * following
      one_step = steps.reward[t + 1, b] + discount[t + 1, b] * v[t + 1, b] - v[t, b]
      trace = 0.0 if last[t + 1, b] else discount[t + 1, b] * (target - v[t + 1, b])
      target = v[t, b] + rho * (one_step + trace)
      advantage, following = rho * (q - v[t, b]), target
      if last[t, b]:
        continue
      j = t
      while j < min(t + agent.k, T) and not (j > t and last[j, b]):
        j += 1
      phi = mlp(p['phi'], steps.observation[j, b])
      plus = mlp(p['v_plus'], h_fixed[t, b], phi)[0]
      total -= advantage * log_policy[t, b, a]
      total += agent.entropy_cost * np.sum(np.exp(log_policy[t, b]) * log_policy[t, b])
      total += (target - value[t, b]) ** 2
      if agent.hindsight:
        model = mlp(fixed['phi'], steps.observation[j, b]) - phi_hat[t, b]
        total += agent.alpha * (target - plus) ** 2 + agent.beta * np.mean(model**2)
  return total / (T * B)


def assert_equal(loss: Any, reference: Any, params: Any) -> None:
  """Compares loss and gradients; the reference's are central differences in random directions."""
  rng, eps = np.random.default_rng(0), 1e-6
  exact = jax.tree.map(lambda x: np.float64(x) + rng.normal(0.0, 0.1, x.shape), params)
  single = jax.tree.map(np.float32, exact)
  value, grads = jax.device_get(jax.jit(jax.value_and_grad(loss))(single))
  np.testing.assert_allclose(value, reference(exact, exact), rtol=1e-5)
  for name in params:
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), exact[name])

    def moved(sign: float) -> Any:
      step = jax.tree.map(lambda x, d: x + sign * eps * d, exact[name], direction)
      return reference(exact | {name: step}, exact)

    expected = (moved(1.0) - moved(-1.0)) / (2 * eps)
    products = jax.tree.map(lambda g, d: np.sum(g * d), grads[name], direction)
    actual = sum(jax.tree.leaves(products))
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_the_loss_of_the_regression() -> None:
  rng = np.random.default_rng(1)
  x, x_next = rng.normal(size=(2, 9, himo.D)).astype(np.float32)
  r = rng.normal(size=9).astype(np.float32)
  assert_equal(
    lambda p: himo.regression_loss(p, x, x_next, r, 'himo')[0],
    lambda p, fixed: regression_loss(p, fixed, x, x_next, r),
    himo.HindsightNetwork().init(jax.random.key(0)),
  )


def random_trajectory() -> Trajectory:
  rng = np.random.default_rng(2)
  steps = TimeStep(*jax.tree.map(jnp.asarray, streams.timesteps(rng, T + 1, B, streams.floats(N))))
  outputs = ActorOutput(
    jnp.asarray(rng.integers(0, 3, (T, B))), jnp.asarray(rng.uniform(-2, -0.2, (T, B)), jnp.float32)
  )
  return Trajectory(steps, outputs, (), jnp.arange(B))


@pytest.mark.parametrize('hindsight', [True, False])
def test_the_loss_of_the_agent(hindsight: bool) -> None:
  agent, trajectory = dataclasses.replace(AGENT, hindsight=hindsight), random_trajectory()
  exact = jax.tree.map(np.asarray, trajectory)
  assert exact.timesteps.last[1:-1].any()
  assert_equal(
    lambda p: agent.loss(p, trajectory, jax.random.key(0))[0],
    lambda p, fixed: agent_loss(p, fixed, agent, exact),
    jax.jit(NETWORK.init)(jax.random.key(0)),
  )


# --- the effect -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_hindsight_learns_fastest_and_the_whole_model_slowest() -> None:
  """After a quarter of the paper's iterations."""
  key = jax.random.key(100)
  train = jax.jit(himo.regression, static_argnums=(1, 2))
  curves = (train(jax.random.clone(key), m, 2_000) for m in ('direct', 'himo', 'model'))
  (direct,), (v_m, v_plus), (model,) = ([float(x[-1]) for x in c] for c in curves)
  assert v_plus < 0.5 * v_m and v_m < 0.85 * direct and direct < model


# --- runs -----------------------------------------------------------------------------------------


def test_bet_is_an_environment() -> None:
  check(himo.bet(instance=3), key=jax.random.key(0), steps=50)


@pytest.mark.slow
def test_a_run_resumes_exactly(tmp_path: Path) -> None:
  config = podrace.configure(
    env='python:himo.bet', agent=himo.HiMo(), num_envs=8, unroll_length=4, total_steps=640,
    log_every=320, devices=1,
  )  # fmt: skip
  assert_resumes_exactly(config, 320, tmp_path)


@pytest.mark.slow
def test_the_command_names_the_evaluation_of_an_agent_that_is_never_greedy(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  sizes = ['--num-envs', '8', '--unroll-length', '4', '--total-steps', '64', '--devices', '1']
  run = ['--agent', 'himo:HiMo', '--env', 'python:himo.bet', '--run-dir', str(tmp_path / 'run')]

  def output_of(*args: str) -> str:
    with pytest.raises(SystemExit) as end:
      cli.main(args)
    assert end.value.code == 0
    return capsys.readouterr().out

  (hint,) = re.findall(r'next: podrace (eval .*)', output_of('train', *run, *sizes))
  assert '--sample' in hint
  assert '"episodes": 2' in output_of(*shlex.split(hint.replace('--episodes 100', '--episodes 2')))


@pytest.mark.slow
def test_two_devices_make_the_same_update() -> None:
  params = []
  for devices in (1, 2):
    step = jax.jit(learner(AGENT, on_policy(), learner_mesh(devices)))
    train = jax.jit(AGENT.init)(jax.random.key(0))
    train, *_ = step(train, (), random_trajectory(), jax.random.key(1), jnp.int32(0))
    params.append(train.params)
  assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), *params))
