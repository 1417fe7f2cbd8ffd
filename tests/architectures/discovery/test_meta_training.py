"""A population on a mesh: its meta-gradient, its groups, its lives and what it reports."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import populations
import pytest

from podrace.architectures.discovery.program import (
  PARTS,
  POPULATION,
  STEPS,
  MetaOptimizer,
  means_of,
)
from podrace.run import summary

FAST = {'xla_backend_optimization_level': 0}  # compiling is the cost here


@pytest.fixture(autouse=True)
def keys_under_vmap() -> Iterator[None]:
  """JAX's check of keys takes the sampling of a `vmap` within a `scan` for a second use."""
  with jax.debug_key_reuse(False):
    yield


def begun(program: Any, seed: int = 0) -> Any:
  return program.init(jax.random.split(jax.random.key(seed), 1))


@functools.cache
def spread(devices: int) -> tuple[Any, Any]:
  """Eight agents that learn by one rule, and the compiled program."""
  program = populations.program(
    agents=8, devices=devices, meta_optimizer='mean', lifetime=6, num_envs=3
  )
  one = jax.ShapeDtypeStruct((), jnp.int32)
  return program, program.run.lower(program.shapes, one).compile(compiler_options=FAST)


def same(one: Any, other: Any, **tolerance: float) -> None:
  def check(path: Any, x: Any, y: Any) -> None:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = map(jax.random.key_data, (x, y))
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), err_msg=name, **tolerance)

  jax.tree_util.tree_map_with_path(check, one, other)


@pytest.mark.slow
def test_eight_devices_do_as_one() -> None:
  """The state after three meta-steps, in which some lives end; and the meta-gradient of the first."""
  found = []
  for devices in (1, 8):
    program, run = spread(devices)
    state = begun(program)
    found.append(jax.device_get(state.train.params))
    found.append(run(state, np.int32(3)))
  assert len(found[3].groups[0].age.sharding.device_set) == 8
  assert np.asarray(found[3].groups[0].lives).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
  assert np.asarray(found[3].groups[0].age).tolist() == [6, 6, 7, 2, 2, 2, 4, 4]
  same(found[0], found[2], rtol=0)
  same(found[1], found[3], rtol=2e-4, atol=2e-6)
  moved = [abs(found[1].train.params[k] - found[0][k]).max() for k in found[0]]
  assert min(moved) > 1e-4, 'Adam moves what has a gradient'


def test_one_all_reduce_in_a_meta_step() -> None:
  text = spread(8)[1].as_text()
  assert text.count(' all-reduce(') + text.count(' all-reduce-start(') == 1
  assert not any(f' {kind}(' in text for kind in ('all-gather', 'all-to-all', 'collective-permute'))


@pytest.mark.slow
def test_meta_steps_do_not_depend_on_how_they_are_divided() -> None:
  program, run = spread(1)
  whole = run(begun(program), np.int32(3))
  parts = run(run(begun(program), np.int32(1)), np.int32(2))
  same(whole, parts, rtol=0)


@pytest.mark.slow
def test_groups_of_every_environment_and_width() -> None:
  program = populations.program(env=f'{populations.ENV} {populations.OTHER}', widths=(3, 5))
  groups = program.shapes.groups
  shapes = [jax.tree.map(jnp.shape, m.train.params) for m in groups]
  assert len(program.kinds) == 4 and all(x != y for i, x in enumerate(shapes) for y in shapes[:i])
  assert len({m.actor.timestep.observation.shape for m in groups}) == 2
  hidden = [kind.agent.network.hidden for kind in program.kinds]
  assert hidden == [(3,), (5,), (3,), (5,)]


@pytest.mark.slow
def test_groups_of_other_shapes_share_one_meta_gradient() -> None:
  """It is the mean over all members, each as it is alone."""
  program = populations.program(
    env=f'{populations.ENV} {populations.OTHER}', agents=1, meta_optimizer='mean'
  )
  state = jax.device_get(begun(program))
  numbers = [m.number.tolist() for m in state.groups]
  assert numbers == [[0], [1]]
  args = (state.train.params, state.groups, state.scales, state.key, jnp.int32(0))
  moves, *_ = jax.jit(program.moves, compiler_options=FAST)(*args)
  key, total = jax.random.fold_in(jax.random.fold_in(state.key, STEPS), 0), []
  for kind, members in zip(program.kinds, state.groups, strict=True):
    one = jax.tree.map(lambda x: x[0], members)
    grad = jax.jit(jax.grad(kind.outcome, has_aux=True), compiler_options=FAST)
    total.append(grad(state.train.params, one, jax.random.fold_in(key, one.number))[0])
  expected = jax.tree.map(lambda *x: sum(x) / 2, *total)
  same(moves, expected, rtol=1e-4, atol=1e-7)


# --- the rule's optimiser -------------------------------------------------------------------------------


def test_each_agent_has_an_adam_of_its_own() -> None:
  """The first step of Adam is the sign, whatever an agent's gradients are in size."""
  grads = {'w': jnp.array([[1e-3, -1.0], [1e3, 2.0]])}  # of two agents
  each = MetaOptimizer(0.1, 'each', epsilon=0.0)
  state = jax.vmap(each.each.init)(grads)
  moves, state = jax.vmap(each.each.update)(grads, state)
  np.testing.assert_allclose(moves['w'], [[1, -1], [1, 1]], rtol=1e-5)
  mean = jax.tree.map(lambda x: x.mean(0), moves)
  step, _ = each.mean.update(mean, each.mean.init(mean), mean)
  np.testing.assert_allclose(step['w'], [-0.1, 0.0], atol=1e-6)

  one = MetaOptimizer(0.1, 'mean', max_update=0.5)
  moves, _ = one.each.update(grads, one.each.init(grads))
  mean = jax.tree.map(lambda x: x.mean(0), moves)
  step, _ = one.mean.update(mean, one.mean.init(mean), mean)
  np.testing.assert_allclose(step['w'], [-0.05, -0.05], rtol=1e-5)


# --- what it reports ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_line_of_metrics() -> None:
  """Episodes are counted once: by group, by age and in all; reading begins them anew."""
  program, run = spread(1)
  state = run(begun(program), np.int32(2))
  episodes = sum(int(np.sum(m.actor.episodes.finished)) for m in state.groups)
  log, state = program.read_log(state)
  line = summary.summarize(program.present(jax.device_get(log)))
  # 8 agents, 3 environments, 2 meta-steps of 3 unrolls of 4 steps; episodes take 2 and one to begin
  assert line['episodes'] == episodes == 8 * 3 * 2 * 3 * 4 // 3
  assert line['gradient_steps'] == 4 and np.isfinite(line['loss'])
  assert line['episode_return_by_group'] == pytest.approx([line['episode_return']])
  curve = jax.device_get(log)['curve']
  assert curve.episodes.sum() == episodes
  total = line['episode_return'] * episodes
  np.testing.assert_allclose(curve.return_sum.sum(), total, rtol=1e-5)
  by_age = line['episode_return_by_age']
  assert len(by_age) == PARTS
  # parts of a life of 6 updates, at ages 0, 0, 1, 2, 3, 3, 4, 5, and 2, 2, 3, 4, 5, 5, 0, 0 two updates later
  assert np.flatnonzero(curve.episodes).tolist() == [0, 1, 3, 5, 6, 8]
  assert not np.any(state.groups[0].actor.episodes.finished) and not np.any(state.curve.episodes)
  assert means_of([(3.0, 2.0), (0.0, 0.0), (np.inf, 1.0)]) == [1.5, None, None]


def test_the_mesh_is_of_members() -> None:
  program, _ = spread(8)
  assert program.mesh.axis_names == (POPULATION,) and program.mesh.size == 8
  with pytest.raises(ValueError, match=r'--agents 3.*2'):
    populations.program(agents=3, devices=2)
