"""What stands between acting and learning. Each function here returns a `podrace.types.Replay`."""

from podrace.replay.on_policy import on_policy

__all__ = ['on_policy']
