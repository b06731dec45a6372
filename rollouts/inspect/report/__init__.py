"""`rollouts report RUN`: one HTML file that shows runs and loads nothing."""
