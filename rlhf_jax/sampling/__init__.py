"""Rollout: pick a token, decode with a cache, schedule requests."""
