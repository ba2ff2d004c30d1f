"""Tabular: finite Markov decision processes in which every policy is evaluated exactly."""
