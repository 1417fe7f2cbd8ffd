"""Replay between acting and learning. `on_policy` and `windows` return a `podrace.types.Replay`."""

from podrace.replay.buffer import Buffer
from podrace.replay.on_policy import on_policy
from podrace.replay.windows import windows

__all__ = ['Buffer', 'on_policy', 'windows']
