"""The arrays of a checkpoint: checksums, and reading back from disk without JAX or asyncio.

Orbax writes each tree to a folder of its own: `_METADATA` lists the arrays, and an OCDBT store
holds them in zarr format. Each process writes a store `ocdbt.process_N`. The store of the folder
itself is an index over these stores.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from podrace.types import Array

LARGE = 1 << 30  # bytes of an array from which on a check reads the end of each chunk only
PIECE = 1 << 20  # elements that are summed at once
MIX = 0x9E3779B1  # an odd number that makes each place count differently

PART = 'ocdbt.process_'  # begins the name of the store that one process writes
METADATA = {b'.zarray', b'.zattrs', b'zarr.json'}  # keys of an array that hold no data
# As orbax.
CONFIG = dict(max_inline_value_bytes=1024, max_decoded_node_bytes=10**8, manifest_kind='single')

Arrays = list[tuple[str, tuple[int, ...], np.dtype]]  # name, shape, dtype


def fingerprint(tree: Any) -> int:
  """Return a checksum (u32) over every bit of a tree, computed on the devices of its arrays.

  It is the sum over all elements, as integers, each times an odd number made from its place.
  """
  return _each_device_set(tree, copy=False)[1]


def snapshot(tree: Any) -> tuple[Any, int]:
  """Return a copy of a tree and its fingerprint, so that the tree can be donated during writing."""
  return _each_device_set(tree, copy=True)


def _each_device_set(tree: Any, copy: bool) -> tuple[Any, int]:
  """Run one program for all leaves on the same devices; returns the tree and its fingerprint."""
  leaves, structure = jax.tree.flatten(tree)
  groups: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    groups.setdefault(frozenset(leaf.sharding.device_set), []).append(i)
  total = 0
  for places in groups.values():
    some = [leaves[i] for i in places]
    copies, part = copy_and_sum(some, tuple(places), tuple(map(_loop_axis, some)), copy)
    total += int(part)
    for i, leaf in zip(places, copies, strict=True):
      leaves[i] = leaf
  return jax.tree.unflatten(structure, leaves), total % 2**32


def _loop_axis(leaf: Array) -> int | None:
  """Return the longest axis that is whole on each device; None to sum the leaf at once."""
  if leaf.size <= PIECE or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return None
  part = leaf.sharding.shard_shape(leaf.shape)
  whole = [axis for axis, n in enumerate(leaf.shape) if part[axis] == n]
  return max(whole, key=lambda axis: leaf.shape[axis], default=None)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def copy_and_sum(
  leaves: list[Array], places: tuple[int, ...], axes: tuple[int | None, ...], copy: bool
) -> tuple[list[Array], Array]:
  """Return leaves, or copies of them, and their part in `fingerprint`.

  Args:
    leaves: arrays on the same devices.
    places: the place of each leaf in its tree.
    axes: the axis along which a leaf is summed in pieces; None: at once.
    copy: whether to copy.
  """
  total = jnp.uint32(0)
  for i, leaf, axis in zip(places, leaves, axes, strict=True):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    total += _sum(leaf, i) if axis is None else _sum_in_pieces(leaf, i, axis)
  return [jnp.copy(x) for x in leaves] if copy else leaves, total


def _sum_in_pieces(leaf: Array, i: int, axis: int) -> Array:
  """Return `_sum` of a leaf. At once, XLA's CPU backend would need 4 bytes for each element."""
  n = leaf.shape[axis]
  rows = max(1, PIECE * n // leaf.size)

  def piece(start: Any, rows: int) -> Array:
    part = jax.lax.dynamic_slice_in_dim(leaf, start, rows, axis)
    return _sum(part, i, leaf.shape, axis, start)

  total = jax.lax.fori_loop(
    0, n // rows, lambda k, total: total + piece(k * rows, rows), jnp.uint32(0)
  )
  return total + piece(n - n % rows, n % rows) if n % rows else total


def _sum(leaf: Array, i: int, shape: tuple[int, ...] = (), axis: int = 0, start: Any = 0) -> Array:
  """Return the part of leaf `i` in `fingerprint`.

  Args:
    leaf: the leaf, or its elements from `start` on along `axis`.
    i: its place among the leaves.
    shape: of the whole leaf, if this is a part of it.
    axis: of the part.
    start: of the part, [] i32.
  """
  width = 8 * leaf.dtype.itemsize
  if leaf.dtype == bool:
    leaf = leaf.astype(jnp.uint8)
  bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f'uint{width}')).astype(jnp.uint32)
  place = jnp.full(bits.shape, i + 1, jnp.uint32)  # modulo 2^32, as all sums here
  stride = 1
  for d in reversed(range(bits.ndim)):
    first = jnp.asarray(start if d == axis else 0, jnp.uint32)
    index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, d) + first
    place += index * jnp.uint32(stride % 2**32)
    stride *= (shape or bits.shape)[d]
  return jnp.sum(bits * (place * jnp.uint32(MIX) | 1), dtype=jnp.uint32)


def _host_sum(x: np.ndarray, i: int) -> int:
  """Return the part of leaf `i` in `fingerprint`, computed by NumPy."""
  bits, total = np.ascontiguousarray(x).reshape(-1).view(f'u{x.dtype.itemsize}'), 0
  for start in range(0, bits.size, PIECE):
    piece = bits[start : start + PIECE].astype(np.uint32)
    place = np.arange(piece.size, dtype=np.uint32) + np.uint32((start + i + 1) % 2**32)
    total += int(np.sum(piece * (place * np.uint32(MIX) | np.uint32(1)), dtype=np.uint32))
  return total % 2**32


def described(tree: Any) -> Arrays:
  """Return the name, shape and dtype under which orbax stores each leaf; PRNG keys as numbers."""
  leaves: Arrays = []
  for path, leaf in jax.tree_util.tree_leaves_with_path((tree,)):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    leaves.append((name, tuple(leaf.shape), np.dtype(leaf.dtype)))
  return leaves


class StoredArrays:
  """The arrays in one folder of a checkpoint.

  Attributes:
    names: of all arrays, as `described` makes them.

  Raises:
    ValueError, OSError: in each method, if an array cannot be read or is not as expected. The
      message names it.
  """

  def __init__(self, folder: Path) -> None:
    record = json.loads((folder / '_METADATA').read_bytes())
    self.names = {
      '.'.join(str(key['key']) for key in entry['key_metadata'])
      for entry in record['tree_metadata'].values()
      if not entry['value_metadata']['skip_deserialize']  # else it is an empty node
    }
    self._driver = 'zarr3' if record.get('use_zarr3') else 'zarr'
    self._store = open_store(folder, ts.Context())

  def read(self, tree: Any) -> Any:
    """Read arrays of the shapes, dtypes and shardings in `tree`.

    Each process reads the parts of its devices.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = self._open(described(tree))
    reads = [_begin_reads(x.sharding, array) for x, array in zip(leaves, arrays, strict=True)]
    for future in (f for futures in reads for f in futures.values()):
      future.exception()  # waits, so that no read goes on after one has failed
    return jax.tree.unflatten(structure, map(_on_devices, leaves, arrays, reads))

  def check(self, expected: Arrays) -> int | None:
    """Read all arrays; returns their fingerprint, or None if one is too large to be read whole."""
    total, whole = 0, True
    for i, (array, (name, shape, dtype)) in enumerate(
      zip(self._open(expected), expected, strict=True)
    ):
      if math.prod(shape) * dtype.itemsize < LARGE:
        total += _host_sum(array.read().result(), i)
      else:
        self._check_chunks(name, array)
        whole = False
    return total % 2**32 if whole else None

  def _open(self, expected: Arrays) -> list[ts.TensorStore]:
    names = {name for name, _, _ in expected}
    if differing := sorted(names ^ self.names):
      raise ValueError(
        f'_METADATA lists {len(self.names)} arrays, expected {len(names)}; {differing[0]} is '
        'extra or missing'
      )
    spec = {'driver': self._driver}
    arrays = []
    for name, shape, dtype in expected:
      array = ts.open(spec, kvstore=self._store / f'{name}/', open=True).result()
      if (array.shape, array.dtype.numpy_dtype) != (shape, dtype):
        came = f'{array.dtype.numpy_dtype} {array.shape}'
        raise ValueError(f'array {name} is {came}, expected {dtype} {shape}')
      arrays.append(array)
    return arrays

  def _check_chunks(self, name: str, array: ts.TensorStore) -> None:
    """Read the last byte of each chunk: a missing or shortened one fails, without its memory."""
    sizes = cast(tuple[int, ...], array.chunk_layout.write_chunk.shape or ())  # None of a scalar
    expected = math.prod(-(-n // m) for n, m in zip(array.shape, sizes, strict=True))
    store = self._store / f'{name}/'
    keys = [key for key in store.list().result() if key not in METADATA]
    if len(keys) != expected:
      raise ValueError(f'array {name} has {len(keys)} chunks, expected {expected}')
    for key in keys:
      if len(store.read(key, byte_range=slice(-1, None)).result().value) != 1:
        raise ValueError(f'array {name} has an empty chunk {key!r}')


def _begin_reads(sharding: Any, array: ts.TensorStore) -> dict[str, Any]:
  """Begin to read the distinct parts of an array on this process's devices; futures by index."""
  indices = sharding.addressable_devices_indices_map(array.shape).values()
  return {text: array[index].read() for text, index in {str(i): i for i in indices}.items()}


def _on_devices(leaf: Any, array: ts.TensorStore, reads: dict[str, Any]) -> Array:
  """The array that `leaf` describes, of parts that were read."""
  parts = {index: future.result() for index, future in reads.items()}
  data = jax.make_array_from_callback(array.shape, leaf.sharding, lambda i: parts[str(i)])
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.zeros((), leaf.dtype)))
  return data


def open_store(folder: Path, context: ts.Context) -> ts.KvStore:
  """The OCDBT store in a folder. Nothing is written until something is copied there."""
  spec = {'driver': 'ocdbt', 'base': {'driver': 'file', 'path': f'{folder}/'}, 'config': CONFIG}
  return ts.KvStore.open({**spec, 'assume_config': True}, context=context).result()


def merge(folder: Path) -> None:
  """Index all arrays in the stores `ocdbt.process_*` of a folder, as orbax does."""
  context, transaction = ts.Context(), ts.Transaction(atomic=True)
  target = open_store(folder, context).with_transaction(transaction)
  for part in sorted(p for p in folder.iterdir() if p.name.startswith(PART)):
    open_store(part, context).experimental_copy_range_to(target).result()
  transaction.commit_sync()
