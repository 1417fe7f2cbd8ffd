"""The core transformer: against NumPy, what it sees, and its gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podrace.networks.actor_critic import ActorCritic
from podrace.networks.attention import Attention, TransformerCore, state_shapes

T, B, SIZE, HEADS, WINDOW = 7, 3, 6, 2, 3


def core_and_inputs(layers: int = 1, seed: int = 0) -> Any:
  rng = np.random.default_rng(seed)
  core = TransformerCore(SIZE, Attention(WINDOW, layers, HEADS))
  x = rng.normal(size=(T, B, 5)).astype(np.float32)
  first = np.zeros((T, B), bool)
  state = tuple(np.zeros((B, *s), np.float32) for s in state_shapes(SIZE, core.settings))
  params = jax.jit(core.init)(jax.random.key(seed), state, x, first)['params']
  # Biases begin at 0, where they could not be told from missing ones.
  params = jax.tree.map(lambda p: p + rng.normal(size=p.shape).astype(np.float32) / 2, params)
  return jax.jit(lambda s, x, first: core.apply({'params': params}, s, x, first)), params, state, x


def normalized(x: np.ndarray, p: Any) -> np.ndarray:
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * p['scale'] + p['bias']


def sigmoid(x: np.ndarray) -> np.ndarray:
  return 1 / (1 + np.exp(-x))


def gate(x: np.ndarray, y: np.ndarray, p: Any) -> np.ndarray:
  reset_y, update_y, new_y = np.split(y @ p['from_y']['kernel'], 3, -1)
  reset_x, update_x = np.split(x @ p['from_x']['kernel'], 2, -1)
  update = sigmoid(update_y + update_x - p['bias'])
  new = np.tanh(new_y + (sigmoid(reset_y + reset_x) * x) @ p['reset']['kernel'])
  return (1 - update) * x + update * new


def block(x: np.ndarray, context: list[np.ndarray], p: Any) -> np.ndarray:
  """One timestep x [size] and its context, the oldest first, x itself last."""
  q, k, v = (p['attention'][name] for name in ('query', 'key', 'value'))
  normal = np.array([normalized(c, p['before_attention']) for c in context])
  y = np.zeros(SIZE)
  for h in range(HEADS):
    query = normal[-1] @ q['kernel'][:, h] + q['bias'][h]
    keys = normal @ k['kernel'][:, h] + k['bias'][h]
    logits = keys @ query / np.sqrt(SIZE // HEADS) + p['distance'][h][: len(context)][::-1]
    weights = np.exp(logits) / np.exp(logits).sum()
    y += weights @ (normal @ v['kernel'][:, h] + v['bias'][h]) @ p['attention']['out']['kernel'][h]
  x = gate(x, np.maximum(y + p['attention']['out']['bias'], 0), p['attention_gate'])
  up = normalized(x, p['before_layers']) @ p['up']['kernel'] + p['up']['bias']
  down = np.maximum(up, 0) @ p['down']['kernel'] + p['down']['bias']
  return gate(x, np.maximum(down, 0), p['layers_gate'])


@pytest.mark.parametrize('layers', [1, 2])
def test_outputs_are_numpys(layers: int) -> None:
  apply, params, state, x = core_and_inputs(layers)
  first = np.zeros((T, B), bool)
  first[4, 1] = first[0, 2] = True
  outputs, _ = apply(state, x, first)
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  for b in range(B):
    contexts: list[list[np.ndarray]] = [[] for _ in range(layers)]
    for t in range(T):
      y = x[t, b] @ p['input']['kernel'] + p['input']['bias']
      for i, context in enumerate(contexts):
        context[:] = [*(() if first[t, b] else context), y][-WINDOW - 1 :]
        y = block(y, context, p[f'block_{i}'])
      assert_allclose(outputs[t, b], y, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize('layers', [1, 2])
def test_each_block_sees_its_window(layers: int) -> None:
  apply, _, state, x = core_and_inputs(layers)
  first = np.zeros((T, B), bool)
  changed = np.copy(x)
  changed[0] += 1
  one, other = (np.asarray(apply(state, inputs, first)[0]) for inputs in (x, changed))
  last = layers * WINDOW  # the last timestep that the first one reaches
  assert (one[: last + 1] != other[: last + 1]).any(-1).all()
  assert_array_equal(one[last + 1 :], other[last + 1 :])


@pytest.mark.parametrize('cut', [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
def test_unrolls_of_any_length_agree(cut: int) -> None:
  apply, _, state, x = core_and_inputs(2)
  first = np.zeros((T, B), bool)
  first[1, 0] = first[3, 1] = True
  whole, end = apply(state, x, first)
  outputs = []
  for begin in range(0, T, cut):
    y, state = apply(state, x[begin : begin + cut], first[begin : begin + cut])
    outputs.append(y)
  assert_allclose(np.concatenate(outputs), whole, rtol=1e-4, atol=1e-5)
  valid = np.asarray(end[1], bool)
  assert_array_equal(valid, state[1])
  assert valid.all()  # the episodes are longer than the window
  assert_allclose(end[0], state[0], rtol=1e-4, atol=1e-5)


def test_a_new_episode_has_an_empty_window() -> None:
  apply, _, state, x = core_and_inputs()
  first = np.zeros((T, B), bool)
  first[-2, 0] = True
  _, (_, valid) = apply(state, x, first)
  assert_array_equal(valid, [[0, 1, 1], [1, 1, 1], [1, 1, 1]])


def test_gradients_end_at_a_new_episode() -> None:
  apply, _, state, x = core_and_inputs()
  first = np.zeros((T, B), bool)
  first[2, 0] = True
  gradient = jax.jit(jax.grad(lambda x: jnp.sum(apply(state, x, first)[0][3] ** 2)))(x)
  assert_array_equal(
    np.asarray(gradient).any(-1),
    [[t <= 3 and (t >= 2 or b > 0) for b in range(B)] for t in range(T)],
  )


def test_heads_that_do_not_divide_the_width() -> None:
  with pytest.raises(ValueError, match=r'core_size 10 .* 4 heads'):
    ActorCritic(core='transformer', core_size=10)
  ActorCritic(core='gru', core_size=10)
