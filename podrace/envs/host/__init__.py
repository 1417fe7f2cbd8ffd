"""Environments on the host: pools of stateful environments, stepped by actor threads.

Importing this imports nothing: `podrace.envs.host.worker` must run without JAX.
"""
