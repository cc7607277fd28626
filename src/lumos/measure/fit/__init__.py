"""Turning samples into cost models. Needs the extra [fit]."""
