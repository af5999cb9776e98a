"""Integrations: one module per library, the only module that imports it."""
