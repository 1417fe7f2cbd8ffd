"""Replicas that gossip: what they average to, what they send, and that such a run is a run like any other."""

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
from compiling import jit as quickly
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from processes import as_saved, fingerprints
from shared_programs import shared_programs  # noqa: F401
from shorthand import slow_after

import podrace
from podrace import hooks, topology
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.architectures.agreement import (
  REPLICAS,
  AllReduce,
  Gossip,
  Replicas,
  consensus_distance,
  flat,
  mean,
)
from podrace.architectures.anakin import Anakin
from podrace.architectures.unroll import actor_on_mesh
from podrace.envs import make
from podrace.envs.base import batch
from podrace.errors import UsageError
from podrace.networks import ActorCritic, QNetwork
from podrace.replay import Buffer, on_policy
from podrace.run.build import build
from podrace.run.checkpoint import Checkpoints
from podrace.run.metrics import read
from podrace.settings import validation
from podrace.settings.agents import bind
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.types import TimeStep, TrainState, Trajectory, map_batch

SMALL = ActorCritic(hidden=(8,), initializer='lecun')


# --- averages ---------------------------------------------------------------------------------


def begun(gossip: Gossip, params: np.ndarray, weight: Any = 1.0) -> Replicas:
  """Replicas with these parameters [R, N]."""
  n, size = params.shape
  arriving = np.zeros((n, size + 1), np.float32) if gossip.staleness else ()
  weights = np.broadcast_to(np.float32(weight), n)
  return Replicas(TrainState(params.astype(np.float32), ()), weights, arriving)


def exchanged(
  gossip: Gossip, replicas: Replicas, rounds: int, first: int = 0, moves: Any = 0.0
) -> Replicas:
  """After so many exchanges from update `first` on; before each, every replica moves by `moves` [R or 1, 1]."""
  n = len(replicas.weight)
  moves = np.broadcast_to(np.asarray(moves, np.float32), (n, 1))
  return jax.device_get(exchange(gossip, n)(replicas, moves, np.int32(rounds), np.int32(first)))


@functools.cache
def exchange(gossip: Gossip, n: int) -> Any:
  """The function of `exchanged`, compiled."""

  def run(own: Replicas, move: Any, rounds: Any, first: Any) -> Replicas:
    own, move = jax.tree.map(lambda x: x[0], (own, move))

    def once(k: Any, own: Replicas) -> Replicas:
      after = own.train._replace(params=own.train.params + move)
      return gossip.mix(own, after, k + first)

    own = jax.lax.fori_loop(0, rounds, once, own)
    return jax.tree.map(lambda x: x[None], own)

  mesh, split = Mesh(np.array(jax.devices()[:n]), (REPLICAS,)), P(REPLICAS)
  each = (split, split, P(), P())
  return quickly(jax.shard_map(run, mesh=mesh, in_specs=each, out_specs=split, check_vma=False))


def numbers(n: int) -> np.ndarray:
  return np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)


@pytest.mark.parametrize('first', [0, 1])
@pytest.mark.parametrize('m', [1, 2, 3])
def test_m_rounds_average_over_2_to_the_m_replicas(m: int, first: int) -> None:
  """Any m in a row; one less does not."""
  gossip, x = Gossip(), numbers(2**m)
  found = exchanged(gossip, begun(gossip, x), m, first)
  # A sum of 8 float32: halving is exact.
  expected = np.broadcast_to(x.astype(np.float64).mean(0), x.shape)
  np.testing.assert_allclose(found.train.params, expected, atol=3e-7)
  assert (found.weight == 1).all()
  before = exchanged(gossip, begun(gossip, x), m - 1, first)
  assert np.abs(before.train.params - expected).max() > 0.1


@pytest.mark.parametrize('staleness', [0, 1])
@pytest.mark.parametrize(('graph', 'n'), [('ring', 8), ('ring', 3), ('exponential', 6)])
def test_gossip_comes_to_the_mean(graph: Any, n: int, staleness: Any) -> None:
  """Also where no number of rounds averages exactly, and where replicas have other weights than 1 (push-sum)."""
  gossip, x = Gossip(graph, staleness), numbers(n)
  weight = np.arange(1, n + 1, dtype=np.float32)
  found = exchanged(gossip, begun(gossip, x, weight), 500)
  expected = np.broadcast_to((weight[:, None] * x).sum(0) / weight.sum(), x.shape)
  np.testing.assert_allclose(found.train.params, expected, atol=1e-5)
  on_the_way = found.arriving[:, -1].sum() if staleness else 0.0
  np.testing.assert_allclose(found.weight.sum() + on_the_way, weight.sum(), rtol=1e-5)


def test_a_ring_sends_to_the_next_one() -> None:
  gossip, x = Gossip('ring'), np.eye(8, dtype=np.float32)
  found = exchanged(gossip, begun(gossip, x), 1)
  assert np.array_equal(found.train.params, (x + np.roll(x, 1, axis=0)) / 2)


@pytest.mark.parametrize('staleness', [0, 1])
def test_what_replicas_learn_is_neither_lost_nor_doubled(staleness: Any) -> None:
  """The mass of all, that on its way too, moves by what the replicas' parameters move in all."""
  gossip, x = Gossip('exponential', staleness), numbers(8)
  moves = np.arange(8, dtype=np.float32)[:, None]
  found = exchanged(gossip, begun(gossip, x), 5, moves=moves)
  mass = (found.weight[:, None] * found.train.params).sum(0)
  if staleness:
    mass += found.arriving[:, :-1].sum(0)
    assert not (found.weight == 1).any()
  np.testing.assert_allclose(mass, x.sum(0) + 5 * moves.sum(), rtol=1e-5)


def test_staleness_is_of_one_update() -> None:
  gossip, x = Gossip('ring', 1), np.eye(8, dtype=np.float32)
  one = exchanged(gossip, begun(gossip, x), 1)
  assert np.array_equal(one.train.params, x) and (one.weight == 0.5).all()
  two = exchanged(gossip, begun(gossip, x), 2)  # a quarter stayed, a half arrived
  np.testing.assert_allclose(two.train.params, (x + 2 * np.roll(x, 1, axis=0)) / 3, rtol=1e-6)


def test_floats_are_averaged_and_nothing_else() -> None:
  tree = dict(a=jnp.arange(6.0).reshape(2, 3), b=jnp.array([4, 8]), c=jnp.ones(2, jnp.bfloat16))
  one = jax.tree.map(lambda x: x[0], tree)
  vector, back = flat(one)
  assert vector.dtype == jnp.float32 and np.array_equal(vector, [0, 1, 2, 1])
  changed = back(vector + 1)
  assert np.array_equal(changed['a'], [1, 2, 3]) and changed['b'] == 4
  assert changed['c'].dtype == jnp.bfloat16 and changed['c'] == 2
  middle = mean(tree)
  assert np.array_equal(middle['a'], [1.5, 2.5, 3.5]) and middle['b'] == 4
  assert middle['c'].dtype == jnp.bfloat16


def test_consensus_distance_by_hand() -> None:
  params = dict(x=jnp.array([[3.0, 3.0], [3.0, 5.0], [3.0, 4.0]]))  # distances from (3, 4): 1, 1, 0
  found = consensus_distance(params, mean(params))
  np.testing.assert_allclose(found, 2 / 3 / 5, rtol=1e-6)


@pytest.mark.parametrize('wrong', [dict(graph='star'), dict(staleness=2)])
def test_settings_that_are_none(wrong: Any) -> None:
  with pytest.raises(ValueError, match=f'{next(iter(wrong))} must be'):
    Gossip(**wrong)


# --- against all-reduce -----------------------------------------------------------------------


@pytest.mark.parametrize('normalize', slow_after(1, True, False))
def test_with_equal_data_gossip_is_all_reduce(normalize: bool) -> None:
  env, mesh, n = make('podrace:catch'), topology.learner_mesh(8), 2
  agent = Impala(SMALL, normalize_observations=normalize, normalize_rewards=normalize)
  agent = bind(agent, env, 100, 8 * n)
  train = quickly(agent.init)(jax.random.key(0))
  start, unroll = actor_on_mesh(agent, batch(env, n), topology.learner_mesh(1), 10)
  actor = quickly(start)(jnp.arange(n), jax.random.key(1))
  _, own = quickly(unroll)(train.params, actor, jax.random.key(2))
  same = map_batch(lambda axis, x: np.concatenate([x] * 8, axis), jax.device_get(own))
  found = []
  for agree in (AllReduce(), Gossip()):
    learn = quickly(agree.learner(agent, on_policy(), mesh))
    state = quickly(functools.partial(agree.begin, replicas=8))(train)
    for k in range(4):
      state, _, metrics, _ = learn(state, (), same, jax.random.key(3 + k), jnp.int32(k))
    found.append(jax.device_get((quickly(agree.finalize)(state).params, metrics)))
  (params, metrics), (of_gossip, metrics_of_gossip) = found
  moved = max(float(np.abs(x - y).max()) for x, y in zip(
    jax.tree.leaves(params.network), jax.tree.leaves(train.params.network), strict=True))  # fmt: skip
  assert moved > 1e-3
  if normalize:  # how many elements were seen differs: each replica has seen its own
    seen = params.observation.seen
    assert of_gossip.observation.seen * 8 == seen
    params, of_gossip = (
      p._replace(observation=p.observation.mean, reward=p.reward.mean) for p in (params, of_gossip)
    )
  for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(of_gossip), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)
  for name, x in metrics.items():
    np.testing.assert_allclose(x, metrics_of_gossip[name], rtol=1e-4, atol=1e-6, err_msg=name)


# --- the compiled program ---------------------------------------------------------------------


def program(
  agent: Any, devices: int, gossip: Gossip, seeds: int = 1, env: str = 'podrace:catch'
) -> Anakin:
  world, envs = make(env), 2 * devices
  agent = bind(agent, world, 100, envs)
  replay, mesh = hooks.memory(agent, world, envs, 8), topology.learner_mesh(devices)
  return Anakin(agent, world, replay, mesh, envs, 8, seeds, gossip)


# Each device by itself; the second form is that of JAX 0.11.
ALONE = re.compile(
  r'^.* all-reduce\(.*replica_groups=({({\d+},?)+}|mesh\[[^]]*\] {}),.*$\n', re.MULTILINE
)


@pytest.mark.parametrize(
  ('agent', 'gossip', 'rounds'),
  [
    pytest.param(Impala(SMALL, normalize_observations=True), Gossip(), 3, id='impala'),
    pytest.param(PPO(SMALL, epochs=2), Gossip('ring', 1), 1, id='ppo'),
    pytest.param(
      DQN(QNetwork(hidden=(8,)), Buffer(batch_size=16, capacity=160, min_size=1)), Gossip(), 3, id='dqn',
      marks=pytest.mark.slow,
    ),
  ],
)  # fmt: skip
def test_parameters_go_to_one_neighbour_and_gradients_nowhere(
  agent: Any, gossip: Gossip, rounds: int
) -> None:
  anakin = program(agent, 8, gossip)
  updates = jax.ShapeDtypeStruct((), jnp.int32)
  text = anakin.run.lower(anakin.shapes, updates).compile().as_text()
  assert ALONE.search(text)  # `sgd`'s, of one device
  found = collectives(ALONE.sub('', text))
  size = sum(x.size for x in jax.tree.leaves(anakin.shapes.train.params))
  sent = [c for c in found if c.kind == 'collective-permute']
  assert [(c.depth, c.size) for c in sent] == [(1, size + 1)] * rounds  # one of which is executed
  metrics, averages = (
    [c for c in found if c.kind == 'all-reduce' and c.depth == d] for d in (1, 0)
  )
  assert [c.size for c in metrics] == [len(anakin.shapes.log.sums)]
  assert sum(c.size for c in averages) <= size + 1  # the mean for others, once in a call
  assert len(found) == len(sent) + len(metrics) + len(averages)


# --- runs -------------------------------------------------------------------------------------


def after(anakin: Anakin, *calls: int) -> tuple[Any, Any]:
  state = anakin.init(jax.random.split(jax.random.key(0), anakin.seeds))
  for n in calls:
    state = anakin.run(state, jnp.int32(n))
  return anakin.read_log(state)


def test_replicas_differ_and_the_run_has_their_mean() -> None:
  anakin = program(Impala(SMALL), 4, Gossip('ring'))
  log, state = after(anakin, 0)
  assert float(log['metrics']['consensus_distance']) < 1e-6
  log, state = after(anakin, 3, 2)
  replicas = jax.device_get(state.train.rest.train.params)
  for own, middle in zip(
    jax.tree.leaves(replicas), jax.tree.leaves(state.train.params), strict=True
  ):
    assert len(np.unique(own.reshape(4, -1), axis=0)) == 4
    np.testing.assert_allclose(middle, own.mean(0), rtol=1e-5, atol=1e-7)
  assert float(log['metrics']['consensus_distance']) > 1e-4
  _, at_once = after(anakin, 5)
  for x, y in zip(jax.tree.leaves(state.train), jax.tree.leaves(at_once.train), strict=True):
    assert np.array_equal(x, y)


@pytest.mark.slow
def test_a_replica_acts_by_its_own_parameters() -> None:
  anakin = program(Impala(SMALL), 2, Gossip())
  state = anakin.init(jax.random.split(jax.random.key(0), 1))
  # The second replica prefers the last action beyond all doubt.
  replicas = state.train.rest.train
  network = replicas.params.network
  head = network['policy_head']
  head = {**head, 'bias': head['bias'].at[1, 2].set(1e4)}
  params = replicas.params._replace(network={**network, 'policy_head': head})
  changed = state.train.rest._replace(train=replicas._replace(params=params))
  source = anakin.agree.source(state.train._replace(rest=changed))
  local, split = batch(anakin.env, 2), P(topology.AXIS)
  agree = anakin.agree
  _, unroll = actor_on_mesh(anakin.agent, local, anakin.mesh, 8, split, agree.params_of)
  _, trajectory = quickly(unroll)(source, state.actor, jax.random.key(1))
  action = np.asarray(trajectory.outputs.action)
  assert (action[:, 2:] == 2).all() and not (action[:, :2] == 2).all()


@dataclasses.dataclass(frozen=True)
class Drifts:
  """An agent that moves by chance, and says where to."""

  def learn(self, train: Any, sample: Any, key: Any) -> Any:
    step = jax.random.normal(key, train.params.shape)
    return (
      train._replace(params=train.params + step),
      jnp.ones_like(sample.weight),
      {'loss': step[0]},
    )


def test_replicas_have_other_noise_and_the_mean_of_their_metrics() -> None:
  agree, mesh = Gossip('ring'), topology.learner_mesh(4)
  reward = jnp.zeros((2, 4))
  trajectory = Trajectory(TimeStep((), reward, reward, reward), (), (), jnp.arange(4))
  train = agree.begin(TrainState(jnp.zeros(1), ()), 4)
  learn = quickly(agree.learner(Drifts(), on_policy(), mesh))
  found, _, metrics, _ = learn(train, (), trajectory, jax.random.key(0), jnp.int32(0))
  params = np.asarray(found.rest.train.params)
  assert len(np.unique(params)) == 4
  np.testing.assert_allclose(metrics['loss'], params.mean(), rtol=1e-5)


@pytest.mark.slow
def test_each_of_several_seeds_gossips_as_it_would_alone() -> None:
  alone = program(Impala(SMALL), 4, Gossip('exponential', 1))
  together = dataclasses.replace(alone, seeds=2)
  keys = jax.random.split(jax.random.key(0), 2)
  with jax.debug_key_reuse(
    False
  ):  # JAX's check takes a scan over split keys for a reuse under vmap
    log, state = together.read_log(together.run(together.init(keys), jnp.int32(3)))
  for i in range(2):
    one_log, one = alone.read_log(alone.run(alone.init(keys[i : i + 1]), jnp.int32(3)))
    for x, y in zip(jax.tree.leaves(state.train), jax.tree.leaves(one.train), strict=True):
      np.testing.assert_allclose(x[i], y, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(
      log['metrics']['consensus_distance'][i], one_log['metrics']['consensus_distance'], rtol=1e-3
    )


@pytest.mark.parametrize(
  'preset', slow_after(1, 'cartpole', 'catch', 'muzero-catch', 'muesli-catch')
)
def test_agents_gossip_unchanged(preset: str) -> None:
  """That those of presets trace; `test_parameters_go...` compiles others."""
  config = PRESETS[preset]()
  world = make('podrace:catch')
  agent = bind(config.agent, world, 100, 32)
  replay = hooks.memory(agent, world, 32, 32)
  anakin = Anakin(agent, world, replay, topology.learner_mesh(8), 32, 32, 1, Gossip())
  state = jax.eval_shape(anakin.run, anakin.shapes, jax.ShapeDtypeStruct((), jnp.int32))
  assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, anakin.shapes)


TINY: Any = dict(num_envs=8, unroll_length=8, total_steps=1280, agent={'network': {'hidden': (8,)}}, devices=4,
                 agree='gossip', gossip_staleness=1)  # fmt: skip


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
  run_dir = tmp_path_factory.mktemp('gossip') / 'whole'
  podrace.train(podrace.configure('catch', **TINY), run_dir, quiet=True)
  return run_dir


def test_a_resumed_run_has_the_same_bits_in_every_replica(whole: Path, tmp_path: Path) -> None:
  half = podrace.configure('catch', **TINY | dict(total_steps=640))
  podrace.train(half, tmp_path / 'run', quiet=True)
  run = podrace.train(
    podrace.configure('catch', **TINY), tmp_path / 'run', override=True, quiet=True
  )
  assert fingerprints(tmp_path / 'run', 1280) == fingerprints(whole, 1280)
  line, expected = run.metrics[-1], read(whole / 'metrics.jsonl')[-1]
  assert line['consensus_distance'] > 0
  assert line == expected | {k: line[k] for k in ('wall_s', 'steps_per_s')}


def test_another_number_of_devices_is_refused(whole: Path) -> None:
  other = podrace.configure('catch', **TINY | dict(devices=2, total_steps=2560))
  expected = r'4 device.s..*2.*--devices 4.*gossip'
  with pytest.raises(UsageError, match=expected):
    podrace.train(other, whole, override=True, quiet=True)


def test_the_mean_is_what_is_evaluated(whole: Path) -> None:
  from podrace.run.directory import load_config
  from podrace.run.saved_params import restore_params
  from podrace.settings.resolved import resolve

  config = load_config(whole)
  params = restore_params(resolve(config), whole)[1]
  items = as_saved(build(config).shapes)
  found = Checkpoints(whole / 'checkpoints', writes=False).restore(1280, *items)
  replicas = found.rest.train.rest.train.params
  for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(replicas), strict=True):
    np.testing.assert_allclose(x, np.asarray(y).mean(0), rtol=1e-5, atol=1e-7)


def test_a_gossip_run_begins_from_another_run(whole: Path) -> None:
  from podrace.run.warm_start import WarmStart
  from podrace.settings.resolved import resolve

  config = podrace.configure('catch', **TINY, init_from=str(whole))
  built = build(config)
  state = built.init(jax.random.split(jax.random.key(5), 1))
  warm_start = WarmStart(resolve(config))
  state = warm_start.apply(state)
  assert jax.tree.map(lambda x: x.sharding, state.train) == jax.tree.map(
    lambda x: x.sharding, built.shapes.train
  )
  for x, own, middle in zip(
    *map(jax.tree.leaves, (warm_start.params, state.train.rest.train.params, state.train.params)), strict=True
  ):  # fmt: skip
    assert np.array_equal(np.broadcast_to(x, own.shape), own) and np.array_equal(x[0], middle)


@pytest.mark.parametrize(
  ('given', 'said'),
  [
    (dict(agree='gossip', architecture='sebulba'), '--architecture anakin'),
    (dict(gossip_graph='ring'), '--gossip-graph ring'),
    (dict(gossip_staleness=1), '--gossip-staleness 1'),
    (dict(agree='gossip', gossip_staleness=2), '--gossip-staleness'),
  ],
)  # fmt: skip
def test_options_that_do_not_fit(given: Any, said: str) -> None:
  config: Config = podrace.configure('catch')
  with pytest.raises(UsageError, match=re.escape(said)):
    validation.validate(dataclasses.replace(config, **given))


def test_one_device_has_no_neighbour(tmp_path: Path) -> None:
  with pytest.raises(ValueError, match=r'2 devices.*1'):
    podrace.train(
      podrace.configure('catch', **TINY | dict(devices=1)), tmp_path / 'run', quiet=True
    )
  assert not (tmp_path / 'run').exists()


def test_a_callback_may_not_transform_one_state_of_several(tmp_path: Path) -> None:
  class Transforms:
    def __call__(self, line: Any) -> None:
      pass

    def transform(self, train: Any, line: Any) -> Any:
      return train

  with pytest.raises(UsageError, match='--agree gossip'):
    podrace.train(
      podrace.configure('catch', **TINY), tmp_path / 'run', quiet=True, callbacks=[Transforms()]
    )
