"""Environments of other projects, each file one project, whose package is an extra of its own."""
