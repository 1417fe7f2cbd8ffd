"""Compiled programs, kept from one command to the next (JAX's persistent compilation cache).

One directory for each user, machine type and jaxlib, bounded in size. A program from the cache is the
program that was compiled, so a run computes the same bits with it and without.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path

from podrace.system.files import make_user_folder

MOST_BYTES = 2**30  # beyond that, programs that were not used for longest go
LEAST_SECONDS = 0.1  # a program that compiles faster is not kept


def directory() -> Path:
  """Where this user's programs are, for this processor and jaxlib: $XDG_CACHE_HOME/podrace/..."""
  import jaxlib

  home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
  kind = hashlib.sha256(f'{platform.machine()} {_processor()}'.encode()).hexdigest()[:12]
  return Path(home) / 'podrace' / 'programs' / f'jaxlib-{jaxlib.__version__}-{kind}'


def _processor() -> str:
  """What a program compiled for the CPU depends on: its model and features."""
  try:
    lines = Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace').splitlines()
  except OSError:
    return platform.processor()
  return '\n'.join(sorted({x for x in lines if x.startswith(('model name', 'flags', 'Features'))}))


def enable(say: Callable[[str], None]) -> None:
  """Has JAX keep what it compiles, unless the user has set JAX_COMPILATION_CACHE_DIR.

  Says so, with the directory, when it is made. A directory that can't be made, or that another user
  may write to, is not used, and `say` gets the reason.
  """
  import jax

  if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
    return
  try:
    kept = directory()
    if not kept.is_dir():
      make_user_folder(kept, 0o700)
      say(
        f'compiled programs are kept in {kept} (at most {MOST_BYTES / 2**30:g} GiB); '
        '--no-compile-cache leaves that out'
      )
    status = kept.stat()
    if hasattr(os, 'getuid') and (status.st_uid != os.getuid() or status.st_mode & 0o022):
      raise PermissionError('others may write to it: remove it, or chmod 700')
    if not os.access(kept, os.R_OK | os.W_OK | os.X_OK):
      raise PermissionError('it cannot be written to')
  except (OSError, RuntimeError) as e:  # no home directory is a RuntimeError
    say(f'compiled programs are not kept: {e}')
    return
  jax.config.update('jax_compilation_cache_dir', str(kept))
  jax.config.update('jax_compilation_cache_max_size', MOST_BYTES)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', LEAST_SECONDS)
