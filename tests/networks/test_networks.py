"""Networks: their shapes, their recurrence, their convolutions, and how they begin."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import streams
from compiling import jit
from flax import linen as nn
from gymnasium import spaces
from shorthand import slow_after

from podrace import networks
from podrace.distributions import MASKED
from podrace.networks import ActorCritic, layers
from podrace.networks.cores import Core
from podrace.types import FIRST, LAST, MID, TimeStep

T, B = 6, 3

# float32 through a few layers of sums of some hundred terms near 1
TOLERANCE = dict(rtol=1e-5, atol=1e-5)

IMAGES = {  # the smallest that each takes without degenerating
  'mlp': (4, 4, 2),
  'nature': (36, 36, 2),
  'impala': (20, 20, 2),
  'impala-deep': (9, 9, 2),
  'grid': (5, 5, 2),
}
# Here compiling takes the time, not running.
CORES = ['none', 'gru', 'lstm']


def key(seed: int = 0) -> jax.Array:
  return jax.random.key(seed)


def vector(n: int = 3) -> spaces.Box:
  return spaces.Box(-1, 1, (n,), np.float32)


def network(observation: Any = None, action: Any = None, **settings: Any) -> ActorCritic:
  net = ActorCritic(**dict(dict(hidden=(8,), core_size=4), **settings))
  return net.bind(observation or vector(), action or spaces.Discrete(3))


def observations(space: Any, *leading: int) -> Any:
  """[*leading, ...] samples of a space, one by one."""
  space.seed(0)
  samples = [space.sample() for _ in range(math.prod(leading))]
  return jax.tree.map(lambda *xs: np.stack(xs).reshape(*leading, *np.shape(xs[0])), *samples)


def timesteps(space: Any, types: Any = None) -> TimeStep:
  if types is None:  # episodes end and begin at different times
    types = np.array([[1, 0, 1], [1, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 1], [1, 1, 1]], np.int8)
  types = np.asarray(types, np.int8)
  ones = np.ones(types.shape, np.float32)
  return TimeStep(observations(space, *types.shape), ones, ones, types)


def init(net: ActorCritic) -> Any:
  return jit(net.init)(key())


def random_state(net: ActorCritic, batch: int = B) -> Any:
  zeros = net.initial_state(batch)
  rng = np.random.default_rng(9)
  return tuple(rng.normal(size=x.shape).astype(np.float32) for x in zeros)


def paths(net: ActorCritic) -> dict[str, tuple[int, ...]]:
  tree = jax.tree_util.tree_leaves_with_path(jax.eval_shape(net.init, key()))
  return {jax.tree_util.keystr(k, simple=True, separator='/'): x.shape for k, x in tree}


# --- unrolling --------------------------------------------------------------------------------


def torsos_and_cores() -> list[Any]:
  """All pairs; each torso without a core, but for the largest, and each core is fast once."""
  fast = {*((torso, 'none') for torso in IMAGES), ('mlp', 'gru'), ('grid', 'lstm')}
  fast.discard(('impala-deep', 'none'))
  pairs = [(torso, core) for torso in IMAGES for core in CORES]
  return [pytest.param(*p, marks=() if p in fast else pytest.mark.slow) for p in pairs]


@pytest.mark.parametrize(('torso', 'core'), torsos_and_cores())
def test_unroll_is_step_by_step(torso: str, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
  if torso != 'grid':  # XLA's convolution compiles ten times faster; that ours is equal, see below
    monkeypatch.setattr(layers, 'conv2d', layers.xla_conv)
  space = spaces.Box(0, 255, IMAGES[torso], np.uint8)
  net = network(space, torso=torso, core=core, initializer='lecun')  # no QR to compile
  params = init(net)
  state, steps = random_state(net), timesteps(space)
  unrolled, end = jit(net.unroll)(params, state, steps)
  stepped, stepped_end = jit(functools.partial(networks.unroll_steps, net))(params, state, steps)
  assert unrolled.policy.shape == (T, B, 3) and unrolled.value.shape == (T, B)
  assert [x.shape for x in end] == {'none': 0, 'gru': 1, 'lstm': 2}[core] * [(B, 4)]
  for x, y in zip(
    jax.tree.leaves((unrolled, end)), jax.tree.leaves((stepped, stepped_end)), strict=True
  ):
    np.testing.assert_allclose(x, y, **TOLERANCE)


@pytest.mark.parametrize(
  ('action', 'core', 'shared'),
  [
    (spaces.Box(-1, 1, (2,)), 'none', False),
    (spaces.Box(-1, 1, (2,)), 'lstm', True),
    (spaces.MultiDiscrete([2, 3]), 'gru', True),
    pytest.param(spaces.MultiDiscrete([2, 3]), 'transformer', True, marks=pytest.mark.slow),
  ],
)
def test_unroll_is_step_by_step_for_vectors(action: Any, core: str, shared: bool) -> None:
  net = network(vector(), action, core=core, shared=shared)
  params, state, steps = init(net), random_state(net), timesteps(vector())
  unrolled, _ = jit(net.unroll)(params, state, steps)
  stepped, _ = jit(functools.partial(networks.unroll_steps, net))(params, state, steps)
  assert unrolled.policy.shape == (T, B, net.distribution.size)
  np.testing.assert_allclose(unrolled.policy, stepped.policy, **TOLERANCE)
  np.testing.assert_allclose(unrolled.value, stepped.value, **TOLERANCE)


def test_unroll_merged_is_step_by_step() -> None:
  net = network()
  params, steps = init(net), timesteps(vector())
  merged, state = jit(functools.partial(networks.unroll_merged, net))(params, (), steps)
  stepped, _ = jit(functools.partial(networks.unroll_steps, net))(params, (), steps)
  assert state == ()
  np.testing.assert_allclose(merged.policy, stepped.policy, **TOLERANCE)
  np.testing.assert_allclose(merged.value, stepped.value, **TOLERANCE)


@pytest.mark.parametrize('core', slow_after(2, 'gru', 'lstm', 'transformer'))
def test_first_forgets(core: str) -> None:
  """Environment 0 begins anew at time 3; what was before makes no difference, to the bit."""
  net = network(core=core)
  params = init(net)
  types = np.full((T, 2), MID)
  types[2, 0], types[3, 0] = LAST, FIRST
  steps = timesteps(vector(), types)
  compiled = jit(net.unroll)
  unroll = lambda *args: jax.device_get(compiled(*args))  # noqa: E731
  one, _ = unroll(params, random_state(net, 2), steps)
  observation = np.copy(steps.observation)
  observation[:3] += 1
  other, _ = unroll(params, net.initial_state(2), steps._replace(observation=observation))
  for x, y in zip(one, other, strict=True):
    assert np.array_equal(x[3:, 0], y[3:, 0])
    assert (x[:3, 0] != y[:3, 0]).all()
    assert (x[3:, 1] != y[3:, 1]).all()  # environment 1 remembers
  fresh, _ = unroll(
    params, net.initial_state(2), jax.tree.map(lambda x: np.concatenate([x[3:], x[:3]]), steps)
  )
  np.testing.assert_allclose(one.policy[3:, 0], fresh.policy[:3, 0], **TOLERANCE)


@pytest.mark.parametrize(
  'core', ['gru', 'lstm', pytest.param('transformer', marks=pytest.mark.slow)]
)
def test_no_gradient_passes_first(core: str) -> None:
  net = network(core=core)
  params = init(net)
  types = np.full((T, 2), MID)
  types[3, 0] = FIRST

  def after(state: Any) -> jax.Array:
    output, _ = net.unroll(params, state, timesteps(vector(), types))
    return jnp.sum(output.value[3:])

  # Of a transformer, the second array says which timesteps belong to the episode.
  grads = jax.device_get(jit(jax.grad(after))(random_state(net, 2)))
  for grad in grads[: 1 if core == 'transformer' else None]:
    assert not grad[0].any() and grad[1].any()


# --- cores ------------------------------------------------------------------------------------


def core_and_inputs(kind: str, size: int = 4, features: int = 5) -> Any:
  core = Core(kind, size)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(T, B, features)).astype(np.float32)
  first = rng.random((T, B)) < 0.3
  states = {'gru': 1, 'lstm': 2}[kind]
  state = tuple(rng.normal(size=(B, size)).astype(np.float32) for _ in range(states))
  params = jax.device_get(jit(core.init)(key(), state, x, first))['params']
  # biases begin at 0, where they could not be told from missing ones
  params = jax.tree.map(lambda p: p + rng.normal(size=p.shape).astype(np.float32) / 3, params)
  return core, params, state, x, first


def applied(core: Any, params: Any, *inputs: Any) -> Any:
  return jax.device_get(jit(core.apply)({'params': params}, *inputs))


def sigmoid(x: np.ndarray) -> np.ndarray:
  return 1 / (1 + np.exp(-x))


def test_gru_is_numpys() -> None:
  core, params, (h,), x, first = core_and_inputs('gru')
  outputs, (end,) = applied(core, params, (h,), x, first)
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  r, z, n = (slice(i * 4, i * 4 + 4) for i in range(3))
  w, b, u = p['input']['kernel'], p['input']['bias'], p['recurrent']
  for t in range(T):
    h = np.where(first[t][:, None], 0, h)
    reset = sigmoid(x[t] @ w[:, r] + b[r] + h @ u[:, r])
    update = sigmoid(x[t] @ w[:, z] + b[z] + h @ u[:, z])
    candidate = np.tanh(x[t] @ w[:, n] + b[n] + reset * (h @ u[:, n] + p['bias']))
    h = (1 - update) * candidate + update * h
    np.testing.assert_allclose(outputs[t], h, **TOLERANCE)
  assert np.array_equal(end, outputs[-1])


def test_lstm_is_numpys() -> None:
  core, params, (h, c), x, first = core_and_inputs('lstm')
  outputs, end = applied(core, params, (h, c), x, first)
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  i, f, g, o = (slice(k * 4, k * 4 + 4) for k in range(4))
  w, b, u = p['input']['kernel'], p['input']['bias'], p['recurrent']
  for t in range(T):
    h, c = (np.where(first[t][:, None], 0, s) for s in (h, c))
    gate = lambda k, extra=0.0: x[t] @ w[:, k] + b[k] + h @ u[:, k] + extra  # noqa: E731
    c = sigmoid(gate(f, 1.0)) * c + sigmoid(gate(i)) * np.tanh(gate(g, p['bias']))
    h = sigmoid(gate(o)) * np.tanh(c)
    np.testing.assert_allclose(outputs[t], h, **TOLERANCE)
  np.testing.assert_allclose(end[1], c, **TOLERANCE)


def test_gru_is_flaxs() -> None:
  core, params, (h,), x, _ = core_and_inputs('gru')
  never = np.zeros((T, B), bool)
  outputs, _ = applied(core, params, (h,), x, never)
  kernel, bias = (np.split(params['input'][k], 3, axis=-1) for k in ('kernel', 'bias'))
  recurrent = np.split(params['recurrent'], 3, axis=-1)
  theirs = {f'i{g}': dict(kernel=kernel[i], bias=bias[i]) for i, g in enumerate('rzn')}
  theirs |= {f'h{g}': dict(kernel=recurrent[i]) for i, g in enumerate('rzn')}
  theirs['hn']['bias'] = params['bias']
  cell = jit(nn.GRUCell(4).apply)
  for t in range(T):
    h, y = cell({'params': theirs}, h, x[t])
    np.testing.assert_allclose(outputs[t], y, **TOLERANCE)


def test_lstm_is_flaxs() -> None:
  core, params, (h, c), x, _ = core_and_inputs('lstm')
  never = np.zeros((T, B), bool)
  outputs, _ = applied(core, params, (h, c), x, never)
  kernel, bias = (np.split(params['input'][k], 4, axis=-1) for k in ('kernel', 'bias'))
  recurrent = np.split(params['recurrent'], 4, axis=-1)
  extra = dict(i=0.0, f=1.0, g=params['bias'], o=0.0)
  theirs = {f'i{g}': dict(kernel=kernel[i]) for i, g in enumerate('ifgo')}
  for i, g in enumerate('ifgo'):
    theirs[f'h{g}'] = dict(kernel=recurrent[i], bias=bias[i] + extra[g])
  carry, cell = (c, h), jit(nn.OptimizedLSTMCell(4).apply)
  for t in range(T):
    carry, y = cell({'params': theirs}, carry, x[t])
    np.testing.assert_allclose(outputs[t], y, **TOLERANCE)


# --- convolutions -----------------------------------------------------------------------------

CONVOLUTIONS = [  # height, width, window, stride, padding
  pytest.param(10, 5, 3, 1, 'VALID', marks=pytest.mark.slow),
  (10, 5, 3, 1, 'SAME'),
  (9, 12, 4, 2, 'VALID'),
  pytest.param(9, 12, 4, 2, 'SAME', marks=pytest.mark.slow),
  pytest.param(11, 8, 8, 4, 'VALID', marks=pytest.mark.slow),
  pytest.param(7, 8, 5, 3, 'SAME', marks=pytest.mark.slow),
  pytest.param(7, 7, 1, 1, 'VALID', marks=pytest.mark.slow),
  pytest.param(7, 7, 1, 3, 'SAME', marks=pytest.mark.slow),
  pytest.param(3, 3, 3, 2, 'VALID', marks=pytest.mark.slow),
  (2, 2, 3, 2, 'SAME'),
]


@pytest.mark.parametrize(('height', 'width', 'window', 'stride', 'padding'), CONVOLUTIONS)
def test_patches_are_a_convolution(
  height: int, width: int, window: int, stride: int, padding: str
) -> None:
  rng = np.random.default_rng(1)
  x = rng.normal(size=(2, height, width, 3)).astype(np.float32)
  kernel = rng.normal(size=(window, window, 3, 5)).astype(np.float32)

  @functools.partial(jit, static_argnums=0)
  def value_and_grads(conv: Any, x: jax.Array, kernel: jax.Array) -> Any:
    y, back = jax.vjp(lambda x, k: conv(x, k, stride, padding), x, kernel)
    return y, *back(jnp.cos(y))

  ours = value_and_grads(layers.patches_conv, x, kernel)
  xlas = value_and_grads(layers.xla_conv, x, kernel)
  for a, b in zip(ours, xlas, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)  # sums of up to 192 products of size 1


def test_bytes_are_scaled_in_either_convolution() -> None:
  rng = np.random.default_rng(1)
  x = rng.integers(0, 256, (2, 9, 12, 3), np.uint8)
  kernel = rng.normal(size=(4, 4, 3, 5)).astype(np.float32)

  @functools.partial(jit, static_argnums=0)
  def value_and_grad(conv: Any, x: jax.Array) -> Any:
    y, back = jax.vjp(lambda k: conv(x, k, 2, 'SAME'), kernel)
    return y, *back(jnp.cos(y))

  of_floats = value_and_grad(layers.xla_conv, np.float32(x) / 255)
  for conv in (layers.patches_conv, layers.xla_conv):
    for a, b in zip(value_and_grad(conv, x), of_floats, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_convolutions_on_cpu_are_by_patches() -> None:
  x, kernel = jax.random.normal(key(1), (2, 6, 5, 3)), jax.random.normal(key(2), (3, 3, 3, 5))
  text = (
    jax.jit(layers.conv2d, static_argnums=(2, 3)).lower(x, kernel, 1, 'SAME').compile().as_text()
  )
  assert ' convolution(' not in text
  used = layers.conv2d(x, kernel, 1, 'SAME')
  np.testing.assert_allclose(used, layers.xla_conv(x, kernel, 1, 'SAME'), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('seeds', [None, 3])
@pytest.mark.parametrize('width', slow_after(2, 1, 40, 7, 8))
def test_affine_is_a_product_and_a_sum(width: int, seeds: int | None) -> None:
  def value_and_grads(f: Any) -> Any:
    def one(x: Any, kernel: Any, bias: Any) -> Any:
      y, back = jax.vjp(f, x, kernel, bias)
      return y, *back(jnp.cos(y))

    return jit(jax.vmap(one) if seeds else one)

  leading = (seeds,) if seeds else ()
  shapes = ((6, width), (width, 5), (1, 5))
  rng = np.random.default_rng(0)
  args = [rng.normal(size=(*leading, *s)).astype(np.float32) for s in shapes]
  ours = value_and_grads(layers.affine)(*args)
  plain = value_and_grads(lambda x, k, b: x @ k + jnp.broadcast_to(b, (6, 5)))(*args)
  for a, b in zip(ours, plain, strict=True):
    np.testing.assert_allclose(a, b, **TOLERANCE)


# --- observations -----------------------------------------------------------------------------


def test_pixels_stay_bytes_for_the_convolution() -> None:
  net = network(spaces.Box(0, 255, (36, 40, 1), np.uint8))
  pixels = (np.arange(2 * 36 * 40) % 256).astype(np.uint8).reshape(2, 36, 40, 1)
  x, mask = net.prepare(pixels)
  assert mask is None and x.dtype == jnp.uint8
  np.testing.assert_array_equal(x, pixels)
  stacked = network(spaces.Box(0, 255, (2, 36, 40), np.uint8))
  frames = np.stack([np.full((36, 40), n, np.uint8) for n in (0, 20)])
  x, _ = stacked.prepare(frames[None])
  assert x.shape == (1, 36, 40, 2) and x.dtype == jnp.uint8 and x[0, 0, 0].tolist() == [0, 20]


def encoded(space: Any, value: Any, scaling: Any = 'space') -> Any:
  net = network(space, scaling=scaling)
  return np.asarray(net.prepare(np.asarray([value], space.dtype))[0])[0]


def test_bytes_of_a_small_image_are_told_apart_by_their_logarithms() -> None:
  grid = spaces.Box(0, 255, (7, 7, 3), np.uint8)
  value = np.zeros((7, 7, 3), np.uint8)
  value[0, 0] = 1, 10, 255
  expected = np.log1p([1, 10, 255]) / np.log(256)
  np.testing.assert_allclose(encoded(grid, value)[0, 0], expected, rtol=1e-6)
  assert encoded(grid, value, 'plain').dtype == np.uint8
  first = spaces.Box(0, 255, (3, 7, 7), np.uint8)
  x = encoded(first, np.moveaxis(value, -1, 0))
  np.testing.assert_allclose(x[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize('dtype', [np.int32, np.uint32])
def test_of_integers_without_bounds_the_logarithm_is_taken(dtype: Any) -> None:
  limits = np.iinfo(dtype)
  space = spaces.Box(limits.min, limits.max, (), dtype)
  for x in (limits.min, 0, 1, 10, 1000, limits.max):
    np.testing.assert_allclose(encoded(space, x), np.sign(x) * np.log1p(abs(float(x))), rtol=1e-6)
    assert encoded(space, x, 'plain') == np.float32(x)


def test_each_number_has_its_own_bound() -> None:
  high = np.int32([1, 9, 100_000, np.iinfo(np.int32).max])
  space = spaces.Box(np.zeros(4, np.int32), high, dtype=np.int32)
  x = np.int32([1, 3, 50_000, 100])
  np.testing.assert_allclose(encoded(space, x), [1, 1 / 3, 0.5, np.log1p(100)], rtol=1e-6)
  assert encoded(space, x, 'plain').tolist() == [1, 3, 50_000, 100]


def test_bytes_that_are_no_image_are_divided_by_255() -> None:
  x, _ = network(spaces.Box(0, 255, (3,), np.uint8)).prepare(np.uint8([[0, 51, 255]]))
  np.testing.assert_allclose(x, [[0, 0.2, 1]], rtol=1e-6)


@pytest.mark.parametrize('torso', ['grid', 'mlp'])
def test_a_network_sees_pixels_divided_by_255(torso: Any) -> None:
  shape = (36, 36, 3)
  high, low = spaces.Box(0, 255, shape, np.uint8), spaces.Box(0, 1, shape, np.float32)
  bytes_, floats = network(high, torso=torso), network(low, torso=torso)
  params = init(bytes_)
  pixels = np.random.default_rng(0).integers(0, 256, (5, *shape), np.uint8)

  def outputs(net: Any, observation: Any) -> Any:
    timestep = jax.tree.map(lambda x: np.repeat(np.asarray(x), 5, 0), net.example())
    timestep = timestep._replace(observation=observation)
    return jax.device_get(jit(net.step)(params, (), timestep)[0])

  ours, same = outputs(bytes_, pixels), outputs(floats, np.float32(pixels) / 255)
  assert np.ptp(ours.value) > 0.01
  for a, b in zip(ours, same, strict=True):
    np.testing.assert_allclose(a, b, **TOLERANCE)


def test_floats_stay_as_they_are() -> None:
  net = network(spaces.Box(-np.inf, np.inf, (2,), np.float32))
  x, _ = net.prepare(np.float32([[300, -7]]))
  assert x.tolist() == [[300, -7]]


def test_discrete_observations_become_one_hot() -> None:
  x, _ = network(spaces.Discrete(3, start=5)).prepare(np.array([5, 7]))
  assert x.tolist() == [[1, 0, 0], [0, 0, 1]]
  x, _ = network(spaces.MultiDiscrete([2, 3], start=[0, 1])).prepare(np.array([[1, 1], [0, 3]]))
  assert x.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
  x, _ = network(spaces.MultiBinary(2)).prepare(np.array([[1, 0]], np.int8))
  assert x.tolist() == [[1, 0]]


TREES = {
  'discrete': spaces.Discrete(4),
  'multi-discrete': spaces.MultiDiscrete([2, 3]),
  'multi-binary': spaces.MultiBinary(3),
  'dict': spaces.Dict(image=spaces.Box(0, 255, (5, 5, 2), np.uint8), here=spaces.Discrete(3)),
  'tuple': spaces.Tuple([vector(2), spaces.Dict(a=spaces.Discrete(2), b=vector(1))]),
}


@pytest.mark.parametrize('space', TREES.values(), ids=TREES)
def test_every_part_of_an_observation_is_seen(space: Any) -> None:
  net = network(space)
  params, steps = init(net), timesteps(space)
  unroll = jit(net.unroll)
  before, _ = unroll(params, net.initial_state(B), steps)
  assert before.policy.shape == (T, B, 3)
  leaves, structure = jax.tree.flatten(steps.observation)
  for i, leaf in enumerate(leaves):
    changed = list(leaves)
    changed[i] = np.roll(leaf, 1, axis=1)  # another environment's
    assert not np.array_equal(changed[i], leaf)
    observation = jax.tree.unflatten(structure, changed)
    after, _ = unroll(params, net.initial_state(B), steps._replace(observation=observation))
    assert not np.array_equal(before.policy, after.policy)


@pytest.mark.parametrize('dtype', [np.int8, bool, np.float32])
def test_action_mask(dtype: Any) -> None:
  space = spaces.Dict(x=vector(), action_mask=spaces.Box(0, 1, (3,), np.int8))
  net = network(space)
  params, steps = init(net), timesteps(space)
  mask = np.broadcast_to(np.array([1, 0, 1], dtype), (T, B, 3))
  steps.observation['action_mask'] = mask
  unroll = jit(net.unroll)
  masked, _ = jax.device_get(unroll(params, (), steps))
  assert (masked.policy[..., 1] == MASKED).all() and (masked.policy[..., ::2] > -100).all()
  # but for that it changes nothing: it is no input of the network
  open_steps = steps._replace(observation=dict(steps.observation, action_mask=np.ones_like(mask)))
  free, _ = jax.device_get(unroll(params, (), open_steps))
  assert np.array_equal(free.policy[..., ::2], masked.policy[..., ::2])
  assert np.array_equal(free.value, masked.value)
  assert paths(net)['torso/Mlp_0/Dense_0/kernel'] == (3, 8)


def test_action_mask_of_several_choices() -> None:
  space = spaces.Dict(x=vector(), action_mask=spaces.MultiBinary(5))
  net = network(space, spaces.MultiDiscrete([2, 3]))
  steps = timesteps(space)
  masked, _ = jax.device_get(jit(net.unroll)(init(net), (), steps))
  mask = np.asarray(steps.observation['action_mask']) != 0
  parts = np.split(mask, [2], axis=-1)
  assert not all(part.any(-1).all() for part in parts)  # some parts allow nothing: then all
  forbidden = np.concatenate([~part & part.any(-1, keepdims=True) for part in parts], -1)
  assert forbidden.any() and np.array_equal(masked.policy == MASKED, forbidden)


# --- what it is made of -----------------------------------------------------------------------


def atari(**settings: Any) -> ActorCritic:
  return network(spaces.Box(0, 255, (84, 84, 4), np.uint8), spaces.Discrete(6), **settings)


def count(shapes: dict[str, tuple[int, ...]], prefix: str = '') -> int:
  return sum(math.prod(s) for k, s in shapes.items() if k.startswith(prefix))


def test_the_nature_networks_parameters() -> None:
  shapes = paths(atari(torso='nature', hidden=(512,)))
  # 8*8*4*32+32, 4*4*32*64+64, 3*3*64*64+64; 84 -> 20 -> 9 -> 7 pixels: 7*7*64*512+512
  assert count(shapes, 'torso') == 8_224 + 32_832 + 36_928 + 1_606_144 == 1_684_128
  # 512*6+6 and 512+1
  assert count(shapes) == 1_684_128 + 3_078 + 513
  layers = ['torso/Nature_0/Conv_0', 'torso/Nature_0/Conv_1', 'torso/Nature_0/Conv_2']
  layers += ['torso/Mlp_0/Dense_0', 'policy_head', 'value_head']
  assert set(shapes) == {f'{layer}/{kind}' for layer in layers for kind in ('kernel', 'bias')}


def test_the_shallow_impala_networks_parameters() -> None:
  shapes = paths(atari(torso='impala', hidden=(256,)))
  # 8*8*4*16+16, 4*4*16*32+32; 84 -> 20 -> 9 pixels: 9*9*32*256+256
  assert count(shapes, 'torso') == 4_112 + 8_224 + 663_808


def test_the_deep_impala_networks_parameters() -> None:
  shapes = paths(atari(torso='impala-deep', hidden=(256,)))
  # Three stages of one convolution, and two blocks of two: 3*3*in*out + out each.
  stages = [592 + 4 * 2_320, 4_640 + 4 * 9_248, 9_248 + 4 * 9_248]
  # 84 -> 42 -> 21 -> 11 pixels: 11*11*32*256+256
  assert count(shapes, 'torso') == sum(stages) + 991_488
  assert sum(k.endswith('kernel') and 'Conv' in k for k in shapes) == 15


@pytest.mark.parametrize('core', CORES)
def test_heads_and_cores_have_these_names(core: str) -> None:
  shapes = paths(network(vector(), spaces.Box(-1, 1, (2,)), core=core))
  assert shapes['policy_head/kernel'] == (4 if core != 'none' else 8, 2)
  assert shapes['log_std'] == (2,)
  gates = {'none': 0, 'gru': 3, 'lstm': 4}[core]
  assert count(shapes, 'rnn') == gates * (8 * 4 + 4 + 4 * 4) + (4 if gates else 0)


def test_what_is_shared() -> None:
  def separate(**settings: Any) -> bool:
    return any(k.startswith('value_torso') for k in paths(network(**settings)))

  image = spaces.Box(0, 255, (5, 5, 1), np.uint8)
  assert separate(shared=False)
  assert not separate(shared=True)
  assert not separate(shared=False, core='gru')
  assert not separate(shared=False, observation=image, torso='grid')
  assert separate(shared=False, observation=image)  # which is flattened
  assert separate(shared=False, observation=image, torso='mlp')


@pytest.mark.parametrize(
  ('size', 'torso'),
  [
    ((36, 40, 1), 'nature'), ((35, 84, 1), 'grid'), ((10, 10, 10), 'mlp'), ((9,), 'mlp'),
    ((9, 9), 'mlp'),
  ],
)  # fmt: skip
def test_auto_torso(size: tuple[int, ...], torso: str) -> None:
  assert network(spaces.Box(0, 255, size, np.uint8)).image_torso == torso


@pytest.mark.parametrize(
  ('sides', 'torso'),
  [
    ([(84, 84), (9, 9)], 'grid'), ([(9, 9), (84, 84)], 'mlp'), ([(84, 84), (40, 40)], 'nature'),
    ([(2, 2000)], 'mlp'), ([(84, 84), (2, 9)], 'mlp'),
  ],
)  # fmt: skip
def test_auto_torso_fits_all_images(sides: list[tuple[int, int]], torso: str) -> None:
  images = {f'image_{i}': spaces.Box(0, 255, (*x, 1), np.uint8) for i, x in enumerate(sides)}
  assert network(spaces.Dict(images)).image_torso == torso


def test_squashed_actions_take_their_deviation_from_the_network() -> None:
  net = network(vector(), spaces.Box(-1, 1, (2,)), squash=True)
  assert 'log_std' not in paths(net) and paths(net)['policy_head/kernel'] == (8, 4)


# --- how it begins ----------------------------------------------------------------------------


def assert_orthogonal(kernel: jax.Array, gain: float) -> None:
  w = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
  gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
  np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5 * gain**2)


def test_orthogonal_initialisation() -> None:
  """Gain sqrt 2, but 0.01 for the policy and 1 for the value; biases 0, as in OpenAI's baselines."""
  net = network(vector(20), hidden=(16, 12), shared=False)
  params = init(net)
  for torso in ('torso', 'value_torso'):
    for layer in ('Dense_0', 'Dense_1'):
      assert_orthogonal(params[torso]['Mlp_0'][layer]['kernel'], math.sqrt(2))
  assert_orthogonal(params['policy_head']['kernel'], 0.01)
  assert_orthogonal(params['value_head']['kernel'], 1.0)
  biases = [x for path, x in jax.tree_util.tree_leaves_with_path(params) if 'bias' in str(path)]
  assert len(biases) == 6 and not any(np.asarray(b).any() for b in biases)
  torsos = (params[t]['Mlp_0']['Dense_0']['kernel'] for t in ('torso', 'value_torso'))
  assert not np.array_equal(*torsos)


def test_convolutions_begin_orthogonal() -> None:
  net = network(spaces.Box(0, 255, (20, 20, 3), np.uint8), torso='impala')
  params = init(net)
  for layer in params['torso']['ImpalaShallow_0'].values():
    assert_orthogonal(layer['kernel'], math.sqrt(2))


def test_cores_begin_orthogonal() -> None:
  params = init(network(core='lstm'))
  assert_orthogonal(params['rnn']['recurrent'], 1.0)


def test_lecun_initialisation() -> None:
  """A truncated normal of variance 1 / fan in, also for the heads."""
  net = network(vector(400), spaces.Discrete(100), hidden=(300,), initializer='lecun')
  params = init(net)
  for kernel in (params['torso']['Mlp_0']['Dense_0']['kernel'], params['policy_head']['kernel']):
    scaled = np.asarray(kernel, np.float64) * math.sqrt(kernel.shape[0])
    # 30,000 draws: a standard error of 0.4% for the deviation
    assert abs(np.std(scaled) - 1) < 0.02
    assert abs(np.mean(scaled)) < 0.03
    assert np.max(np.abs(scaled)) < 2.3  # cut off at 2 deviations, widened by 1/0.88


def test_log_std_begins_where_told() -> None:
  params = init(network(vector(), spaces.Box(-1, 1, (2,)), initial_log_std=-1.5))
  assert params['log_std'].tolist() == [-1.5, -1.5]


@pytest.mark.parametrize(
  ('activation', 'f'), [('tanh', np.tanh), ('relu', lambda x: np.maximum(x, 0))]
)
def test_a_feed_forward_network_by_hand(activation: str, f: Any) -> None:
  net = network(hidden=(8, 7), activation=activation)
  params = jax.device_get(init(net))
  x = streams.floats(3)(np.random.default_rng(0), (B,))
  step = TimeStep(x, np.zeros(B), np.ones(B), np.ones(B, np.int8))
  output, _ = jit(net.step)(params, (), step)
  for layer in ('Dense_0', 'Dense_1'):
    x = f(x @ params['torso']['Mlp_0'][layer]['kernel'] + params['torso']['Mlp_0'][layer]['bias'])
  np.testing.assert_allclose(output.policy, x @ params['policy_head']['kernel'], **TOLERANCE)
  np.testing.assert_allclose(output.value, (x @ params['value_head']['kernel'])[:, 0], **TOLERANCE)


# --- errors -----------------------------------------------------------------------------------

REFUSED = {
  'no image': (dict(torso='nature'), vector(), spaces.Discrete(2), 'needs an image'),
  'no distribution': (dict(), vector(), spaces.Discrete(2, start=1), 'no distribution'),
  'no actions': (dict(), vector(), spaces.Box(-1, 1, (0,)), 'empty action space'),
  'nothing to see': (
    dict(),
    spaces.Box(-1, 1, (0,)),
    spaces.Discrete(2),
    'empty observation space',
  ),
  'nothing but a mask': (
    dict(),
    spaces.Dict(action_mask=spaces.MultiBinary(2)),
    spaces.Discrete(2),
    'empty observation space',
  ),
  'no input': (dict(), spaces.Sequence(vector()), spaces.Discrete(2), 'observation space'),
  'image too small': (
    dict(torso='nature'),
    spaces.Box(0, 1, (35, 40, 1)),
    spaces.Discrete(2),
    '3x3',
  ),
  'masked box': (
    dict(),
    spaces.Dict(x=vector(), action_mask=spaces.MultiBinary(2)),
    spaces.Box(-1, 1, (2,)),
    'action_mask',
  ),
  'wrong mask': (
    dict(),
    spaces.Dict(x=vector(), action_mask=spaces.MultiBinary(3)),
    spaces.Discrete(2),
    'action_mask has shape',
  ),
}


@pytest.mark.parametrize(
  ('settings', 'observation', 'action', 'message'), REFUSED.values(), ids=REFUSED
)
def test_refused(settings: dict[str, Any], observation: Any, action: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    ActorCritic(**settings).bind(observation, action)


def test_settings_are_all_there_is() -> None:
  """Equal settings make equal networks: nothing is hidden in the object."""
  assert network() == network()
  assert dataclasses.replace(network(), hidden=(9,)) != network()
