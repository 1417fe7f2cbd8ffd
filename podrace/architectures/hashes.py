"""Hashes of parameters and shapes."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from podrace.system.scheduling import cores, processor
from podrace.topology import on_host
from podrace.version import __version__


def params_sha256(params: Any) -> str:
  """Return a hash over the parameters' paths, dtypes, shapes and bytes, in the order of paths."""
  leaves = {
    jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  digest = hashlib.sha256()
  for path, leaf in sorted(leaves.items()):
    array = on_host(leaf)
    digest.update(f'{path} {array.dtype} {array.shape}\n'.encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()


def shapes_sha256(state: Any) -> str:
  """Return a hash over the paths, dtypes and shapes of a state."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  text = '\n'.join(f'{jax.tree_util.keystr(p)} {x.dtype} {x.shape}' for p, x in leaves)
  return hashlib.sha256(text.encode()).hexdigest()


def machine() -> dict[str, Any]:
  """Return the machine and versions that bitwise equality of a resumed run depends on."""
  device = jax.devices()[0]
  return {
    'device': device.device_kind,
    **({'processor': processor()} if device.platform == 'cpu' else {}),
    'devices': len(jax.devices()),
    'cores': cores(),
    'jax': jax.__version__,
    'podrace': __version__,
  }
