"""Programs of several processes, started together: arrangements of ours, and the engines that start them."""

from podrace.launch.supervisor.local import Local, run

__all__ = ['Local', 'run']
