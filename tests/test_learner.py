"""The learner step: the same on one device and on many, and how little they say to each other."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import streams
from collectives import COLLECTIVES, Collective, collectives
from compiling import jit
from gymnasium import spaces
from jax.sharding import PartitionSpec as P

from podrace import topology
from podrace.agents import minibatch, policy_gradient, ppo
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.architectures.anakin import Anakin
from podrace.envs import make
from podrace.learner import device_step, empty_log, learner, sample_learner, sgd
from podrace.networks import ActorCritic, body
from podrace.replay import on_policy
from podrace.types import Sample, TimeStep, TrainState, Trajectory

T, B = 8, 16
OBSERVATION = spaces.Box(-10, 10, (3,), np.float32)

# Here compiling takes the time, not running.


# --- sgd --------------------------------------------------------------------------------------


@pytest.mark.parametrize('chunks', [None, 1, 2])
@pytest.mark.parametrize('check_vma', [True, False])
@pytest.mark.parametrize('devices', [1, 8])
def test_sgd_takes_the_gradient_of_the_whole_batch(
  devices: int, check_vma: bool, chunks: int | None
) -> None:
  rng = np.random.default_rng(0)
  x, y = (rng.normal(size=s).astype(np.float32) for s in ((B, 3), (B,)))
  w = rng.normal(size=3).astype(np.float32)

  def loss(w: Any, xy: Any) -> Any:
    error = xy[0] @ w['w'] - xy[1]
    return jnp.mean(error**2), dict(error=jnp.mean(error))

  def step(params: Any, xy: Any) -> Any:
    optimizer = optax.sgd(0.5)
    state = optimizer.init(params)
    if chunks is None:
      params, _, aux = sgd(lambda w: loss(w, xy), optimizer, params, state)
    else:
      parts = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), xy)
      params, _, aux = sgd(loss, optimizer, params, state, parts)
    return params, aux

  step = jax.shard_map(
    step, mesh=topology.learner_mesh(devices), in_specs=(P(), P(topology.AXIS)), out_specs=P(),
    check_vma=check_vma,
  )  # fmt: skip
  params, aux = jit(step)({'w': w}, (x, y))
  error = np.float64(x) @ w - y
  gradient = 2 * error @ x / B  # by hand
  # a sum of 16 float32 products
  np.testing.assert_allclose(params['w'], w - 0.5 * gradient, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(aux['error'], error.mean(), rtol=1e-6, atol=1e-6)


def test_sgd_keeps_nothing_of_chunks() -> None:
  with pytest.raises(ValueError, match=r'`keep`.*`chunks`'):
    sgd(lambda w, c: (0.0, ({}, w)), optax.sgd(1.0), {}, (), chunks=jnp.zeros(2), keep=True)


@pytest.mark.parametrize('name', ['step', 'episode_return', 'policy_lag_mean', 'actor_env'])
def test_what_the_run_writes_is_no_name_for_a_metric(name: str) -> None:
  with pytest.raises(ValueError, match=f'learn reports {name}, which is what the run itself'):
    empty_log({'loss': jnp.zeros([]), 'actor_loss': jnp.zeros([]), name: jnp.zeros([])})


@dataclasses.dataclass(frozen=True)
class Foreign:
  """An agent whose `learn` has a loop that starts from a literal, as other people's code has."""

  def learn(self, train: Any, sample: Any, key: Any) -> Any:
    reward = sample.trajectory.timesteps.reward
    total, _ = jax.lax.scan(lambda t, r: (t + r.sum(), ()), 0.0, reward)
    loss = jax.lax.pmean(total, topology.AXIS)
    return train._replace(params=train.params + loss), jnp.ones_like(sample.weight), {'loss': loss}


@dataclasses.dataclass(frozen=True)
class Unchecked(Foreign):
  check_vma = False


def test_an_agent_may_leave_the_check_of_what_is_equal() -> None:
  given = (
    TrainState(jnp.float32(1), ()),
    (),
    trajectory('ppo', 0),
    jax.random.key(0),
    jnp.int32(0),
  )
  mesh = topology.learner_mesh(2)
  with pytest.raises(Exception, match='varying'):
    jax.eval_shape(learner(Foreign(), on_policy(), mesh), *given)
  train, *_ = jit(learner(Unchecked(), on_policy(), mesh))(*given)
  expected = 1 + given[2].timesteps.reward.sum() / 2
  np.testing.assert_allclose(train.params, expected, rtol=1e-5)

  def sample(reward: Any) -> Sample:  # of one step, [B]
    steps = TimeStep((), reward[None], reward[None], reward[None])
    return Sample(Trajectory(steps, (), (), reward), reward, reward)

  def batch(agent: Any) -> Any:
    return sample_learner(agent, mesh, sample)

  with pytest.raises(Exception, match='varying'):
    jax.eval_shape(batch(Foreign()), given[0], jnp.ones(4), given[3])
  train, *_ = jit(batch(Unchecked()))(given[0], jnp.ones(4), given[3])
  assert float(train.params) == 1 + 2


# --- the same update on any number of devices -------------------------------------------------


def network(**settings: Any) -> ActorCritic:
  return ActorCritic(hidden=(8,), core_size=4, **settings).bind(OBSERVATION, spaces.Discrete(3))


NORMALIZE = dict(normalize_observations=True, normalize_rewards=True)
AGENTS = {
  'ppo': PPO(network(shared=False), total_updates=100),
  'ppo, normalized': PPO(network(shared=False), total_updates=100, **NORMALIZE),
  'ppo, advantages as they are': PPO(
    network(shared=False), total_updates=100, normalize_advantages=False
  ),
  'ppo, in chunks': PPO(network(shared=False), total_updates=100),
  'ppo, recurrent': PPO(network(core='gru'), total_updates=100, minibatches=1),
  'impala': Impala(network(initializer='lecun')),
  'impala, normalized': Impala(network(initializer='lecun'), **NORMALIZE),
  'impala, recurrent': Impala(network(core='lstm')),
  'impala, rmsprop': Impala(
    network(), optimizer='rmsprop', anneal_learning_rate=True, total_updates=9
  ),
  'ppo, popart': PPO(network(shared=False), total_updates=100, normalize_values=True),
  'impala, popart': Impala(network(initializer='lecun'), normalize_values=True),
  'impala, self-tuning': Impala(network(core='gru'), self_tuning=True, **NORMALIZE),
  'ppo, self-tuning': PPO(network(shared=False), total_updates=100, self_tuning=True),
}


@functools.cache
def trajectory(name: str, seed: int) -> Trajectory:
  """Random, from a policy that is not quite the agent's."""
  agent = AGENTS[name]
  rng = np.random.default_rng(seed)
  steps = streams.timesteps(rng, T + 1, B, streams.floats(3))
  steps = steps._replace(observation=3 * steps.observation + 1)
  core = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), agent.network.initial_state(B)
  )
  x = rng.integers(0, 3, (T, B)).astype(np.int32)
  log_prob = (-1.1 + rng.normal(0, 0.3, (T, B))).astype(np.float32)
  carried = rng.normal(size=B).astype(np.float32) if agent.normalize_rewards else ()
  sums = 5 * rng.normal(size=(T, B)).astype(np.float32) if agent.normalize_rewards else ()
  extras = policy_gradient.PolicyExtras(x, log_prob, sums)
  return streams.trajectory(steps, x, extras, policy_gradient.PolicyState(core, carried))


@functools.cache
def compiled(name: str, devices: int) -> Any:
  """The learner step, and the state to begin from."""
  agent = AGENTS[name]
  step = learner(agent, on_policy(), topology.learner_mesh(devices))
  train = jit(agent.init)(jax.random.key(0))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(body, 'CPU_CHUNK', 2 if 'chunks' in name else body.CPU_CHUNK)
    return jit(step).lower(
      train, (), trajectory(name, 0), jax.random.key(1), jnp.int32(0)
    ).compile(), train


def learn(name: str, devices: int) -> Any:
  """Two updates, the second with what the first made of parameters, moments and statistics."""
  step, train = compiled(name, devices)
  for i in range(2):
    args = train, (), trajectory(name, i), jax.random.key(1 + i), np.int32(i)
    train, _, metrics, _ = step(*jax.device_put(args, step.input_shardings[0]))
  return jax.device_get((train, metrics))


FAST = {
  'ppo',
  'impala, popart',
}  # of the others, `make test-all` says as much


@pytest.mark.parametrize(
  'name', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in AGENTS]
)
def test_an_update_is_the_same_on_any_number_of_devices(name: str) -> None:
  (one, metrics), (eight, metrics_of_eight) = learn(name, 1), learn(name, 8)
  leaves = jax.tree_util.tree_leaves_with_path(one)
  for (path, x), y in zip(leaves, jax.tree.leaves(eight), strict=True):
    # Gradients differ by rounding, 1e-8. Divided by Adam's sqrt(v) + 1e-5 and taken times a
    # learning rate of 6e-4 that is up to 6e-7 for each of up to 32 steps, if never in both
    # directions; the parameters themselves move by about 1e-3 to 1e-2.
    name_of_leaf = jax.tree_util.keystr(path)
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=name_of_leaf)
  for key, value in metrics.items():
    np.testing.assert_allclose(value, metrics_of_eight[key], rtol=1e-4, atol=1e-5, err_msg=key)
  start = jax.device_get(compiled(name, 1)[1])
  moves = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), start.params, one.params)
  assert min(jax.tree.leaves(moves)) > 1e-4  # fifty times the tolerance


def standardized(advantage: np.ndarray, mask: np.ndarray, devices: int) -> np.ndarray:
  split, mesh = P(None, topology.AXIS), topology.learner_mesh(devices)
  step = jax.shard_map(ppo.standardize, mesh=mesh, in_specs=(split, split), out_specs=split)
  return np.asarray(jit(step)(advantage, mask))


@pytest.mark.parametrize('devices', [1, 2])
@pytest.mark.parametrize('mean', [0.0, 1e4])
def test_advantages_are_standardized(mean: float, devices: int) -> None:
  """Also where the mean is a million times the deviation between them."""
  rng = np.random.default_rng(0)
  spread = 1.0 if mean == 0 else 2.0**-7  # a few units in the last place of 1e4
  advantage = (mean + spread * rng.integers(-8, 9, (T, B))).astype(np.float32)
  mask = (rng.random((T, B)) < 0.8).astype(np.float32)
  valid = advantage.astype(np.float64)[mask > 0]
  found = standardized(advantage, mask, devices)[mask > 0]
  np.testing.assert_allclose(found, (valid - valid.mean()) / valid.std(), atol=0.05)


def test_advantages_of_no_step_at_all() -> None:
  """As where unrolls are one step long, and all environments begin anew."""
  assert np.isfinite(standardized(np.ones((1, 2), np.float32), np.zeros((1, 2)), 1)).all()


# --- PPO's minibatches ------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['ppo', 'ppo, recurrent'])
def test_an_epoch_takes_every_step_once(name: str) -> None:
  agent = dataclasses.replace(AGENTS[name], minibatches=4)
  indices = np.asarray(jit(agent.minibatch_indices)(jax.random.key(3), trajectory(name, 0)))
  recurrent = minibatch.is_recurrent(agent)
  size = B if recurrent else T * B
  epochs = indices.reshape(agent.epochs, 4, size // 4)
  for epoch in epochs:
    assert np.array_equal(np.sort(epoch, axis=None), np.arange(size))
    if not recurrent:  # and of every environment, a minibatch takes as many
      counts = [np.bincount(part % B, minlength=B) for part in epoch]
      assert np.array_equal(counts, np.full((4, B), T // 4))
  assert len({tuple(np.sort(part)) for part in epochs.reshape(-1, size // 4)}) > 8  # of 16


@pytest.mark.parametrize('n', [1, 2, 3, 8, 9, 128, 2**16])
def test_permutations_are_permutations(n: int) -> None:
  permuted = jit(jax.vmap(lambda k: minibatch.permutation(k, n)))
  permutations = np.asarray(permuted(jax.random.split(jax.random.key(0), 7)))
  assert np.array_equal(np.sort(permutations, axis=1), np.tile(np.arange(n), (7, 1)))
  if n > 8:
    assert len(np.unique(permutations, axis=0)) == 7


def test_permutations_are_not_too_large() -> None:
  with pytest.raises(ValueError, match=r'65537 items.*--unroll-length'):
    minibatch.permutation(jax.random.key(0), 2**16 + 1)


@pytest.mark.parametrize(
  ('size', 'length', 'chunks'), [(4096, 1, 8), (96, 1, 1), (64, 16, 2), (521, 1, 1)]
)
def test_chunks_fit_the_caches(
  size: int, length: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  """At most 512 steps each; one chunk where no division gives 128 to 512."""
  monkeypatch.setattr(body, 'CPU_CHUNK', 512)
  parts = policy_gradient.chunks(AGENTS['ppo'].network, jnp.arange(size), length)
  assert parts.shape == (chunks, size // chunks)
  assert np.array_equal(parts.reshape(-1), np.arange(size))


# --- collectives ------------------------------------------------------------------------------


def parameters(tree: Any) -> int:
  return sum(x.size for x in jax.tree.leaves(tree))


def check_collectives(
  found: list[Collective], agent: Any, loops: int, network_size: int, seeds: int
) -> None:
  """One all-reduce for each gradient, and of PPO one more for the advantages.

  That one is 4 numbers. What normalizing adds to it is loop-invariant: XLA takes it out of the
  minibatches' loop.
  """
  is_ppo = isinstance(agent, PPO)
  if agent.normalize_observations and loops:  # how many elements there are is known from the start
    found.remove(Collective('all-reduce', 0, 1))  # so that is sent once in a call of the program
  if agent.self_tuning:
    check_collectives_of_self_tuning(found, is_ppo, loops, seeds * network_size)
    return
  assert {c.kind for c in found} == {'all-reduce'}
  gradients = [c for c in found if c.size >= seeds * network_size]
  assert [c.depth for c in gradients] == [loops + is_ppo]
  normalized = 60 * agent.normalize_observations  # moments of up to 60 numbers go along
  assert gradients[0].size <= seeds * (network_size + normalized + 11)  # and up to 11 metrics
  rest = [c for c in found if c not in gradients]
  assert [c.depth for c in rest] == [loops] * (is_ppo and agent.normalize_advantages)
  assert all(4 * seeds <= c.size <= seeds * (4 + normalized) for c in rest)


def check_collectives_of_self_tuning(
  found: list[Collective], is_ppo: bool, loops: int, network_size: int
) -> None:
  """For each gradient one more of its size, and one of a few numbers for all metaparameters.

  PPO, which has its gradients in a loop, has one outer gradient, and a sum back through its advantages, besides.
  """
  assert {c.kind for c in found} == {'all-reduce'}
  gradients = [c for c in found if c.size >= network_size]
  assert [c.depth for c in gradients] == [loops] * is_ppo + [loops + is_ppo] * 2
  assert all(
    c.size <= network_size + 71 for c in gradients
  )  # and metrics, and 60 numbers of moments
  rest = [c for c in found if c not in gradients]
  assert len(rest) <= 1 + 4 * is_ppo
  assert all(c.depth == loops and c.size <= 80 for c in rest)


@pytest.mark.parametrize(
  'name',
  [
    name
    if name in (*FAST, 'ppo, recurrent', 'impala')
    else pytest.param(name, marks=pytest.mark.slow)
    for name in AGENTS
  ],
)
def test_collectives_of_the_learner_step(name: str) -> None:
  step, train = compiled(name, 8)
  size = parameters(train.params.network)
  check_collectives(collectives(step.as_text()), AGENTS[name], 0, size, seeds=1)


RUNS = {
  'ppo': (AGENTS['ppo'], 1),
  'impala, normalized': (AGENTS['impala, normalized'], 1),
  'impala, recurrent, 3 seeds': (AGENTS['impala, recurrent'], 3),
}
SLOW_RUNS = {
  'impala, popart, 3 seeds': (AGENTS['impala, popart'], 3),
  'ppo, popart': (AGENTS['ppo, popart'], 1),
  'impala, self-tuning, 3 seeds': (AGENTS['impala, self-tuning'], 3),
  'ppo, normalized, 3 seeds': (AGENTS['ppo, normalized'], 3),
  'ppo, normalized': (AGENTS['ppo, normalized'], 1),
  'ppo, recurrent, 3 seeds': (AGENTS['ppo, recurrent'], 3),
  'impala, recurrent': (AGENTS['impala, recurrent'], 1),
}


@pytest.mark.parametrize(
  ('agent', 'seeds'),
  [pytest.param(*run, id=name) for name, run in RUNS.items()]
  + [pytest.param(*run, id=name, marks=pytest.mark.slow) for name, run in SLOW_RUNS.items()],
)
def test_collectives_of_a_whole_run(agent: Any, seeds: int) -> None:
  env = make('podrace:memory')  # observations of 3 floats
  net = agent.network.bind(env.observation_space, env.action_space)
  agent = dataclasses.replace(agent, network=net)
  anakin = Anakin(agent, env, on_policy(), topology.learner_mesh(8), B, T, seeds=seeds)
  # JAX's check takes a scan over split keys for a reuse as soon as it is under vmap.
  with jax.debug_key_reuse(seeds == 1):
    text = anakin.run.lower(anakin.shapes, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
  size = parameters(anakin.shapes.train.params.network) // seeds
  check_collectives(collectives(text), agent, 1, size, seeds)


def test_collectives_are_found() -> None:
  """That the count above can fail: the same by a program that has them all."""

  def step(x: Any) -> Any:
    y = jax.lax.all_gather(x, topology.AXIS).sum(0) + jax.lax.ppermute(
      x, topology.AXIS, [(i, (i + 1) % 8) for i in range(8)]
    )
    y += jax.lax.fori_loop(0, 5, lambda i, y: jax.lax.psum(y, topology.AXIS) / 9, x)
    z = jax.lax.all_to_all(x.reshape(8, 2), topology.AXIS, 0, 0).reshape(16)
    return y + z + jnp.tile(jax.lax.psum_scatter(x, topology.AXIS, tiled=True), 8)

  split = P(topology.AXIS)
  mesh = topology.learner_mesh(8)
  step = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
  found = collectives(jax.jit(step).lower(jnp.ones(128)).compile().as_text())
  assert {c.kind for c in found} == set(COLLECTIVES)
  assert [(c.depth, c.size) for c in found if c.kind == 'all-reduce'] == [(1, 16)]


def test_metrics_of_several_samples_are_summed_as_floats() -> None:
  """A bool would be their or, and a byte would wrap."""

  class Counting:
    def learn(self, train: Any, sample: Any, key: Any) -> Any:
      metrics = {'loss': jnp.float32(1), 'is_large': jnp.bool_(True), 'count': jnp.uint8(100)}
      return train, (), metrics

  replay: Any = SimpleNamespace(
    add=lambda memory, trajectory: memory, times=lambda update: jnp.int32(3),
    sample=lambda memory, key: SimpleNamespace(index=0), update=lambda memory, *_: memory,
  )  # fmt: skip
  step = jax.vmap(device_step(Counting(), replay), axis_name=topology.AXIS, axis_size=1)
  one = jnp.zeros(1)
  *_, metrics, times = jit(step)(one, one, one, jax.random.split(jax.random.key(0), 1), one)
  assert {k: float(v[0]) for k, v in metrics.items()} == {'loss': 3, 'is_large': 3, 'count': 300}
  assert times == 3
