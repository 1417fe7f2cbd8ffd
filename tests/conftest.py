"""Eight fake devices, and JAX's strict modes, for every test."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_NUM_CPU_DEVICES'] = '8'

import jax

jax.config.update('jax_debug_key_reuse', True)
jax.config.update('jax_numpy_rank_promotion', 'raise')
