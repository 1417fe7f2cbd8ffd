"""Eight fake devices, JAX's strict modes, and one store of compiled programs, for every test."""

import gc
import importlib.metadata
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
# Compiling is most of the suite's time. Workers, and processes that tests start, share what any of
# them has compiled, and so does the next run; `make clean` removes it.
os.environ.setdefault(
  'JAX_COMPILATION_CACHE_DIR', str(Path(__file__).parents[1] / 'build' / 'test-programs')
)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
# Processes that tests start keep their bytecode as well: without it, importing takes 2 to 4 times as long.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
# Lines of source in compiled programs serve debugging alone, and writing them takes time.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
# What is compiled runs for seconds at most: without optimisations, and on one thread of each worker,
# compiling takes a quarter of the time. `make test-all` sets this to nothing, and so compiles as
# users do. XLA ends a process that gives it a flag that it does not have.
os.environ.setdefault(
  'XLA_FLAGS',
  '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'
  + (
    '' if importlib.metadata.version('jaxlib') >= '0.11' else ' --xla_cpu_use_fusion_emitters=false'
  ),
)

import hypothesis
import jax
import pytest
from children import STARTED

# Under nohup SIGHUP is ignored, in the tests' processes as well.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile('podrace', deadline=None)  # nothing here is about speed
hypothesis.settings.load_profile('podrace')

# Tracing allocates so much that the collector takes a tenth of the time with its default thresholds.
gc.set_threshold(200_000, 20, 100)

jax.config.update('jax_debug_key_reuse', True)
jax.config.update('jax_numpy_rank_promotion', 'raise')


# A compiled program holds 1.5 MB and two memory maps. A worker that kept those of all tests would
# need many GB, and 65,530 maps are all that Linux gives a process.
MANY_MAPS = 6_000


def pytest_collection_finish(session: pytest.Session) -> None:
  """Modules and tests live until the end: the collector needs not look at them."""
  gc.collect()
  gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
  """Between two modules, forgets what was compiled if that was much."""
  maps = Path('/proc/self/maps')
  if nextitem is None or nextitem.path == item.path or not maps.exists():
    return
  if len(maps.read_bytes().splitlines()) > MANY_MAPS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def processes_end_with_their_test() -> Iterator[None]:
  """A test that fails leaves none to take the cores of those after it."""
  before = len(STARTED)  # those of fixtures that live longer
  yield
  for process in STARTED[before:]:
    process.kill()
  del STARTED[before:]
