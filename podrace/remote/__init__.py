"""Environments on other machines, inference beside the learner (SEED RL, arXiv 1910.06591).

`server` belongs to the learner, `client` to the machines with environments, which have no JAX; `wire` is
what they say to each other (docs/protocol.md), `security` who may. The extra `remote` installs what they need.
"""

from __future__ import annotations

from podrace.envs.registry import MissingExtra


def require() -> None:
  """Raises MissingExtra if the extra is not installed."""
  try:
    import msgpack  # noqa: F401
    import zmq  # noqa: F401
  except ImportError as e:
    raise MissingExtra(
      f"remote environments need the extra 'remote': pip install 'podrace[remote]' ({e})"
    ) from e
