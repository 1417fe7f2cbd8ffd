"""Settings of JAX under which podrace does not compute."""

from __future__ import annotations

import os
import sys

from podrace.errors import UsageError

JAX_TRUE = ('y', 'yes', 't', 'true', 'on', '1')  # as JAX reads its variables
JAX_SETTINGS = {  # name -> the values that are refused, and the reason
  'jax_enable_x64': (JAX_TRUE, 'podrace computes in 32 bits'),
  'jax_numpy_dtype_promotion': (('strict',), 'podrace computes with the standard promotion'),
  'jax_disable_jit': (JAX_TRUE, 'podrace computes in compiled programs'),
}
JAX_SETTINGS |= {
  f'jax_transfer_guard{kind}': (
    ('disallow', 'disallow_explicit'),
    'podrace moves arrays between host and devices',
  )
  for kind in ('', '_host_to_device', '_device_to_device', '_device_to_host')
}


def check_jax() -> None:
  """Check the settings of JAX, or its environment variables if it is not imported.

  Raises:
    UsageError: for a setting under which podrace does not compute.
  """
  jax = sys.modules.get('jax')
  config = getattr(jax, 'config', None)
  for name, (refused, why) in JAX_SETTINGS.items():
    variable = name.upper()
    value = str(getattr(config, name, os.environ.get(variable, '')))
    if value.lower() in refused:
      raise UsageError(
        f"{variable}={value}: {why}; unset it, or leave out jax.config.update('{name}', ...)"
      )
