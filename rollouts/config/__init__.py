"""TOML, validated by frozen pydantic models."""
