"""Exported policies against their agents, on a million recorded observations each, in every runtime.

A run is trained briefly and exported. Its sampled policy then plays in 250 environments, and at each observation the greedy
agent acts, and the exported policy in NumPy, JAX and ONNX Runtime: each with a recurrent state of its own, carried through
whole episodes. Rows whose episode begins get a state of zeros. A difference of the two best logits (or values) of at most
TOLERANCE counts as a tie, in which either action is right.

Run it with OPENBLAS_NUM_THREADS=1: on a busy machine the threads of NumPy's BLAS wait for each other.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

import podrace
from podrace.agents.policy_gradient import observe
from podrace.envs.base import batch
from podrace.hooks import greedily, innermost
from podrace.networks import ActorCritic, QNetwork
from podrace.policy import RUNTIMES, Policy, load_policy
from podrace.policy.export import export
from podrace.run.evaluate import eval_env
from podrace.run.saved_params import restore_params
from podrace.settings.resolved import resolve

ENVS, STEPS = 250, 250  # of a chunk
TOLERANCE = 1e-4
CORE = QNetwork(hidden=(32,), core='lstm', core_size=32, dueling=True)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # preset, steps, changes of the agent
  'mlp': ('cartpole', 200_000, {}),
  'cnn': ('minatar-breakout', 200_000, {'network': ActorCritic(torso='grid', activation='relu')}),
  'gru': ('memory', 1_000_000, {}),
  'lstm, dueling': ('r2d2-memory', 50_000, {'network': CORE}),
  'continuous': ('sac-pendulum', 10_000, {}),
}


def scores_of(agent: Any, params: Any, state: Any, timestep: Any, action: Any) -> Any:
  """Returns the logits or values of discrete actions [B, A]; a continuous action itself."""
  network = getattr(agent, 'network', None)
  if network is None:
    return action
  if isinstance(network, QNetwork):
    return network.mean(network.step(getattr(params, 'network', params), state.core, timestep)[0])
  return network.step(params.network, state.core, observe(params, timestep))[0].policy


def recorded(agent: Any, env: Any, params: Any, total: int) -> Iterator[tuple[Any, ...]]:
  """Yields chunks of observations [T, B, ...], whether they are first, the greedy actions and their scores."""
  both, greedy = batch(env, ENVS), greedily(agent)

  def step(carry: Any, key: Any) -> Any:
    env_state, timestep, state, greedy_state = carry
    act_key, greedy_key, env_key = jax.random.split(key, 3)
    best, after = greedy.act(params, greedy_state, timestep, greedy_key)
    scores = scores_of(greedy, params, greedy_state, timestep, best.action)
    output, state = agent.act(params, state, timestep, act_key)
    env_state, new = both.step(env_state, output.action, jax.random.split(env_key, ENVS))
    seen = (timestep.observation, timestep.first, best.action, scores)
    return (env_state, new, state, after), seen

  chunk = jax.jit(lambda carry, key: jax.lax.scan(step, carry, jax.random.split(key, STEPS)))
  ids = jnp.arange(ENVS)
  carry = (*both.reset(jax.random.key(1)), agent.initial_state(ids), greedy.initial_state(ids))
  for i in range(-(-total // (ENVS * STEPS))):
    carry, seen = chunk(carry, jax.random.fold_in(jax.random.key(2), i))
    yield jax.device_get(seen)


def margins(scores: np.ndarray) -> np.ndarray:
  """Returns the best score less the second best [T B]; infinite for a continuous action."""
  if scores.ndim < 3 or np.issubdtype(scores.dtype, np.integer) or scores.shape[-1] < 2:
    return np.full(scores.shape[0] * scores.shape[1], np.inf)
  two = np.sort(scores, -1)[..., -2:].reshape(-1, 2)
  return two[:, 1] - two[:, 0]


class Comparison:
  """The actions of one runtime against the agent's."""

  def __init__(self, policy: Policy) -> None:
    self._policy, self._state = policy, None
    self._count = self._unequal = self._unequal_beyond_ties = 0
    self._largest, self._discrete, self._seconds = 0.0, True, 0.0

  def _play(self, observations: Any, first: np.ndarray) -> np.ndarray:
    """Returns the actions of a chunk, [T, B, ...], and keeps the state after it."""
    actions = []
    for t in range(len(first)):
      if self._state is not None:

        def begin(x: Any, is_first: Any = first[t]) -> Any:
          return np.where(is_first.reshape((-1,) + (1,) * (np.ndim(x) - 1)), 0, x).astype(x.dtype)

        self._state = jax.tree.map(begin, self._state)
      now = jax.tree.map(lambda x, t=t: x[t], observations)
      action, self._state = self._policy.act_many(now, self._state)
      actions.append(action)
    return np.stack(actions)

  def add(self, observations: Any, first: Any, action: np.ndarray, margin: np.ndarray) -> None:
    began = time.perf_counter()
    played = self._play(observations, first)
    self._seconds += time.perf_counter() - began
    self._discrete = np.issubdtype(action.dtype, np.integer)
    difference = np.abs(played.astype(np.float64) - action).reshape(first.size, -1).max(-1)
    self._count += first.size
    self._unequal += int((difference != 0).sum())
    self._unequal_beyond_ties += int(((difference != 0) & (margin > TOLERANCE)).sum())
    self._largest = max(self._largest, float(difference.max()))

  def result(self) -> dict[str, Any]:
    seconds = round(self._seconds, 1)
    if not self._discrete:
      return dict(seconds=seconds, largest_difference_of_actions=self._largest)
    return dict(
      seconds=seconds, equal=1 - self._unequal / self._count, unequal=self._unequal,
      unequal_where_no_tie=self._unequal_beyond_ties,
    )  # fmt: skip


def rates(policy: Policy, observations: Any, seconds: float = 1.0) -> dict[str, float]:
  """Returns calls/s of act() with one observation, and of act_many() with 256; the best of 3."""
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:256], observations)
  one = jax.tree.map(lambda x: x[0], flat)
  calls = {'1': lambda s: policy.act(one, s)[1], '256': lambda s: policy.act_many(flat, s)[1]}
  result = {}
  for size, call in calls.items():
    state, best = call(None), 0.0
    for _ in range(3):
      began, n = time.perf_counter(), 0
      while time.perf_counter() - began < seconds:
        state, n = call(state), n + 1
      best = max(best, n / (time.perf_counter() - began))
    result[size] = round(best, 1)
  return result


def measure(name: str, folder: Path, total: int, steps: int) -> dict[str, Any]:
  """Trains, exports, compares and times one case."""
  preset, all_steps, changes = CASES[name]
  config = podrace.configure(preset, total_steps=steps or all_steps, agent=changes, devices=1)
  trained = podrace.train(config, folder / 'run', quiet=True)
  about = export(folder / 'run', folder / 'policy')
  resolved = resolve(config)
  agent, env = resolved.agent, eval_env(resolved)
  agent = innermost(agent)
  _, params, _ = restore_params(resolved, folder / 'run')
  policies = {runtime: load_policy(folder / 'policy', runtime) for runtime in RUNTIMES}
  compared = {runtime: Comparison(policy) for runtime, policy in policies.items()}
  count, ties, seen = 0, 0, None
  for observations, first, action, scores in recorded(agent, env, params, total):
    margin, seen = margins(scores), observations
    count, ties = count + len(margin), ties + int((margin <= TOLERANCE).sum())
    for one in compared.values():
      one.add(observations, first, action, margin)
  return dict(
    preset=preset, env=config.env, agent=about['agent'], trained_steps=about['step'],
    episode_return=trained.summary['episode_return'], observations=count, ties=ties,
    runtimes={k: one.result() | dict(calls_per_s=rates(policies[k], seen)) for k, one in compared.items()},
  )  # fmt: skip


def main() -> None:
  args = common.arguments(__doc__, CASES, observations=1_000_000, steps=(0, 'fewer steps of training'))  # fmt: skip
  cases = {}
  for name in args.cases:
    with tempfile.TemporaryDirectory() as folder:
      cases[name] = measure(name, Path(folder), args.observations, args.steps)
    print(name, json.dumps(cases[name]), flush=True)
  threads = os.environ.get('OPENBLAS_NUM_THREADS', 'all cores')
  common.record('export', dict(tolerance=TOLERANCE, blas_threads=threads, cases=cases))


if __name__ == '__main__':
  main()
