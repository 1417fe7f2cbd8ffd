"""Checkpoints: the whole state of a run, written by orbax in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from podrace.architectures.protocol import WriteExtra
from podrace.errors import CheckpointError
from podrace.run.checkpoint.arrays import described, snapshot
from podrace.run.checkpoint.library import PlainPath, pass_warnings_on
from podrace.run.checkpoint.stored import DRAFT, StoredCheckpoint, signed
from podrace.system import files
from podrace.system.files.schema import is_step
from podrace.system.threads import Worker

SPECIFICATION = re.compile(r'\s*\[(tensorstore_spec|source locations)=.*', re.DOTALL)  # of an error
FOREVER = 10**9  # seconds
CLOSE_SECONDS = 10.0  # that closing waits for the folder that belongs to a checkpoint
# of an array that are encoded at once: a whole large replay would need its memory again
CHUNK_BYTES = 2**26
ITEMS = ('params', 'rest')  # folders of a checkpoint with a tree of arrays each


@dataclasses.dataclass(frozen=True)
class Restored:
  """A checkpoint that was read."""

  params: Any
  rest: Any  # None if only the parameters were read
  meta: dict[str, Any]


class Checkpoints:
  """The checkpoints of one run directory, by step. The last `keep` are kept.

  Owner: calls `close`.
  Ends when: closed. Its background threads write until then.
  Raises: CheckpointError, from the method after the failure of a background write.
  """

  def __init__(self, directory: Path, keep: int = 3, writes: bool = True) -> None:
    pass_warnings_on()
    self._directory = directory.absolute()
    files.check_folder(directory, 'checkpoints', links=not writes)
    if writes:
      files.make_folder(files.make_user_folder(directory.parent) / directory.name)
    drafts = sorted(directory.glob(f'*{DRAFT}*'))
    self.half_written = [p.name for p in drafts]  # of a process that was killed
    if writes and jax.process_index() == 0:
      for draft in drafts:
        files.remove(draft)
    self._plain = PlainPath(self._directory)
    self._manager = self._new_manager(keep, writes)
    # Writes the folder that belongs to a checkpoint, and then begins the checkpoint.
    self._writing: Worker | None = None
    self._verify: Callable[[], None] = lambda: None  # reads a checkpoint back
    self._closed = False
    self._newest = -1  # the step of the last call of `save`
    if writes:
      self.tidy()

  def _new_manager(self, keep: int, writes: bool) -> ocp.CheckpointManager:
    async_options = ocp.AsyncOptions(post_finalization_callback=lambda: self._verify())
    if jax.process_count() == 1:
      # Orbax measures its timeouts by the wall clock, which may jump. A run of one process waits
      # only for its own threads, so it needs no timeout. Synchronous directory creation avoids
      # waits without a configurable timeout.
      async_options = dataclasses.replace(
        async_options, timeout_secs=FOREVER, create_directories_asynchronously=False
      )
    options = ocp.CheckpointManagerOptions(
      async_options=async_options if writes else None,
      max_to_keep=keep if writes else None,
      create=False,
      cleanup_tmp_directories=writes,
      enable_async_checkpointing=writes,
    )
    return ocp.CheckpointManager(
      str(self._plain.path), item_names=(*ITEMS, 'meta'), options=options
    )

  def steps(self) -> list[int]:
    """Return the steps of all checkpoints, newest first."""
    return sorted(self._manager.all_steps(), reverse=True)

  def extra(self, step: int) -> Path:
    """Return the folder for state outside of devices that belongs to the checkpoint at `step`.

    It is complete before the checkpoint is, and removed after the checkpoint.
    """
    return self._directory.parent / 'replay' / str(step)

  def tidy(self) -> None:
    """Remove extra folders without a checkpoint that is on disk or being written.

    Orbax forgets the oldest checkpoint as soon as the next begins, and removes it when that is
    complete. Until then a killed run continues from it, so its directory decides. Only the first
    process removes folders, and other processes may be one checkpoint ahead.
    """
    if jax.process_index() > 0:
      return
    there = {int(p.name) for p in self._directory.glob('[0-9]*') if is_step(p.name)}
    steps = there.union(self._manager.all_steps())
    for folder in self.extra(0).parent.glob('[0-9]*'):
      name = folder.name  # with leading zeros it is a replay service's
      if is_step(name) and name == str(int(name)) and int(name) not in steps | {self._newest}:
        files.remove(folder)
    for partial in self.extra(0).parent.glob('.*.partial'):
      files.remove(partial)

  def save(
    self, step: int, params: Any, rest: Any, meta: dict[str, Any], extra: WriteExtra | None = None
  ) -> None:
    """Take a copy and return. Writing goes on in the background.

    Args:
      step: names the checkpoint.
      params: the parameters.
      rest: the state without its parameters.
      meta: JSON that is kept with the arrays.
      extra: writes the folder that belongs to the checkpoint. It is called in the background before
        the checkpoint begins, so no checkpoint lacks its folder. Its result becomes `extra` of the
        meta. In a run of more than one process it is called here, because the learner threads begin
        a checkpoint together.

    Raises:
      CheckpointError: if this checkpoint, or the one before it, could not be written.
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
    meta = signed(meta)
    args = ocp.args.Composite(
      params=_in_chunks((params,)),  # in a tuple, as orbax refuses a bare array
      rest=_in_chunks((rest,)),
      meta=ocp.args.JsonSave(meta),
    )
    arrays = {'params': described(params), 'rest': described(rest)}
    with self._failing(f'the checkpoint before {step}'):
      self._wait_for_writing()  # before `_verify` is of this one
    with self._failing(f'checkpoint {step}'):
      # The thread that writes calls it, before the checkpoint gets its name and before an older one
      # is removed. If it fails, there is no such checkpoint.
      self._verify = lambda: self._stored(step).verify_draft(meta, arrays)
      files.make_folder(self._directory)
      self._plain.renew()
      self._manager.save(step, args=args, force=True)

  @contextlib.contextmanager
  def _failing(self, subject: str = 'a checkpoint') -> Iterator[None]:
    """Raise an exception of the library as CheckpointError."""
    try:
      yield
    except CheckpointError:
      raise
    except Exception as e:
      reason = SPECIFICATION.sub('', str(e)) or repr(e)
      text = f'{subject} in {self._directory} failed: {reason}'
      raise CheckpointError(PlainPath.named(text)) from e

  def _wait_for_writing(self) -> None:
    try:
      self._manager.wait_until_finished()
    except Exception:
      self._manager.reload()  # it forgot the checkpoint that it would have removed
      raise

  def _join(self, timeout: float | None = None) -> None:
    """Wait for the folder that belongs to a checkpoint; raises a failure there once."""
    if (writing := self._writing) is not None and writing.wait(timeout):
      self._writing = None
      with self._failing():
        writing.check()

  def check(self) -> None:
    """Raise CheckpointError if a save in the background has failed."""
    with self._failing():
      self._manager.check_for_errors()

  def wait(self) -> None:
    """Wait until everything is written; raises CheckpointError if that failed."""
    self._join()
    with self._failing():
      self._wait_for_writing()
    self.check()
    self.tidy()

  def meta(self, step: int) -> dict[str, Any]:
    """Return the meta of the checkpoint at `step`. Raises as `StoredCheckpoint.meta`."""
    return self._stored(step).meta()

  def sums(self, step: int) -> list[str] | None:
    """Return the names of the metrics with sums in the checkpoint; None if it cannot be read."""
    return self._stored(step).sums()

  def restore(
    self, step: int, params: Any, rest: Any = None, meta: dict[str, Any] | None = None
  ) -> Restored:
    """Read the checkpoint at `step` into trees of the given shapes and shardings.

    Args:
      step: names the checkpoint.
      params: shapes and shardings of the parameters.
      rest: likewise of the state without its parameters; None to read the parameters alone.
      meta: the result of `meta(step)`, if it was read before.

    Raises:
      CheckpointError: if the checkpoint is damaged, or of other shapes.
    """
    stored = self._stored(step)
    meta = stored.meta() if meta is None else meta
    trees = stored.read({'params': params} | ({} if rest is None else {'rest': rest}), meta)
    return Restored(trees['params'], trees.get('rest'), meta)

  def _stored(self, step: int) -> StoredCheckpoint:
    return StoredCheckpoint(self._directory, self._plain.path, step)

  def set_aside(self, step: int) -> Path:
    """Move a damaged checkpoint to the folder `damaged`; deletes nothing."""
    self._manager.wait_until_finished()
    source = self._directory / str(step)
    folder = files.make_folder(self._directory.parent / 'damaged')
    target = folder / str(step)
    n = 1
    while os.path.lexists(target):
      n += 1
      target = folder / f'{step}-{n}'
    files.move(source, target)
    if self.extra(step).exists():
      files.move(self.extra(step), target.with_name(f'{target.name}-replay'))
    self._manager.reload()
    return target

  def close(self) -> None:
    """End the background threads. A checkpoint that has not begun is not made."""
    self._closed = True
    with contextlib.suppress(CheckpointError):  # `wait` raises it
      self._join(CLOSE_SECONDS)
    with contextlib.suppress(Exception):  # likewise
      self._manager.close()
      if self._writing is None:  # else its thread may yet write to the number of another file
        self._plain.close()


def _in_chunks(tree: Any) -> ocp.args.StandardSave:
  each = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
  return ocp.args.StandardSave(tree, save_args=jax.tree.map(lambda _: each, tree))
