"""A training service from the client's side: a TrainingBackend and an InferenceEngine at a distance."""
