"""A training service: the Tinker API, and ours, over a TrainingBackend and an InferenceEngine."""
