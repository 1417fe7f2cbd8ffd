"""Parameters over the network: a learner's `Publisher`, and `Parameters` in acting processes.

Imports no JAX. The extra `remote` installs the libraries that it needs.
"""

from podrace.distributed import net

net.require()

from podrace.distributed.parameters.parameter_messages import (  # noqa: E402  # after the check
  ACTING,
  LABELLING,
  REANALYSING,
  Published,
)
from podrace.distributed.parameters.publisher import Publisher  # noqa: E402
from podrace.distributed.parameters.reader import Parameters  # noqa: E402
from podrace.errors import StaleParameters  # noqa: E402

__all__ = [
  'ACTING',
  'LABELLING',
  'REANALYSING',
  'Parameters',
  'Published',
  'Publisher',
  'StaleParameters',
]
