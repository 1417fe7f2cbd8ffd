"""Exported policies against the agents that they are of, on a million recorded observations each, in every runtime.

A run is trained briefly and exported. Its sampled policy then plays in 250 environments, and at each observation the
greedy agent acts, and the exported policy in NumPy, JAX and ONNX Runtime: each with a recurrent state of its own,
carried through whole episodes. Rows whose episode begins get a state of zeros. A difference of the two best logits
(or values) of at most TOLERANCE counts as a tie, in which either action is right.

Run it with OPENBLAS_NUM_THREADS=1: on a busy machine the threads of NumPy's BLAS wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
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
from podrace.policy import network as policy_network
from podrace.policy.export import export
from podrace.run.evaluate import eval_env, restore_newest_params
from podrace.settings.resolved import resolve

ENVS, STEPS = 250, 250  # of a chunk
OBSERVATIONS = 1_000_000
TOLERANCE = 1e-4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
  'mlp': ('cartpole', dict(total_steps=200_000)),
  'cnn': (
    'minatar-breakout',
    dict(total_steps=200_000, agent={'network': ActorCritic(torso='grid', activation='relu')}),
  ),
  'gru': ('memory', dict(total_steps=1_000_000)),
  'lstm, dueling': (
    'r2d2-memory',
    dict(
      total_steps=50_000,
      agent={'network': QNetwork(hidden=(32,), core='lstm', core_size=32, dueling=True)},
    ),
  ),
  'continuous': ('sac-pendulum', dict(total_steps=10_000)),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('cases', nargs='*', default=list(CASES))
  parser.add_argument('--observations', type=int, default=OBSERVATIONS)
  args = parser.parse_args()
  found = {}
  for name in args.cases:
    with tempfile.TemporaryDirectory() as folder:
      found[name] = measured(name, Path(folder), args.observations)
    print(name, json.dumps(found[name]), flush=True)
  threads = os.environ.get('OPENBLAS_NUM_THREADS', 'all cores')
  common.record('export', {'tolerance': TOLERANCE, 'blas_threads': threads, 'cases': found})


def measured(name: str, folder: Path, total: int) -> dict[str, Any]:
  """Trains, exports, compares and times one case."""
  preset, settings = CASES[name]
  config = podrace.configure(preset, **settings, devices=1)
  result = podrace.train(config, folder / 'run', quiet=True)
  about = export(folder / 'run', folder / 'policy')
  resolved = resolve(config)
  agent, env = innermost(resolved.agent), eval_env(resolved)
  _, params, _ = restore_newest_params(resolved, folder / 'run')
  policies = {runtime: load_policy(folder / 'policy', runtime) for runtime in RUNTIMES}
  compared = {runtime: Compared(policy) for runtime, policy in policies.items()}
  logits = Logits(about, folder / 'policy')
  count, ties, seen = 0, 0, None
  for observations, first, action, scores in recorded(agent, env, params, total):
    margin = margins(scores)
    count, ties = count + len(margin), ties + int((margin <= TOLERANCE).sum())
    logits.add(observations, first, scores)
    for one in compared.values():
      one.add(observations, first, action, margin)
    seen = observations
  return {
    'preset': preset, 'env': config.env, 'agent': about['agent'], 'trained_steps': about['step'],
    'episode_return': result.summary['episode_return'], 'observations': count, 'ties': ties,
    'largest_difference_of_logits': logits.largest,
    'runtimes': {
      runtime: one.found() | {'calls_per_s': rates(policies[runtime], seen)}
      for runtime, one in compared.items()
    },
  }  # fmt: skip


def scores_of(agent: Any, params: Any, state: Any, timestep: Any, action: Any) -> Any:
  """What a discrete action is the best of, [B, A]; a continuous action itself."""
  network = getattr(agent, 'network', None)
  if network is None:
    return action
  if isinstance(network, QNetwork):
    return network.mean(network.step(getattr(params, 'network', params), state.core, timestep)[0])
  return network.step(params.network, state.core, observe(params, timestep))[0].policy


def recorded(
  agent: Any, env: Any, params: Any, total: int
) -> Iterator[tuple[Any, np.ndarray, np.ndarray, np.ndarray]]:
  """Chunks of observations [T, B, ...], whether they are first, the greedy actions and their scores."""
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
  """The best score less the second best [T B]; infinite for a continuous action."""
  if scores.ndim < 3 or np.issubdtype(scores.dtype, np.integer) or scores.shape[-1] < 2:
    return np.full(scores.shape[0] * scores.shape[1], np.inf)
  two = np.sort(scores, -1)[..., -2:].reshape(-1, 2)
  return two[:, 1] - two[:, 0]


def played(step: Callable[..., Any], state: Any, observations: Any, first: np.ndarray) -> Any:
  """What `step` returns for a chunk, [T, B, ...], and the state after it."""
  outputs = []
  for t in range(len(first)):
    if state is not None:
      state = jax.tree.map(lambda x: np.where(_rows(first[t], x), 0, x).astype(x.dtype), state)
    output, state = step(jax.tree.map(lambda x, t=t: x[t], observations), state)
    outputs.append(output)
  return np.stack(outputs), state


def _rows(first: np.ndarray, x: Any) -> np.ndarray:
  return first.reshape((-1,) + (1,) * (np.ndim(x) - 1))


class Compared:
  """The actions of one runtime against the agent's."""

  def __init__(self, policy: Policy) -> None:
    self._policy, self._state = policy, None
    self._count = self._equal = self._unequal_beyond_ties = 0
    self._largest, self._discrete, self._seconds = 0.0, True, 0.0

  def add(self, observations: Any, first: Any, action: np.ndarray, margin: np.ndarray) -> None:
    began = time.perf_counter()
    found, self._state = played(self._policy.act_many, self._state, observations, first)
    self._seconds += time.perf_counter() - began
    self._count += first.size
    self._discrete = np.issubdtype(action.dtype, np.integer)
    difference = np.abs(found.astype(np.float64) - action).reshape(first.size, -1).max(-1)
    self._equal += int((difference == 0).sum())
    self._unequal_beyond_ties += int(((difference != 0) & (margin > TOLERANCE)).sum())
    self._largest = max(self._largest, float(difference.max()))

  def found(self) -> dict[str, Any]:
    common_part = {'seconds': round(self._seconds, 1)}
    if not self._discrete:
      return common_part | {'largest_difference_of_actions': self._largest}
    return common_part | {
      'equal': self._equal / self._count,
      'unequal': self._count - self._equal,
      'unequal_where_no_tie': self._unequal_beyond_ties,
    }


class Logits:
  """Logits or values in NumPy and ONNX Runtime against the agent's; those are not outputs of a policy."""

  def __init__(self, about: dict[str, Any], folder: Path) -> None:
    self._steps: dict[str, Callable[..., Any]] = {}
    self._states: dict[str, Any] = {}
    self.largest: dict[str, float] = {}
    if about['network']['head'] == 'actor':
      return
    from safetensors.numpy import load_file

    numpy = policy_network.PolicyNetwork(
      about, load_file(folder / 'params.safetensors'), _NoArgmax()
    )
    sizes = policy_network.STATES[about['network']['core']] * [about['network']['core_size']]
    self._zeros = [np.zeros((ENVS, n), np.float32) for n in sizes]
    self._steps = {'numpy': lambda x, state: numpy.step([x], state), 'onnx': _onnx_logits(folder)}
    self.largest = dict.fromkeys(self._steps, 0.0)

  def add(self, observations: Any, first: np.ndarray, scores: np.ndarray) -> None:
    for name, step in self._steps.items():
      state = self._states.get(name, self._zeros)
      found, self._states[name] = played(step, state, observations, first)
      self.largest[name] = max(self.largest[name], float(np.abs(found - scores).max()))


class _NoArgmax(policy_network.Numpy):
  def argmax(self, x: np.ndarray) -> np.ndarray:
    return x


def _onnx_logits(folder: Path) -> Callable[..., Any]:
  """The exported graph with the input of its ArgMax as the first output."""
  import onnx
  import onnxruntime

  model = onnx.load(folder / 'policy.onnx')
  (argmax,) = [n for n in model.graph.node if n.op_type == 'ArgMax']
  model.graph.output.insert(0, onnx.ValueInfoProto(name=argmax.input[0]))
  session = onnxruntime.InferenceSession(model.SerializeToString())
  names = [x.name for x in session.get_inputs()]

  def step(x: np.ndarray, state: Any) -> Any:
    logits, _, *after = session.run(None, dict(zip(names, [x, *state], strict=True)))
    return logits, after

  return step


def rates(policy: Policy, observations: Any, seconds: float = 1.0) -> dict[str, float]:
  """Calls of act() with one observation, and of act_many() with 256, in a second; the best of 3."""
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:256], observations)
  one = jax.tree.map(lambda x: x[0], flat)
  calls = {'1': lambda s: policy.act(one, s)[1], '256': lambda s: policy.act_many(flat, s)[1]}
  found = {}
  for size, call in calls.items():
    state = call(None)
    best = 0.0
    for _ in range(3):
      began, n = time.perf_counter(), 0
      while time.perf_counter() - began < seconds:
        state, n = call(state), n + 1
      best = max(best, n / (time.perf_counter() - began))
    found[size] = round(best, 1)
  return found


if __name__ == '__main__':
  main()
