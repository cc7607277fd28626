"""Schedules: in which order pipeline stages run their forward and backward passes."""
