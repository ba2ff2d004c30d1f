"""Scheduling and inventory control: simulators of operations research, stepped as arrays for many instances at once."""
