"""Checkpoints: the whole state of a run, written by orbax in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from podrace.errors import UsageError
from podrace.fields import is_step
from podrace.types import Array
from podrace.worker import Worker

FOREVER = 10**9  # seconds
CLOSE_SECONDS = 10.0  # that closing waits for what is being written with a checkpoint

Extra = Callable[[], dict[str, Any]]  # writes what belongs to a checkpoint; how to restore it


class CheckpointError(Exception):
  """A checkpoint could not be written or read; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Restored:
  """What was read back."""

  step: int
  params: Any
  rest: Any  # None where only the parameters were asked for
  meta: dict[str, Any]


def fingerprint(tree: Any) -> int:
  """A checksum (u32) of every bit of a tree, computed where the arrays are.

  The sum over all elements, as integers, each times an odd number made from its place.
  """
  return _each_device_set(tree, copy=False)[1]


def snapshot(tree: Any) -> tuple[Any, int]:
  """A copy, so that the tree itself can be donated while that is being written; its fingerprint."""
  return _each_device_set(tree, copy=True)


def _each_device_set(tree: Any, copy: bool) -> tuple[Any, int]:
  """One program for all leaves that are on the same devices."""
  leaves, structure = jax.tree.flatten(tree)
  groups: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    groups.setdefault(frozenset(leaf.sharding.device_set), []).append(i)
  total = 0
  for places in groups.values():
    copies, part = _copy_and_sum([leaves[i] for i in places], tuple(places), copy)
    total += int(part)
    for i, leaf in zip(places, copies, strict=True):
      leaves[i] = leaf
  return jax.tree.unflatten(structure, leaves), total % 2**32


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copy_and_sum(
  leaves: list[Array], places: tuple[int, ...], copy: bool
) -> tuple[list[Array], Array]:
  total = jnp.uint32(0)
  for i, leaf in zip(places, leaves, strict=True):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    width = 8 * leaf.dtype.itemsize
    if leaf.dtype == bool:
      leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f'uint{width}')).astype(jnp.uint32)
    place = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape) + jnp.uint32(i + 1)
    total += jnp.sum(bits * (place * jnp.uint32(0x9E3779B1) | 1), dtype=jnp.uint32)
  return [jnp.copy(x) for x in leaves] if copy else leaves, total


class Checkpoints:
  """The checkpoints of one run directory, by step; the last `keep` are kept."""

  def __init__(self, directory: Path, keep: int = 3, writes: bool = True) -> None:
    logging.getLogger('absl').setLevel(logging.CRITICAL)  # orbax tells there what it also raises
    self._directory = directory.absolute()
    drafts = sorted(directory.glob('*.orbax-checkpoint-tmp*'))
    self.half_written = [p.name for p in drafts]  # of a process that was killed
    if writes and jax.process_index() == 0:
      for draft in drafts:
        shutil.rmtree(draft, ignore_errors=True)
    # Orbax measures how long it waits by the wall's clock, which may jump: of one process nothing is waited for
    # but its own threads. Directories made at once leave out waits whose limits can't be set.
    patient = ocp.AsyncOptions(timeout_secs=FOREVER, create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(
      async_options=patient if jax.process_count() == 1 else None,
      max_to_keep=keep,
      create=writes,
      read_only=not writes,
      cleanup_tmp_directories=writes,
      enable_async_checkpointing=writes,
    )
    items = ('params', 'rest', 'meta')
    self._manager = ocp.CheckpointManager(self._directory, item_names=items, options=options)
    self._writing: Worker | None = (
      None  # writes a checkpoint's extra directory, and then the checkpoint
    )
    self._closed = False
    self._newest = -1  # the step of the last one that was to be saved
    if writes:
      self.tidy()

  def steps(self) -> list[int]:
    """The steps for which there is one, newest first."""
    return sorted(self._manager.all_steps(), reverse=True)

  def extra(self, step: int) -> Path:
    """The directory of what belongs to the checkpoint at `step` and isn't arrays on devices.

    It is whole before the checkpoint is; it is removed after that, and if there comes to be none.
    """
    return self._directory.parent / 'replay' / str(step)

  def tidy(self) -> None:
    """Removes extra directories of no checkpoint, there or being written.

    Orbax forgets the oldest checkpoint as soon as the next is begun, and removes it when that is whole: until
    then it is the one that a killed run goes on from, so what counts is its directory. Of several processes the
    first one does it, and the others may be ahead of it by the newest.
    """
    if jax.process_index() > 0:
      return
    there = {int(p.name) for p in self._directory.glob('[0-9]*') if is_step(p.name)}
    steps = there.union(self._manager.all_steps())
    for folder in self.extra(0).parent.glob('[0-9]*'):
      name = folder.name  # with zeros before the number it is a replay service's, kept there
      if is_step(name) and name == str(int(name)) and int(name) not in steps | {self._newest}:
        shutil.rmtree(folder, ignore_errors=True)
    for partial in self.extra(0).parent.glob('.*.partial'):
      shutil.rmtree(partial, ignore_errors=True)

  def save(
    self, step: int, params: Any, rest: Any, meta: dict[str, Any], extra: Extra | None = None
  ) -> None:
    """Takes a copy and returns; writing goes on in the background.

    With `extra`, that is called there first, and the checkpoint begun when it has returned: no
    checkpoint is without what belongs to it. What it returns becomes `extra` of the checkpoint's meta.
    Of several processes it is called here: they begin a checkpoint together, which is for the thread that learns.

    Raises:
      CheckpointError: if this, or the one before it, could not be written.
    """
    self._join()
    self.check()
    self._newest = step
    self.tidy()  # before there is one more
    params, of_params = snapshot(params)
    rest, of_rest = snapshot(rest)
    prints = {'params': of_params, 'rest': of_rest}
    meta = {**meta, 'step': step, 'fingerprints': prints, 'extra': None}
    if extra is None:
      self._begin(step, params, rest, meta)
      return

    def write() -> None:
      record = extra()
      if not self._closed:
        self._begin(step, params, rest, {**meta, 'extra': record})

    if jax.process_count() > 1:
      write()
    else:
      self._writing = Worker(f'checkpoint-{step}', write)

  def _begin(self, step: int, params: Any, rest: Any, meta: dict[str, Any]) -> None:
    args = ocp.args.Composite(
      params=ocp.args.StandardSave((params,)),  # in a tuple, as orbax refuses a bare array
      rest=ocp.args.StandardSave((rest,)),
      meta=ocp.args.JsonSave(_signed(meta)),
    )
    try:
      self._manager.save(step, args=args, force=True)
    except Exception as e:
      raise CheckpointError(f'checkpoint {step} in {self._directory} failed: {e}') from e

  def _join(self, timeout: float | None = None) -> None:
    """Waits for what is written of a checkpoint's extra directory; what failed there is raised once."""
    if self._writing is None:
      return
    try:
      if not self._writing.join(timeout):
        return
    except Exception as e:
      self._writing = None
      if isinstance(e, CheckpointError):
        raise
      raise CheckpointError(f'a checkpoint in {self._directory} failed: {e!r}') from e
    self._writing = None

  def check(self) -> None:
    """Raises CheckpointError if a save in the background has failed."""
    try:
      self._manager.check_for_errors()
    except Exception as e:
      raise CheckpointError(f'a checkpoint in {self._directory} failed: {e}') from e

  def wait(self) -> None:
    """Returns when all is written; raises CheckpointError if that failed."""
    self._join()
    try:
      self._manager.wait_until_finished()
    except Exception as e:
      raise CheckpointError(f'a checkpoint in {self._directory} failed: {e}') from e
    self.check()
    self.tidy()

  def meta(self, step: int) -> dict[str, Any]:
    """What was saved with the checkpoint at `step`.

    Raises:
      CheckpointError: if it can't be read.
      UsageError: if it is whole, but of an older podrace.
    """
    try:
      args = ocp.args.Composite(meta=ocp.args.JsonRestore())
      meta = dict(self._manager.restore(step, args=args)['meta'])
    except Exception as e:
      raise self._unreadable(step, e) from e
    if meta != _signed(meta):
      raise self._wrong(step)
    if 'fingerprints' not in meta:
      raise UsageError(
        f'checkpoint {step} in {self._directory} was made by an older podrace, which can go on with it; '
        'this one needs another --run-dir'
      )
    return meta

  def _unreadable(self, step: int, error: Exception) -> CheckpointError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(f'checkpoint {step} in {self._directory}: {reason[0][:300]}')

  def _wrong(self, step: int) -> CheckpointError:
    return CheckpointError(f'checkpoint {step} in {self._directory}: its checksum is wrong')

  def restore(self, step: int, params: Any, rest: Any = None) -> Restored:
    """Reads the checkpoint at `step` into trees of the given shapes and shardings.

    Without `rest` the parameters alone. What is read is compared with its checksum.

    Raises:
      CheckpointError: if it is damaged, or of other shapes.
    """
    meta = self.meta(step)
    wanted = {'params': params} if rest is None else {'params': params, 'rest': rest}
    items = {name: ocp.args.StandardRestore((tree,)) for name, tree in wanted.items()}
    try:
      found = self._manager.restore(step, args=ocp.args.Composite(**items))
      read = {name: found[name][0] for name in wanted}
    except Exception as e:
      raise self._unreadable(step, e) from e
    for name, tree in wanted.items():
      if other := _difference(tree, read[name]):
        raise CheckpointError(f'checkpoint {step} in {self._directory}: {name} {other}')
      if fingerprint(read[name]) != meta['fingerprints'][name]:
        raise self._wrong(step)
    return Restored(step, read['params'], read.get('rest'), meta)

  def set_aside(self, step: int) -> Path:
    """Moves a damaged checkpoint out of the way, to `damaged/`; nothing is deleted."""
    self._manager.wait_until_finished()
    source = self._directory / str(step)
    folder = self._directory.parent / 'damaged'
    folder.mkdir(exist_ok=True)
    target = folder / str(step)
    n = 1
    while target.exists():
      n += 1
      target = folder / f'{step}-{n}'
    source.rename(target)
    if self.extra(step).exists():
      self.extra(step).rename(target.with_name(f'{target.name}-replay'))
    self._manager.reload()
    return target

  def close(self) -> None:
    """Ends the background threads; a checkpoint that is not begun by then will not be."""
    self._closed = True
    with contextlib.suppress(CheckpointError):  # as `wait` raised, if somebody asked
      self._join(CLOSE_SECONDS)
    with contextlib.suppress(Exception):  # likewise
      self._manager.close()


def _difference(expected: Any, found: Any) -> str:
  """What a tree that was read lacks of the shapes and types expected; empty if nothing.

  Without a file of its own that says so, orbax gives the numbers of a random key for the key.
  """
  paths, structure = jax.tree_util.tree_flatten_with_path(expected)
  other: Any = jax.tree.structure(found)
  if other != structure:
    return f'has the structure {other}, expected {structure}'
  for (path, x), y in zip(paths, jax.tree.leaves(found), strict=True):
    if (x.shape, x.dtype) != (y.shape, y.dtype):
      name = jax.tree_util.keystr(path)
      return f'has {y.dtype} {y.shape} at {name}, expected {x.dtype} {x.shape}'
  return ''


def _signed(meta: dict[str, Any]) -> dict[str, Any]:
  """`meta` with a hash of all else that is in it."""
  rest = {k: v for k, v in meta.items() if k != 'sha256'}
  text = json.dumps(rest, sort_keys=True)
  return {**rest, 'sha256': hashlib.sha256(text.encode()).hexdigest()}
