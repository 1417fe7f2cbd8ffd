"""One run: its directory, loop, checkpoints, metrics and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from podrace.envs.libraries import OPPONENT_LOADERS


def _load_opponent(run_dir: Path, game: str, checkpoint: str) -> Any:
  from podrace.run.opponents import load_opponent

  return load_opponent(run_dir, game, checkpoint)


OPPONENT_LOADERS[:] = [_load_opponent]
