"""A policy as an ONNX graph: podrace.policy.network with operations that write nodes.

The graph takes the arrays of an observation [B, ...] and the core's state, and returns the action
and the next state, for any batch B. The state at the beginning of an episode is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from podrace.policy.network import COVERED, STATES, Bound, Params, PolicyNetwork, flatten_space
from podrace.system import importing

OPSET, IR = 18, 10  # ONNX Runtime reads them since 1.18
BATCH = 'batch'


def why_not(about: dict[str, Any]) -> str:
  """Return the reason why a policy has no ONNX graph, or ''."""
  if about['network'] is None:
    return f'only JAX runs this policy. {COVERED}'
  try:
    import onnx.helper  # noqa: F401 (a directory of the name onnx has none)
  except Exception as e:
    return importing.why_not('it', 'onnx', e)
  return ''


def build_graph(about: dict[str, Any], params: Params) -> bytes:
  """Return the policy that policy.json describes as a serialized ONNX model."""
  import onnx
  from onnx import helper

  nodes = GraphOperations()
  network, action = about['network'], about['action']
  space = [
    nodes.input(_name('observation', i), s['shape'], s['dtype'])
    for i, s in enumerate(flatten_space(about['observation_space']))
  ]
  size = [network['core_size']]
  count = STATES[network['core']]
  before = [nodes.input(_name('state', i), size, 'float32') for i in range(count)]
  best, after = PolicyNetwork(about, params, nodes).step(space, before)
  typed = nodes.cast(nodes.reshape(best, tuple(action['shape'])), action['dtype'])
  nodes.output('action', typed, action['shape'], action['dtype'])
  for i, x in enumerate(after):
    nodes.output(_name('next_state', i), x, size, 'float32')
  onnx_graph = helper.make_graph(
    nodes.nodes, 'policy', nodes.inputs, nodes.outputs, nodes.constants
  )
  opsets = [helper.make_opsetid('', OPSET)]
  model = helper.make_model(
    onnx_graph, opset_imports=opsets, ir_version=IR, producer_name='podrace'
  )
  helper.set_model_props(model, {k: str(about[k]) for k in ('podrace', 'agent', 'env', 'step')})
  onnx.checker.check_model(model, full_check=True)
  return bytes(model.SerializeToString(deterministic=True))


def _name(kind: str, i: int) -> str:
  return f'{kind}_{i}'


class GraphValue:
  """A tensor of the graph."""

  __array_ufunc__ = None  # NumPy then leaves `array + value` to the value

  def __init__(self, nodes: GraphOperations, name: str) -> None:
    self.nodes, self.name = nodes, name

  def __add__(self, other: Any) -> GraphValue:
    return self.nodes.node('Add', self, other)

  def __radd__(self, other: Any) -> GraphValue:
    return self.nodes.node('Add', other, self)

  def __sub__(self, other: Any) -> GraphValue:
    return self.nodes.node('Sub', self, other)

  def __rsub__(self, other: Any) -> GraphValue:
    return self.nodes.node('Sub', other, self)

  def __mul__(self, other: Any) -> GraphValue:
    return self.nodes.node('Mul', self, other)

  def __rmul__(self, other: Any) -> GraphValue:
    return self.nodes.node('Mul', other, self)

  def __truediv__(self, other: Any) -> GraphValue:
    return self.nodes.node('Div', self, other)

  def __matmul__(self, other: Any) -> GraphValue:
    return self.nodes.node('MatMul', self, other)


class GraphOperations:
  """Operations that write nodes. podrace.policy.network.Operations describes each."""

  def __init__(self) -> None:
    self.nodes: list[Any] = []
    self.constants: list[Any] = []
    self.inputs: list[Any] = []
    self.outputs: list[Any] = []
    self._count = 0

  def input(self, name: str, shape: Sequence[int], dtype: str) -> GraphValue:
    """Add an input of shape [B, *shape]."""
    self.inputs.append(_info(name, shape, dtype))
    return GraphValue(self, name)

  def output(self, name: str, x: GraphValue, shape: Sequence[int], dtype: str) -> None:
    """Add an output of shape [B, *shape]."""
    from onnx import helper

    self.nodes.append(helper.make_node('Identity', [x.name], [name]))
    self.outputs.append(_info(name, shape, dtype))

  def node(self, kind: str, *inputs: Any, **attributes: Any) -> GraphValue:
    """Add a node with one output. Array inputs become constants."""
    from onnx import helper

    names = [x.name if isinstance(x, GraphValue) else self._constant(np.asarray(x)) for x in inputs]
    name = self._fresh()
    self.nodes.append(helper.make_node(kind, names, [name], **attributes))
    return GraphValue(self, name)

  def _constant(self, x: np.ndarray) -> str:
    from onnx import numpy_helper

    name = self._fresh()
    self.constants.append(numpy_helper.from_array(x, name))
    return name

  def _fresh(self) -> str:
    self._count += 1
    return f'x{self._count}'

  # --- operations -------------------------------------------------------------------------------

  def cast(self, x: GraphValue, dtype: str) -> GraphValue:
    return self.node('Cast', x, to=_type(dtype))

  def reshape(self, x: GraphValue, shape: tuple[int, ...]) -> GraphValue:
    if -1 in shape:
      return self.node('Reshape', x, np.array([0, *shape], np.int64))  # 0 keeps the dimension
    return self.node('Reshape', x, np.array([-1, *shape], np.int64))

  def columns(self, x: GraphValue, start: int, stop: int) -> GraphValue:
    bounds = (np.array([i], np.int64) for i in (start, stop, 1))
    return self.node('Slice', x, *bounds)

  def channels_last(self, x: GraphValue) -> GraphValue:
    return self.node('Transpose', x, perm=[0, 2, 3, 1])

  def _channels_first(self, x: GraphValue) -> GraphValue:
    return self.node('Transpose', x, perm=[0, 3, 1, 2])

  def concat(self, xs: Sequence[GraphValue]) -> GraphValue:
    return xs[0] if len(xs) == 1 else self.node('Concat', *xs, axis=-1)

  def one_hot(self, x: GraphValue, values: np.ndarray) -> GraphValue:
    return self.cast(self.node('Equal', x, values.astype(np.int64)), 'float32')

  def log(self, x: GraphValue) -> GraphValue:
    return self.node('Log', x)

  def tanh(self, x: GraphValue) -> GraphValue:
    return self.node('Tanh', x)

  def relu(self, x: GraphValue) -> GraphValue:
    return self.node('Relu', x)

  def sigmoid(self, x: GraphValue) -> GraphValue:
    return self.node('Sigmoid', x)

  def sqrt(self, x: GraphValue) -> GraphValue:
    return self.node('Sqrt', x)

  def softmax(self, x: GraphValue) -> GraphValue:
    return self.node('Softmax', x, axis=-1)

  def clip(self, x: GraphValue, low: Bound, high: Bound) -> GraphValue:
    return self.node('Max', self.node('Min', x, high), low)

  def where(self, mask: GraphValue, x: GraphValue, otherwise: Bound) -> GraphValue:
    return self.node('Where', mask, x, otherwise)

  def mean(self, x: GraphValue, axis: int) -> GraphValue:
    return self.node('ReduceMean', x, np.array([axis], np.int64), keepdims=1)

  def sum(self, x: GraphValue) -> GraphValue:
    return self.node('ReduceSum', x, np.array([-1], np.int64), keepdims=0)

  def argmax(self, x: GraphValue) -> GraphValue:
    return self.node('ArgMax', x, axis=-1, keepdims=0)

  def conv(
    self, x: GraphValue, kernel: np.ndarray, bias: np.ndarray, stride: int, same: bool
  ) -> GraphValue:
    weights = np.ascontiguousarray(kernel.transpose(3, 2, 0, 1))  # [F, C, h, w]
    padding = 'SAME_UPPER' if same else 'VALID'
    y = self.node(
      'Conv', self._channels_first(x), weights, bias, strides=[stride] * 2, auto_pad=padding
    )
    return self.channels_last(y)

  def max_pool(self, x: GraphValue) -> GraphValue:
    y = self._channels_first(x)
    y = self.node('MaxPool', y, kernel_shape=[3, 3], strides=[2, 2], auto_pad='SAME_UPPER')
    return self.channels_last(y)


def _type(dtype: str) -> int:
  from onnx import helper

  return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _info(name: str, shape: Sequence[int], dtype: str) -> Any:
  from onnx import helper

  return helper.make_tensor_value_info(name, _type(dtype), [BATCH, *shape])
