"""Programs of many processes: ready-made arrangements, and the engines that start them."""

from podrace.launch.supervisor.local import Supervisor, run

__all__ = ['Supervisor', 'run']
