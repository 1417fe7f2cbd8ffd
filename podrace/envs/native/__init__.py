"""Environments in C, by one header (`podrace_env.h`), on one pool of threads (`pool.c`).

Importing this imports nothing.
"""
