"""Programs of several processes, started together: arrangements of ours, and the engines that start them."""

from podrace.launch.supervisor.local import Supervisor, run

__all__ = ['Supervisor', 'run']
