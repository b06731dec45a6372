"""Trackers: services that show metrics. Each is fed by a follower of the run's files, in a process of its
own, so that none can stop a run.
"""
