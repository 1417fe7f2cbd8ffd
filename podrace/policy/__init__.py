"""Exported policies, usable without training code: with NumPy alone, ONNX Runtime or JAX.

Importing this imports neither jax nor training code.
"""

from podrace.policy.load import RUNTIMES as RUNTIMES
from podrace.policy.load import Policy as Policy
from podrace.policy.load import load_policy as load_policy
