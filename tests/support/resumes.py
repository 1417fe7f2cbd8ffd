"""A run that stops and goes on, beside one that does not stop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import podrace


def assert_resumes_exactly(config: Any, steps: int, folder: Path) -> podrace.Result:
  """Train to the end, and again with a stop after `steps`: the parameters are the same, to the bit.

  Returns the result of the run without a stop.
  """
  part = dataclasses.replace(config, total_steps=steps)
  whole = podrace.train(config, folder / 'whole', quiet=True)
  begun = podrace.train(part, folder / 'part', quiet=True).summary
  resumed = podrace.train(config, folder / 'part', override=True, quiet=True).summary
  assert begun['params_sha256'] != whole.summary['params_sha256'] == resumed['params_sha256']
  return whole
