"""Trajectories of many turns: environments, tools, and programs behind an OpenAI endpoint."""
