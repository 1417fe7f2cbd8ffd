"""podrace devices: the devices of this machine, and their roles under Sebulba."""

from __future__ import annotations

from podrace.system.options import Command, Option, Options
from podrace.system.output import print_text

COMMAND = Command(
  'devices',
  '[OPTIONS]',
  'list the devices of JAX, and which of them act and learn under Sebulba',
  (
    Option('--actor-devices', 'NUMBERS', 'devices that act, such as 0,1'),
    Option('--learner-devices', 'NUMBERS', 'devices that learn, such as 2,3'),
    Option('--devices', 'N', 'number of devices to use'),
  ),
  jax=True,
)


def run(args: list[str]) -> int:
  """Print the devices."""
  options = Options(args, COMMAND)
  options.no_arguments()
  number = options.whole('--devices')
  import jax

  from podrace.system.scheduling import cores
  from podrace.topology import split_devices

  topology = split_devices(
    options.text('--actor-devices'), options.text('--learner-devices'), number
  )
  learners = set(topology.local_learners)
  print_text(f'{cores()} cores; JAX {jax.__version__}; devices of this process:')
  for i, device in enumerate(jax.local_devices()):
    names = (('acts', topology.actors), ('learns', learners))
    roles = [name for name, group in names if device in group]
    memory = (device.memory_stats() or {}).get('bytes_limit')
    size = f', {memory / 2**30:.1f} GiB' if memory else ''
    print_text(
      f'  {i}  {device.platform}:{device.device_kind}{size}: {" and ".join(roles) or "idle"}'
    )
  return 0
