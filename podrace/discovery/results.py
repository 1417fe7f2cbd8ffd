"""What a run of meta-training has to show: the rule, as a file that agents take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from podrace.rules import files

RULE = 'rule.npz'  # in the run directory


def write_rule(run_dir: Path, state: Any) -> None:
  """Writes the rule as it is at a checkpoint; of several processes the first one does."""
  if jax.process_index() == 0:
    files.save(run_dir / RULE, jax.device_get(state.train.params))
