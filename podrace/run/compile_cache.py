"""Compiled programs kept between commands (JAX's persistent compilation cache).

There is one directory for each user, machine type and jaxlib, limited in size. A cached program is
the program that was compiled, so a run computes the same bits with and without the cache.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path

from podrace.system.files import make_user_folder
from podrace.system.scheduling import processor

LIMIT_BYTES = 2**30  # size limit; the least recently used programs go first
MIN_COMPILE_SECONDS = 0.1  # programs that compile faster are not kept


def cache_directory() -> Path:
  """Return the directory of this user's programs for this processor and jaxlib, below ~/.cache."""
  import jaxlib

  home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
  kind = hashlib.sha256(f'{platform.machine()} {processor()}'.encode()).hexdigest()[:12]
  return Path(home) / 'podrace' / 'programs' / f'jaxlib-{jaxlib.__version__}-{kind}'


def enable(say: Callable[[str], None]) -> None:
  """Enable JAX's cache, unless the user has set JAX_COMPILATION_CACHE_DIR.

  A directory that cannot be made, or that another user may write to, is not used.

  Args:
    say: receives the directory when it is created, or the reason why it is not used.
  """
  import jax

  if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
    return
  try:
    kept = cache_directory()
    if not kept.is_dir():
      make_user_folder(kept, 0o700)
      say(
        f'compiled programs are kept in {kept} (at most {LIMIT_BYTES / 2**30:g} GiB); '
        '--no-compile-cache leaves that out'
      )
    status = kept.stat()
    if hasattr(os, 'getuid') and (status.st_uid != os.getuid() or status.st_mode & 0o022):
      raise PermissionError('others may write to it: remove it, or chmod 700')
    if not os.access(kept, os.R_OK | os.W_OK | os.X_OK):
      raise PermissionError('it cannot be written to')
  except (OSError, RuntimeError) as e:  # a missing home directory is a RuntimeError
    say(f'compiled programs are not kept: {e}')
    return
  jax.config.update('jax_compilation_cache_dir', str(kept))
  jax.config.update('jax_compilation_cache_max_size', LIMIT_BYTES)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', MIN_COMPILE_SECONDS)
