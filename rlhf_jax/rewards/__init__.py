"""Rewards: functions of a response and of the example it answers."""
