"""Looks at a run directory: tables and plots from its files. Imports nothing that trains."""
