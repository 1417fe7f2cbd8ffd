"""Arrangements of acting and learning: Anakin, Sebulba and discovery."""
