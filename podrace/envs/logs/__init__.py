"""Recorded episodes as environments. An agent takes the recorded actions there."""
