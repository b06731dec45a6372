"""Rows, conversations and the order in which they are used."""
