"""The parts of scripts/reproduce.py."""
