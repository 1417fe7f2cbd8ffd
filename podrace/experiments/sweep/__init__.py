"""Sweeps: many settings of hyper-parameters, each trained, and compared."""
