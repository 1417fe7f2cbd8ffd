"""The environments that replay a log: p of every q."""

from __future__ import annotations

import re
from typing import Any

from podrace.errors import UsageError

Share = tuple[int, int]  # p, q: p of every q environments replay the log
NO_LOG: Share = (0, 1)
LARGEST = 1024  # the largest q


def is_logged(env_id: Any, share: Share) -> Any:
  """Return whether environments replay the log.

  The first p of every q do, so each block of a multiple of q environments, of a device or an actor
  thread, has the same share.

  Args:
    env_id: numbers of environments, an integer or an array of any shape.
    share: p and q.

  Returns:
    bool, in the shape of `env_id`.
  """
  p, q = share
  return env_id % q < p


def parse_share(text: str) -> Share:
  """Return p and q of `p/q`, with 0 < p <= q; `1` is 1/1.

  Raises:
    UsageError: for any other text.
  """
  p, q = 0, 0
  if match := re.fullmatch(r'([0-9]{1,4})(?:/([0-9]{1,4}))?', text):
    p, q = int(match[1]), int(match[2] or 1)
  if not 0 < p <= q <= LARGEST:
    raise UsageError(
      f'--log-share must be a fraction p/q above 0, at most 1 and with q at most {LARGEST}, '
      f'such as 1/2, not {text!r}'
    )
  return p, q
