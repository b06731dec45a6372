"""Services that show metrics, fed from a run's files by one process beside it, so that none can stop a run.

run ──► its files ──► follower: a task for each tracker ──► sink ──► service
                        └─ RUN/trackers/NAME.json: how far it is
"""
